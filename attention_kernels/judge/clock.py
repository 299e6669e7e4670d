"""The clock: timed outputs are judged, and two clocks must agree.

A sample is the mean time of calls on sets of inputs. Each set has numbers of its own, new in every
sample, and together they exceed a GPU's L2. With the word to start come factors for all inputs, so
that nothing can be computed earlier. The worker reports the time of all calls by CUDA events, or by
its own clock on the CPU. The judge's clock runs from its word until the answer that everything has
ended, which carries a checksum of the outputs. Then the judge takes the outputs and compares part
of each with the reference. Last, the same calls are repeated for some time, by both clocks. A
kernel that leaves work for later, or a clock that was tampered with, makes the two differ.
"""

from __future__ import annotations

import dataclasses
import secrets
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import torch
from torch import Tensor

from attention_kernels.contract import dtype_name
from attention_kernels.errors import AttentionError
from attention_kernels.judge.calls import Request, checksum, multiply
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.truth import truth
from attention_kernels.judge.worker import Runner, Timing

ROWS = 64  # judged of each timed output
# The share by which the judge's clock may exceed the worker's, and repeated calls the first ones.
# Other processes share a CPU, and interrupt long work more often than short work.
OUTSIDE, REPEATED = {"cuda": 0.1, "cpu": 1.0}, {"cuda": 0.1, "cpu": 9.0}
# The seconds that a message and its answer may take, without and with factors and a checksum. The
# judge measures the time of these and adds it.
ANSWER_S = {"cuda": 1e-3, "cpu": 5e-2}
CHECKED_ANSWER_S = {"cuda": 2e-3, "cpu": 5e-2}
PEAKY = 8.0  # Case.scale
DEVIATIONS = 4  # by which repeated calls may be slower


class RejectedTimeError(AttentionError):
    """A measured time that does not count; the text is the rule that it broke, with its figures."""


class Numbers:
    """Inputs of timed calls: sets of one case, with new numbers in each round."""

    def __init__(self, case: Case | DecodeCase, sets: int) -> None:
        self.case, self.sets = case, sets
        self._round, self._checks_s = 0, 0.0
        self._requests: dict[bool, Request] = {}

    def request(self, number: int, *, contiguous: bool) -> Request:
        """Return the request of a round, the same for all backends with the same layout."""
        if number != self._round:
            self._round, self._requests = number, {}
            self._seed = secrets.randbelow(2**62)
        if contiguous not in self._requests:
            layout = "contiguous" if contiguous else self.case.layout
            case = dataclasses.replace(self.case, layout=layout)
            peaky = self._seed % self.sets  # one of the sets has scores that need their maximum
            cases = [
                dataclasses.replace(
                    case, seed=self._seed + number, scale=PEAKY if number == peaky else case.scale
                )
                for number in range(self.sets)
            ]
            with ThreadPoolExecutor() as pool:  # one core draws 200 million numbers a second
                inputs = [*pool.map(lambda case: case.inputs("cpu"), cases)]
            order = [*range(self.sets)]
            self._requests[contiguous] = Request.of(case, inputs, order=order, clock=True)
        return self._requests[contiguous]

    def checks_s(self, device: str) -> float:
        """Return how many seconds the factors and the checksum of a sample take."""
        if not self._checks_s:
            calls = next(iter(self._requests.values())).calls
            numbers, block = (
                torch.zeros(size, dtype=torch.uint8, device=device)
                for size in (calls.numbers_bytes, calls.taken_bytes)
            )
            outputs = calls.outputs(block)

            def seconds() -> float:
                started = time.perf_counter()
                multiply(numbers, self.case.dtype, seed=0)
                checksum(outputs)  # waits for the device
                return time.perf_counter() - started

            self._checks_s = statistics.median(seconds() for _ in range(3))
        return self._checks_s


class Clock:
    """Times a backend on the numbers of a cell.

    floor_us: the least time of a call that the device allows, in microseconds; 0 if unknown.
    """

    def __init__(self, runner: Runner, numbers: Numbers, *, floor_us: float = 0.0) -> None:
        self.runner, self.numbers, self.floor_us = runner, numbers, floor_us
        self._timings: list[Timing] = []

    def sample(self) -> float:
        """Return microseconds per call, a mean over all sets.

        Raises RejectedTimeError if an output is wrong or the time is too short to be true,
        UnsupportedError, CallError or EndedError.
        """
        contiguous = self.runner.spec.needs_contiguous
        request = self.numbers.request(len(self._timings) + 1, contiguous=contiguous)
        found = self.runner.time(request)
        count = len(found.outputs)
        inside = found.once * 1e6 / count
        self._timings.append(found)
        if checksum(found.outputs) != found.checksum:
            raise RejectedTimeError("the timed outputs changed after the clock had stopped")
        self._judge(request.multiplied(found.seed), found.outputs)
        if inside < self.floor_us:
            raise RejectedTimeError(
                f"its time is beneath what the device can do: {inside:.3g} us, and reading the "
                f"inputs, computing and writing the output take at least {self.floor_us:.3g} us"
            )
        return inside

    def check(self) -> None:
        """Compare the clocks over all samples; raises RejectedTimeError.

        Calls must take as long by the judge's clock as by the worker's. When they are repeated, the
        judge's clock is more precise, but the numbers are no longer new. So a call must not take
        longer then than in the sample that counts.
        """

        def all_of(name: str) -> list[float]:
            return [getattr(timing, name) for timing in self._timings]

        device = self.runner.device
        once, often = all_of("once"), all_of("often")
        passes = statistics.median(all_of("passes"))
        for inside, name, seconds in (
            (once, "once_outside", CHECKED_ANSWER_S[device] + self.numbers.checks_s(device)),
            (often, "often_outside", ANSWER_S[device] / passes),
        ):
            outside = all_of(name)
            if _exceeds(outside, inside, OUTSIDE[device], seconds):
                self._disagree(inside, outside, "from outside")
        # No more than the time itself: a clock that was tampered with can make its times vary.
        spread = min(DEVIATIONS * (_deviation(once) + _deviation(often)), statistics.median(once))
        if _exceeds(often, once, REPEATED[device], spread):
            self._disagree(once, often, "when it is repeated")

    def _disagree(self, first: Sequence[float], second: Sequence[float], when: str) -> NoReturn:
        counts = self.numbers.sets
        us, other = (statistics.median(x) * 1e6 / counts for x in (first, second))
        raise RejectedTimeError(
            f"the clocks disagree: {us:.3g} us per call by its own clock, {other:.3g} us {when} "
            "(another program on the device has the same effect)"
        )

    def _judge(self, sets: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor]) -> None:
        """Judge some rows of every output.

        For attention, the rows are drawn for each sample, the first and the last most often, and
        the head and the batch entry for each output. For decode, as many pairs of a head and a
        batch entry are judged.
        """
        case, spec, device = self.numbers.case, self.runner.spec, self.runner.device
        is_causal, each, rows = False, min(ROWS, case.batch * case.num_heads), slice(None)
        if isinstance(case, Case):
            count = min(ROWS, case.seqlen)
            first = min(max(0, secrets.randbelow(case.seqlen + count) - count), case.seqlen - count)
            is_causal, each, rows = case.is_causal, 1, slice(first, first + count)
        keys = slice(rows.stop if is_causal else None)
        drawn = [
            (place, secrets.randbelow(case.batch), secrets.randbelow(case.num_heads))
            for place in range(len(sets))
            for _ in range(each)
        ]

        def of_all(tensors: Sequence[Tensor], part: slice) -> Tensor:
            found = [tensors[place][entry, part, [head]] for place, entry, head in drawn]
            return torch.stack(found).to(device)

        q, k, v, *seqlens = zip(*sets, strict=True)
        lengths = [
            torch.stack([x[place][entry] for place, entry, _ in drawn]).to(device) for x in seqlens
        ]
        right = truth(
            of_all(q, rows),
            of_all(k, keys),
            of_all(v, keys),
            case.softmax_scale,
            is_causal,
            *lengths,
        )
        precision = spec.precisions[dtype_name(case.dtype)]
        verdict = right.judge(of_all(outputs, rows), precision, spec.error_slack)
        if not verdict.passed:
            raise RejectedTimeError(f"the timed outputs are wrong: {verdict}")


def _deviation(seconds: Sequence[float]) -> float:
    """Return the median distance from the median, which a few odd samples do not change."""
    middle = statistics.median(seconds)
    return statistics.median(abs(x - middle) for x in seconds)


def _exceeds(more: Sequence[float], less: Sequence[float], share: float, seconds: float) -> bool:
    """Return whether the median of `more` is above that of `less` by a share and some seconds."""
    return statistics.median(more) > (1 + share) * statistics.median(less) + seconds
