"""The clock: timed outputs are judged, and two clocks must agree.

A sample is the mean time of calls on sets of inputs. Each set has numbers of its own, new in every
sample, and together they exceed a GPU's L2. With the word to start come factors for all inputs, so
that nothing can be computed earlier, and the inputs of a call depend on all of the output before,
so that no two calls run at the same time; see chain(). The worker reports the time of all calls by
CUDA events, or by its own clock on the CPU. The judge's clock runs from its word until the answer
that everything has ended, which comes with the sum of the bits of each row. Then the judge takes
the outputs, which must have these sums, and compares part of each with the reference.

Last, the same calls are repeated for some time, by both clocks. The answer comes with the sum of
each output, from which the inputs of the next call follow. So the judge can have any of these calls
made again: the output must have the same sum, and be right. A kernel that leaves work for later or
out, or a clock that was tampered with, makes the sums or the clocks differ.

On CUDA, a time is the worker's, because the judge's clock is too coarse for the first calls, and
may be shorter than the judge's by OUTSIDE and ANSWER_S at most. On the CPU, it is the judge's own,
of the repeated calls. The judge measures what the chain takes and subtracts it.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from attention_kernels.errors import RejectedTimeError
from attention_kernels.judge import calls
from attention_kernels.judge.caller import Timed
from attention_kernels.judge.calls import Request
from attention_kernels.judge.inputs import Case, DecodeCase, Kind
from attention_kernels.judge.suite import judge_rows
from attention_kernels.judge.worker import Runner, Timing

# The share by which the judge's clock may exceed the worker's, and repeated calls the first ones.
# Other processes share a CPU, and interrupt long work more often than short work.
OUTSIDE, REPEATED = {"cuda": 0.1, "cpu": 1.0}, {"cuda": 0.1, "cpu": 9.0}
# The seconds that a message and its answer may take, without and with factors and row_sums(). The
# judge measures the time of these and adds it.
ANSWER_S = {"cuda": 1e-3, "cpu": 5e-2}
CHECKED_ANSWER_S = {"cuda": 2e-3, "cpu": 5e-2}
DEVIATIONS = 4  # by which repeated calls may be slower
# The kinds of numbers, in turn: the third is that of the second round, which is not a warm-up.
KINDS: tuple[Kind, ...] = (
    "uniform",
    "large mean",
    "normal",
    "peaky",
    "near-equal keys",
    "one-hot keys",
    "heavy-tailed",
    "trained",
)
# The share by which the times of two kinds may differ before the data count as the cause, and the
# least samples of each kind.
DEPENDS, SAMPLES_OF_KIND = {"cuda": 0.03, "cpu": 0.3}, {"cuda": 1, "cpu": 2}
# The share of the chained time above which calls count as overlapping without the chain.
OVERLAPS = 0.95
FLUSHED_BYTES, CHAIN_RUNS = 2**28, 9  # of memory, to empty the L2 before each run of a chain


class Numbers:
    """Inputs of timed calls on a device: sets of one case, with new numbers in each round."""

    def __init__(self, case: Case | DecodeCase, sets: int, device: str) -> None:
        self.case, self.sets, self.device = case, sets, device
        self._round = 0
        self._requests: dict[bool, Request] = {}

    def request(self, number: int, *, contiguous: bool) -> Request:
        """Return the request of a round, the same for all backends with the same layout."""
        if number != self._round:
            self._round, self._requests = number, {}
            self._seed = secrets.randbelow(2**62)
        if contiguous not in self._requests:
            layout = "contiguous" if contiguous else self.case.layout
            case = dataclasses.replace(self.case, layout=layout)
            kind = KINDS[number % len(KINDS)]
            peaky = self._seed % self.sets  # one of the sets has scores that need their maximum
            cases = [
                dataclasses.replace(
                    case, seed=self._seed + place, kind="peaky" if place == peaky else kind
                )
                for place in range(self.sets)
            ]
            with ThreadPoolExecutor() as pool:  # one core draws 200 million numbers a second
                inputs = [*pool.map(lambda case: case.inputs("cpu"), cases)]
            order = [*range(self.sets)]
            self._requests[contiguous] = Request.of(case, inputs, order=order, clock=True)
        return self._requests[contiguous]

    @functools.cached_property
    def checks_s(self) -> float:
        """The seconds that the factors and the row_sums() of a sample take."""
        timed = next(iter(self._requests.values())).calls
        numbers, block = (
            torch.zeros(size, dtype=torch.uint8, device=self.device)
            for size in (timed.numbers_bytes, timed.taken_bytes)
        )
        outputs = timed.outputs(block)

        def seconds() -> float:
            started = time.perf_counter()
            calls.multiply(numbers, self.case.dtype, seed=0)
            calls.row_sums(outputs).cpu()
            return time.perf_counter() - started

        return statistics.median(seconds() for _ in range(3))

    @functools.cached_property
    def chain_s(self) -> float:
        """The seconds of a pass that the chain takes, with nothing of k in the L2.

        On CUDA, it is that of a graph also where the backend allows none, where the host may take
        longer to launch four kernels: so no backend's time gets too short.
        """
        timed = next(iter(self._requests.values())).calls
        block = torch.zeros(timed.given_bytes, dtype=torch.uint8, device=self.device)
        o = torch.zeros(timed.sets[0][0].shape, dtype=self.case.dtype, device=self.device)
        alone = Timed(lambda *_: o, block, timed, graph=True)
        size, passes = (FLUSHED_BYTES, 1) if self.device == "cuda" else (0, 10)
        flushed = torch.empty(size, dtype=torch.uint8, device=self.device)

        def seconds() -> float:
            flushed.zero_()
            return alone.run(passes) / passes

        # The least: noise only adds to it, and would make the times of calls shorter.
        return min(seconds() for _ in range(CHAIN_RUNS))


class Clock:
    """Times a backend on the numbers of a cell.

    floor_us: the least time of a call that the device allows, in microseconds; 0 if unknown.
    """

    def __init__(self, runner: Runner, numbers: Numbers, *, floor_us: float = 0.0) -> None:
        self.runner, self.numbers, self.floor_us = runner, numbers, floor_us
        self._timings: list[Timing] = []
        self.notes: dict[str, Any] = {}
        """What check() says of the times beside them."""

    def sample(self) -> float:
        """Return microseconds per call, a mean over all sets.

        Raises RejectedTimeError if an output is wrong or the time is too short to be true,
        UnsupportedError, CallError or EndedError.
        """
        contiguous, device = self.runner.spec.needs_contiguous, self.runner.device
        request = self.numbers.request(len(self._timings) + 1, contiguous=contiguous)
        if device == "cuda":
            calls.clear_persisting_l2()
        found = self.runner.time(request, self._timings[-1].passes if self._timings else 1)
        self._timings.append(found)
        self._judge_all(request, found)
        if found.fault:
            raise RejectedTimeError(found.fault)
        seconds = found.once
        if device == "cpu":
            seconds = found.often_outside
            if not found.is_reproducible:  # nothing proves that all of those calls were made
                seconds = found.once_outside - self.numbers.checks_s
        us = self._us(seconds)
        if us < self.floor_us or us <= 0:
            raise RejectedTimeError(
                f"its time is beneath what the device can do: {us:.3g} us, and reading the "
                f"inputs, computing and writing the output take at least {self.floor_us:.3g} us"
            )
        return us

    def _us(self, seconds: float) -> float:
        """Return the microseconds of a call, given the seconds of a pass with its chain."""
        return (seconds - self.numbers.chain_s) * 1e6 / self.numbers.sets

    def check(self) -> None:
        """Compare the clocks over all samples, and note what else the times say.

        Calls must take as long by the judge's clock as by the worker's. When they are repeated, the
        judge's clock is more precise, but the numbers are no longer new. So a call must not take
        longer then than in the sample that counts, nor, on the CPU, where the repeated calls
        count, longer in the sample. What is forgiven comes from the judge's clock alone. Raises
        RejectedTimeError.
        """

        def all_of(name: str) -> list[float]:
            return [getattr(timing, name) for timing in self._timings]

        device = self.runner.device
        once, often = all_of("once"), all_of("often")
        once_outside, often_outside = all_of("once_outside"), all_of("often_outside")
        answer = ANSWER_S[device] / statistics.median(all_of("passes"))
        checked = CHECKED_ANSWER_S[device] + self.numbers.checks_s
        repeated = statistics.median(often_outside)
        # No more than a share: a kernel can make its times vary.
        spread = min(DEVIATIONS * _deviation(often_outside), OUTSIDE["cuda"] * repeated)
        for less, more, share, seconds, when in (
            (once, once_outside, OUTSIDE[device], checked, "from outside"),
            (often, often_outside, OUTSIDE[device], answer, "from outside"),
            (often_outside, once_outside, REPEATED[device], checked + spread, "the first time"),
            (once, often_outside, REPEATED[device], answer + spread, "when it is repeated"),
        ):
            if _exceeds(more, less, share, seconds):
                us, other = (statistics.median(x) * 1e6 / self.numbers.sets for x in (less, more))
                clock = "its own clock" if less in (once, often) else "the judge's clock"
                raise RejectedTimeError(
                    f"the clocks disagree: {us:.3g} us per call by {clock}, {other:.3g} us {when} "
                    "(another program on the device has the same effect)"
                )
        self._note()

    def _note(self) -> None:
        """Note the time of a call if calls overlap, or if it depends on the kind of numbers.

        The times are those of repeated calls: for the first by the judge's clock, and for the
        second, on CUDA, by the worker's, which is more precise. Repeated rounds of a kind show
        their noise, without which times on a CPU say nothing.
        """
        is_cuda = self.runner.device == "cuda"
        unchained = [timing.unchained_outside * 1e6 / self.numbers.sets for timing in self._timings]
        overlapping = statistics.median(unchained)
        chained = [self._us(timing.often_outside) for timing in self._timings]
        often = [self._us(timing.often) for timing in self._timings] if is_cuda else chained
        if overlapping < OVERLAPS * statistics.median(chained):
            self.notes["overlapping_us"] = overlapping
        if not all(timing.is_reproducible for timing in self._timings):
            self.notes["is_reproducible"] = False
        by_kind: dict[str, list[float]] = {}
        for number, us in enumerate(often[1:], 2):  # the first sample is a warm-up
            by_kind.setdefault(KINDS[number % len(KINDS)], []).append(us)
        times = {kind: statistics.median(found) for kind, found in by_kind.items()}
        fast, slow = (most(times, key=times.__getitem__) for most in (min, max))
        noise = DEVIATIONS * statistics.median(map(_deviation, by_kind.values()))
        if min(map(len, by_kind.values())) >= SAMPLES_OF_KIND[self.runner.device] and _exceeds(
            by_kind[slow], by_kind[fast], DEPENDS[self.runner.device], noise
        ):
            self.notes["depends_us"] = {kind: times[kind] for kind in (fast, slow)}

    def _judge_all(self, request: Request, timing: Timing) -> None:
        """Judge all calls with new numbers, and some others."""
        sets = request.multiplied(timing.seed)
        weights, outputs = calls.chain_weights(sets[0][1]), timing.outputs
        for o, (_, k, *_) in zip(outputs, sets[1:], strict=False):
            calls.chain(o, k, weights)
        self._judge(sets, outputs)
        if timing.unchained:
            calls.chain(outputs[-1], sets[0][1], weights)
            self._judge([sets[n] for n in timing.unchained], [*timing.unchained.values()])
        for again in timing.again:
            calls.set_signs(sets[again.call][1], weights, again.before)
            self._judge([sets[again.call]], [again.output])

    def _judge(self, sets: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor]) -> None:
        """Judge some rows of timed calls: of a head, or for decode of all heads."""
        case, runner = self.numbers.case, self.runner
        each = 1 if isinstance(case, Case) else case.batch * case.num_heads
        verdict = judge_rows(
            runner, case, sets, outputs, secrets.randbelow, each=each, device=runner.device
        )
        if not verdict.passed:
            raise RejectedTimeError(f"the timed outputs are wrong: {verdict}")


def _deviation(seconds: Sequence[float]) -> float:
    """Return the median distance from the median, which a few odd samples do not change."""
    middle = statistics.median(seconds)
    return statistics.median(abs(x - middle) for x in seconds)


def _exceeds(more: Sequence[float], less: Sequence[float], share: float, seconds: float) -> bool:
    """Return whether the median of `more` is above that of `less` by a share and some seconds."""
    return statistics.median(more) > (1 + share) * statistics.median(less) + seconds
