"""What a call would gain if one cause of its stalls were away, and what that would take.

The causes of the most stalls are taken away one at a time, and the call is simulated again. A gain
is an upper limit: the change that removes the cause may need more instructions.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

from tqdm import tqdm

from attention_kernels.inspection import stalls
from attention_kernels.inspection.asynchronous import is_numbered
from attention_kernels.inspection.blocks import STORES, WARP
from attention_kernels.inspection.multiprocessor import SECTOR, WAVEFRONT, Issued, wavefront_kind
from attention_kernels.inspection.predict import Case, LaunchModel, Prediction, sum_of, time_of
from attention_kernels.inspection.resources import SHARED_UNIT, resident_blocks
from attention_kernels.inspection.sass import Instruction

_MOST = {"conflicts": 2, "sectors": 2, "results": 3, "barrier": 2}  # lines tried per cause
_RESULTS = (stalls.LONG, stalls.SHORT)
_REASONS = {  # stalls that have a cause
    "conflicts": (*_RESULTS, stalls.MIO, stalls.LG),
    "sectors": (stalls.LONG, stalls.LG),
    "results": _RESULTS,
    "barrier": (stalls.BARRIER,),
}
_LEAST = 0.01  # share of the stalls, wavefronts or L1 lines from which a line is tried


class Place(NamedTuple):
    """One kind of stall at one instruction."""

    launch: int
    """Number of the launch."""
    at: int
    """Index of the instruction."""
    reason: str
    cause: int
    """Index of the instruction whose result is awaited, or of the barrier, otherwise `at`."""
    line: int
    """The kernel's own source line; 0 if nvcc gives none."""
    cause_line: int
    share: float
    """Share of the call's stall cycles."""


@dataclass(frozen=True)
class Advice:
    """What the call would gain without one cause of its stalls."""

    cause: str
    """"conflicts", "sectors", "results", "barrier", "tensor cores", "blocks" or "uneven"."""
    line: int
    """The source line of the cause; 0 for the whole kernel."""
    share: float
    """Share of the call's stall cycles that the line causes."""
    reason: str
    """The main reason of those stalls; empty if nothing stalls there."""
    change: str
    """What would be different: "without the barrier"."""
    price: str
    """What that would take, as far as the resources tell; otherwise empty."""
    time_us: float
    """Predicted time of the call with the change."""


@dataclass(frozen=True)
class Call:
    """The launches of a call, and their stalls."""

    case: Case
    models: Sequence[tuple[int, LaunchModel]]
    """Each launch, with how often it occurs."""
    lines: Sequence[Sequence[int]]
    """The kernel's own source line of each launch's instructions."""
    places: Sequence[Place]


@dataclass(frozen=True)
class _Trial:
    """Advice without a time yet."""

    advice: Advice
    chosen: Sequence[frozenset[int]]
    """The instructions of each launch that differ."""


def advise(call: Call, prediction: Prediction) -> list[Advice]:
    """Return what a call would gain without the largest causes, the largest gain first."""
    causes = (_conflicts, _sectors, _results, _barriers, _tensor, _block)
    trials = [trial for tried in causes for trial in tried(call)]
    found = [
        dataclasses.replace(trial.advice, time_us=time)
        for trial, time in zip(trials, _times(call, trials), strict=True)
    ]
    if prediction.uneven_us > 0:
        time = prediction.time_us - prediction.uneven_us
        change = "with work for all multiprocessors until the end"
        found.append(Advice("uneven", 0, 0.0, "", change, "", time))
    return sorted(found, key=lambda one: one.time_us)


def _times(call: Call, trials: Sequence[_Trial]) -> list[float]:
    """Return the predicted time of each trial; they are simulated in parallel."""
    if not trials:
        return []
    workers = min(len(trials), os.cpu_count() or 1)
    # A fork has the launches, which are large, without a copy. The simulation takes no locks, so
    # it does not matter to it that this process may have threads.
    pool = ProcessPoolExecutor(workers, get_context("fork"), _calls.append, (call,))
    with warnings.catch_warnings(), pool:
        warnings.simplefilter("ignore", DeprecationWarning)
        times = pool.map(_time, trials)
        bar = tqdm(times, "what it would gain", len(trials), unit="", disable=None, leave=False)
        return [*bar]


_calls: list[Call] = []  # the last one is that of the worker process


def _time(trial: _Trial) -> float:
    call = _calls[-1]
    each = [
        (count, time_of(changed(model, trial.advice.cause, chosen)))
        for (count, model), chosen in zip(call.models, trial.chosen, strict=True)
    ]
    return sum_of(each, call.case).time_us


# ---- What is tried -------------------------------------------------------------------------------


def _conflicts(call: Call) -> Iterator[_Trial]:
    """Yield the lines with the most wavefronts that only bank conflicts make necessary.

    If several lines have them, they are taken away from all lines at once, too: one change, such as
    padding, may do that.
    """
    fewest: Counter[int] = Counter()  # by line
    extra: Counter[int] = Counter()
    for (count, model), lines in zip(call.models, call.lines, strict=True):
        for work in model.line.works:
            for at, wavefronts, _, _ in (one for warp in work.warps for one in warp):
                if wavefronts:
                    least = min(wavefronts, model.line.fewest[at])
                    fewest[lines[at]] += count * least
                    extra[lines[at]] += count * (wavefronts - least)
    limit = _LEAST * (fewest.total() + extra.total())
    for line, more in extra.most_common(_MOST["conflicts"]):
        if more > limit:
            ways = (fewest[line] + more) / fewest[line]
            yield _trial(call, "conflicts", line, f"without bank conflicts (now {ways:.3g}-way)")
    if len(extra) > 1 and extra.total() - max(extra.values()) > limit:
        advice = Advice("conflicts", 0, 0.0, "", "without any bank conflict", "", 0.0)
        yield _Trial(advice, [frozenset(model.line.fewest) for _, model in call.models])


def _sectors(call: Call) -> Iterator[_Trial]:
    """Yield the lines with the most L1 cache lines that only scattered addresses make necessary."""
    total = 0
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by line of the source
    for (count, model), of in zip(call.models, call.lines, strict=True):
        for work in model.line.works:
            for at, _, lines, _ in (one for warp in work.warps for one in warp):
                total += count * lines
                fewest = _fewest_lines(model.code[at])
                if lines > fewest:
                    found[of[at]].update(requests=count, fewest=count * fewest, lines=count * lines)
    extra = {line: counts["lines"] - counts["fewest"] for line, counts in found.items()}
    for line in sorted(extra, key=lambda line: -extra[line])[: _MOST["sectors"]]:
        if extra[line] > _LEAST * total:
            each = {name: n / found[line]["requests"] for name, n in found[line].items()}
            request = f"a request touches {each['lines']:.3g} lines of 128 bytes"
            request += f", {each['fewest']:.3g} would do"
            yield _trial(call, "sectors", line, f"if it coalesced ({request})")


def _fewest_lines(one: Instruction) -> int:
    """Return the L1 cache lines that a request needs if its lanes are next to each other."""
    return max(1, WARP * one.size // WAVEFRONT)


def _results(call: Call) -> Iterator[_Trial]:
    """Yield the lines whose results are awaited longest."""
    found = _shares((one.cause_line, one) for one in call.places if one.reason in _RESULTS)
    for line in found[: _MOST["results"]]:
        yield _trial(call, "results", line, "without waiting for its results")


def _barriers(call: Call) -> Iterator[_Trial]:
    """Yield the barriers at which warps wait longest."""
    found = _shares((one.cause_line, one) for one in call.places if one.reason == stalls.BARRIER)
    for line in found[: _MOST["barrier"]]:
        yield _trial(call, "barrier", line, "without the barrier")


def _tensor(call: Call) -> Iterator[_Trial]:
    if any(model.total["tensor"] or model.total["products"] for _, model in call.models):
        yield _trial(call, "tensor cores", 0, "with tensor cores twice as fast")


def _block(call: Call) -> Iterator[_Trial]:
    """Yield one more block per multiprocessor, if the launch with most of the stalls has it."""
    shares: defaultdict[int, float] = defaultdict(float)
    for one in call.places:
        shares[one.launch] += one.share
    if shares:
        number = max(shares, key=lambda launch: shares[launch])
        model = call.models[number][1]
        price = price_of(model, model.fits + 1)
        if price and model.fits < model.most:
            change = f"with {model.fits + 1} blocks per multiprocessor, not {model.fits}"
            found = _trial(call, "blocks", 0, change, price)
            chosen = [frozenset([0]) if i == number else frozenset() for i in range(len(shares))]
            yield dataclasses.replace(found, chosen=chosen)


def price_of(model: LaunchModel, blocks: int) -> str:
    """Return the registers and the shared memory with which as many blocks fit, or ""."""
    arch, threads = model.gpu.arch, model.launch.threads
    registers = model.registers
    while registers and resident_blocks(arch, threads, registers, 0)[0] < blocks:
        registers -= 1
    shared = model.shared
    while shared >= 0 and resident_blocks(arch, threads, 1, shared)[0] < blocks:
        shared -= SHARED_UNIT
    if not registers or shared < 0:
        return ""
    prices = [
        f"{most} {unit}, not {now}"
        for most, now, unit in (
            (registers, model.registers, "registers per thread"),
            (shared, model.shared, "bytes of shared memory per block"),
        )
        if most < now
    ]
    return f"at most {' and '.join(prices)}"


def _shares(found: Iterable[tuple[int, Place]]) -> list[int]:
    """Return the lines with more than a hundredth of the stalls, the worst first."""
    shares: defaultdict[int, float] = defaultdict(float)
    for line, place in found:
        shares[line] += place.share
    worst = sorted(shares, key=lambda line: -shares[line])
    return [line for line in worst if line and shares[line] > _LEAST]


def _trial(call: Call, cause: str, line: int, change: str, price: str = "") -> _Trial:
    """Return a trial of a change to every instruction of a line, with the stalls it causes."""
    reasons: defaultdict[str, float] = defaultdict(float)
    for place in call.places:
        if line and place.cause_line == line and place.reason in _REASONS[cause]:
            reasons[place.reason] += place.share
    reason = max(reasons, key=lambda name: reasons[name], default="")
    chosen = [
        frozenset(at for at, other in enumerate(lines) if line and other == line)
        for lines in call.lines
    ]
    advice = Advice(cause, line, sum(reasons.values()), reason, change, price, 0.0)
    return _Trial(advice, chosen)


# ---- Changes -------------------------------------------------------------------------------------


def changed(model: LaunchModel, cause: str, chosen: frozenset[int]) -> LaunchModel:
    """Return a launch without a cause at some of its instructions."""
    if cause == "tensor cores":
        faster = dataclasses.replace(
            model.gpu,
            tensor_cycles=model.gpu.tensor_cycles / 2,
            warpgroup_flop=model.gpu.warpgroup_flop * 2,
        )
        return dataclasses.replace(model, gpu=faster)
    if not chosen:
        return model
    if cause == "blocks":
        return dataclasses.replace(model, fits=model.fits + 1)
    if cause in ("conflicts", "sectors"):
        least = _without_conflicts if cause == "conflicts" else _coalesced
        return _with_less(model, chosen, least)
    code = [*model.code]
    for at in chosen:
        one = code[at]
        if cause == "barrier":
            # The other warps still count on its arrival at a numbered barrier.
            name = "BAR.ARV" if is_numbered(one) else "NOP"
            code[at] = dataclasses.replace(one, name=name) if one.base == "BAR" else one
        else:
            code[at] = dataclasses.replace(one, writes=7)
    found = dataclasses.replace(model, code=code)
    return found if cause == "barrier" else _with_copies_in_l1(found, chosen)


def _without_conflicts(one: Issued, model: LaunchModel) -> Issued:
    """Return a request that needs as few wavefronts as its bytes allow."""
    at, wavefronts, lines, misses = one
    return at, min(wavefronts, model.line.fewest[at]), lines, misses


def _coalesced(one: Issued, model: LaunchModel) -> Issued:
    """Return a request whose lanes are next to each other.

    All sectors that a block loads still come from L2, because other requests use the rest of them.
    """
    at, wavefronts, lines, misses = one
    code = model.code[at]
    if code.base in STORES:
        misses = min(misses, max(1, WARP * code.size // SECTOR))
    return at, wavefronts, min(lines, _fewest_lines(code)), misses


def _with_less(
    model: LaunchModel, chosen: frozenset[int], least: Callable[[Issued, LaunchModel], Issued]
) -> LaunchModel:
    """Return a launch in which some requests need less."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()

    def change(one: Issued) -> Issued:
        found = least(one, model) if one[0] in chosen else one
        kinds = wavefront_kind(model.code[one[0]]), "lines", "misses"
        for kind, old, new in zip(kinds, one[1:], found[1:], strict=True):
            before[kind] += old
            after[kind] += new
        return found

    found = _with_work(model, change)
    total = defaultdict(float, model.total)
    for kind, count in before.items():
        total[kind] *= after[kind] / max(1, count)
    return dataclasses.replace(found, total=total)


def _with_copies_in_l1(model: LaunchModel, chosen: frozenset[int]) -> LaunchModel:
    """Return a launch whose asynchronous copies find their data in L1."""
    asynchronous = ("LDGSTS", "UTMALDG", "UBLKCP")
    copies = {at for at in chosen if model.code[at].base in asynchronous}
    if not copies:
        return model
    return _with_work(model, lambda one: (*one[:3], 0) if one[0] in copies else one)


def _with_work(model: LaunchModel, change: Callable[[Issued], Issued]) -> LaunchModel:
    works = [
        dataclasses.replace(work, warps=[[change(one) for one in warp] for warp in work.warps])
        for work in model.line.works
    ]
    return dataclasses.replace(model, line=dataclasses.replace(model.line, works=works))
