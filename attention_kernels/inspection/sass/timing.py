"""Time a launch: the cycles of one multiprocessor with its blocks, then the grid on all of them.

The blocks of the grid are assigned to multiprocessors as these become free. docs/prediction.md says
what is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.launches import WARP, Launch
from attention_kernels.inspection.resources import reserved_first, resident_blocks
from attention_kernels.inspection.sass import execute
from attention_kernels.inspection.sass.decode import Instruction
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.grid import Line, line_of
from attention_kernels.inspection.sass.multiprocessor import SCHEDULERS, SECTOR, Work, cycles_of
from attention_kernels.inspection.sass.program import Program
from attention_kernels.inspection.sass.stalls import Stalls, Watch

_MAX_TIMED = 100_000  # instructions timed; the rest are assumed to run at the same pace
_MAX_OBSERVED = 200_000  # instructions in which stalls are recorded
LOAD_STORE_UNIT = "load-store unit"
"""The unit that issues one wavefront a cycle: of shared memory, of an L1 line or of a shuffle."""
_LOAD_STORE_PARTS = ("shared memory", "L1")


@dataclass(frozen=True)
class Prediction:
    """The prediction for one call of a version, or for one launch. Times are in microseconds."""

    version: str
    gpu: str
    seqlen: int
    time_us: float
    needs_us: dict[str, float]
    """Time that each resource would need if it were always busy on all multiprocessors."""
    waiting_us: float
    """Time beyond the longest need: warps wait for results, for barriers, for each other."""
    uneven_us: float
    """Time in which some multiprocessors idle: the last wave, and blocks of unequal length."""
    launch_us: float
    launches: int
    instructions: int
    """Instructions executed by all warps."""
    load_wavefronts: int
    store_wavefronts: int
    assumed: tuple[str, ...] = ()
    """What was assumed for lack of data, such as the meaning of an instruction."""
    stalls: Stalls | None = None
    """What warps wait for, by source line, if that was asked for."""

    @property
    def bound(self) -> str:
        """The name of the largest part of the time."""
        most = max(self.needs_us, key=lambda name: self.needs_us[name])
        parts = {most: self.needs_us[most], "latency": self.waiting_us}
        parts |= {"uneven blocks": self.uneven_us, "launch": self.launch_us}
        found = max(parts, key=lambda name: parts[name])
        if found == LOAD_STORE_UNIT:  # name the part that causes most of its work
            half = self.needs_us[LOAD_STORE_UNIT] / 2
            found = next((x for x in _LOAD_STORE_PARTS if self.needs_us[x] > half), found)
        return found


# ---- Launches ------------------------------------------------------------------------------------


def _finish(
    line: Line, gpu: GpuModel, alone: float, paces: Sequence[float], extra: float
) -> tuple[float, float]:
    """Return the cycles until the last multiprocessor finishes, and with the work shared equally.

    alone: cycles per instruction of a block that has a multiprocessor to itself. paces: those of
    each block, the oldest first, on a full multiprocessor. extra: additional cycles per block.
    Blocks start in order, each on the first multiprocessor with room.
    """
    waiting = [
        line.value(p, "issue") + (extra / alone if line.value(p, "misses") else 0.0)
        for _ in range(line.repeats)
        for p in reversed(range(line.length))
        for _ in range(line.alike)
    ]
    total = sum(waiting)
    fits = len(paces)
    some = [
        [alone + (pace - alone) * (count - 1) / max(1, fits - 1) for pace in paces[:count]]
        for count in range(fits + 1)
    ]
    places: list[list[float]] = [[] for _ in range(gpu.multiprocessors)]
    for _ in paces:
        for place in places:
            if waiting:
                place.append(waiting.pop())

    def event(number: int, now: float) -> tuple[float, int, float, int]:
        place = places[number]
        ends = [w * pace for w, pace in zip(place, some[len(place)], strict=True)]
        first = min(range(len(place)), key=ends.__getitem__)
        return now + ends[first], number, now, first

    events = [event(number, 0.0) for number, place in enumerate(places) if place]
    heapq.heapify(events)
    end = 0.0
    while events:
        end, number, since, first = heapq.heappop(events)
        place = places[number]
        for i, pace in enumerate(some[len(place)]):
            place[i] -= (end - since) / pace
        del place[first]
        if waiting:
            place.append(waiting.pop())
        if place:
            heapq.heappush(events, event(number, end))
    return end, total / sum(1 / pace for pace in paces) / gpu.multiprocessors


def _alone(model: LaunchModel, gpu: GpuModel, miss: float) -> tuple[float, float]:
    """Return the cycles per instruction of a block that runs alone, and its additional cycles.

    If the blocks differ in length, two lengths are timed: the difference is the iterations that
    only the longer one executes.
    """
    short, *longer = _by_length(model.line.works)
    first, few = cycles_of(gpu, model.code, [short], miss, _MAX_TIMED)
    if not longer:
        return first / sum(few), 0.0
    cycles, issued = cycles_of(gpu, model.code, [_longest(longer, _MAX_TIMED)], miss)
    per = (cycles - first) / (sum(issued) - sum(few))
    return per, max(0.0, first - per * sum(few))


def _together(model: LaunchModel, gpu: GpuModel, miss: float, count: int) -> list[float]:
    """Return cycles per instruction of `count` blocks on one multiprocessor, the oldest first."""
    short, *longer = _by_length(model.line.works)
    work, most = short, min(_MAX_TIMED, short.instructions * count)
    if longer:  # time half of the blocks' instructions
        work = _longest(longer, 2 * _MAX_TIMED // count)
        most = work.instructions * count // 2
    cycles, issued = cycles_of(gpu, model.code, [work] * count, miss, most)
    return [cycles / one for one in issued]


def _observe(model: LaunchModel, miss: float, count: int, watch: Watch) -> None:
    """Record the stalls of `count` blocks of average length on one multiprocessor.

    They start at different points, and each is followed by another block until all of a block has
    been executed: beginnings and ends count as often as they occur.
    """
    mean = model.total["issue"] / model.busy
    works = [work for work in model.line.works if work.instructions * count <= _MAX_OBSERVED]
    shortest = min(model.line.works, key=lambda work: work.instructions)
    work = min(works or [shortest], key=lambda work: abs(work.instructions - mean))
    starts = (work.parts[len(work.parts) * number // count] for number in range(count))
    blocks = [
        dataclasses.replace(
            work, warps=[warp[at:] + warp[:at] for warp, at in zip(work.warps, start, strict=True)]
        )
        for start in starts
    ]
    cycles_of(model.gpu, model.code, blocks, miss, watch=watch)


def _by_length(works: Sequence[Work]) -> list[Work]:
    """Return the shortest work, then those over 1.5 times as long, in order of length."""
    short, *longer = sorted(works, key=lambda work: work.instructions)
    return [short, *(work for work in longer if work.instructions > 1.5 * short.instructions)]


def _longest(works: Sequence[Work], most: int) -> Work:
    """Return the longest work within a limit of instructions; the shortest if none is."""
    return next((work for work in reversed(works) if work.instructions <= most), works[0])


@dataclass(frozen=True)
class LaunchModel:
    """All that the predicted time of a launch depends on."""

    version: str
    gpu: GpuModel
    launch: Launch
    code: Sequence[Instruction]
    fits: int
    """Blocks that a multiprocessor has room for."""
    line: Line
    total: dict[str, float]
    """Counts of the whole grid."""
    min_bytes: float
    """Bytes that have to pass between the GPU and its memory."""

    @functools.cached_property
    def busy(self) -> int:
        """Blocks that have work."""
        line = self.line
        once = sum(1 for p in range(line.length) if line.value(p, "misses"))
        return line.alike * line.repeats * once

    @functools.cached_property
    def most(self) -> int:
        """Blocks that a multiprocessor gets if all are shared out equally."""
        return -(-self.busy // self.gpu.multiprocessors)


def model_of(
    program: Program, launch: Launch, min_bytes: float, *, as_accessed: bool = False
) -> LaunchModel:
    """Execute some blocks of a launch; raises UnsupportedError if no block fits on the GPU.

    as_accessed: a block has as much dynamic shared memory as it accesses.
    """
    gpu, compiled = program.gpu, program.compiled[launch.symbol]
    line = line_of(program, launch)
    if as_accessed:
        dynamic = max(0, line.shared_end - reserved_first(gpu.arch) - compiled.static_smem)
        launch = dataclasses.replace(launch, dynamic_smem=dynamic)
    shared = compiled.static_smem + launch.dynamic_smem
    fits, limit = resident_blocks(gpu.arch, launch.threads, compiled.registers, shared)
    if fits == 0:
        reason = f"a block does not fit on a multiprocessor of {gpu.name}: too much {limit}"
        raise UnsupportedError(program.path.name, [reason])
    names = {*itertools.chain(*line.samples.values())}
    total = defaultdict(float, {name: line.total(name) for name in names})
    code = program.code[launch.symbol]
    return LaunchModel(program.label, gpu, launch, code, fits, line, total, min_bytes)


def _paced(gpu: GpuModel, from_memory: float, share: float) -> GpuModel:
    """Return the GPU with the pace of one multiprocessor's sectors, from L2 and from memory.

    share: of memory's bandwidth, which all resident blocks divide among them.
    """
    memory = share * gpu.memory_gb_s / gpu.clock_ghz  # bytes per cycle
    l2 = gpu.l2_bytes_per_cycle / gpu.multiprocessors
    pace = 1 / ((1 - from_memory) / l2 + from_memory / memory)
    return dataclasses.replace(gpu, l2_bytes_per_cycle=pace * gpu.multiprocessors)


def time_of(model: LaunchModel, watch: Watch | None = None) -> Prediction:
    """Simulate a launch. watch: records the stalls on a multiprocessor with all of its blocks."""
    gpu, line, total = model.gpu, model.line, model.total
    # Blocks that start together request the inputs they share at the same time, and all wait for
    # memory. So does the one block that requests what no other does. The output of an earlier
    # launch is in L2.
    at_once = model.fits * gpu.multiprocessors / max(1, model.busy)
    l2_bytes = total["misses"] * SECTOR
    from_memory = min(1.0, model.min_bytes / max(1.0, l2_bytes))
    cold = line.inputs * min(1.0, max(at_once, from_memory))
    fits = min(model.fits, model.most)
    miss = gpu.l2_latency + cold * (gpu.memory_latency - gpu.l2_latency)
    end = equal = 0.0
    if line.works:
        resident = min(model.busy, fits * gpu.multiprocessors)
        one, full = (_paced(gpu, from_memory, count / resident) for count in (1, fits))
        alone, extra = _alone(model, one, miss)
        paces = _together(model, full, miss, fits) if fits > 1 else [alone]
        if watch:
            _observe(model, miss, fits, watch)
        end, equal = _finish(line, gpu, alone, paces, extra)
    products = total["products"] / gpu.warpgroup_flop / gpu.multiprocessors
    hertz = gpu.clock_at(products / max(end, products, 1.0)) * 1e3  # cycles per microsecond
    rate = gpu.multiprocessors * hertz
    lines = total["lines"]
    wavefronts = sum(total[kind] for kind in ("loads", "stores", "copies"))
    integer = total["integer"] + total["multiply"]
    tensor = total["tensor"] * gpu.tensor_cycles / SCHEDULERS
    tensor += total["products"] / gpu.warpgroup_flop
    needs = {
        "issue slots": total["issue"] / SCHEDULERS / rate,
        "float32 arithmetic": total["fma"] * WARP / gpu.fp32_lanes / rate,
        "integer arithmetic": integer * WARP / gpu.integer_lanes / rate,
        "special functions": total["special"] * WARP / gpu.special_lanes / rate,
        "tensor cores": tensor / rate,
        LOAD_STORE_UNIT: (wavefronts + lines + total["shuffle"]) / rate,
        "shared memory": (wavefronts + total["tiles"] + total["operands"]) / rate,
        "L1": lines / rate,
        "L2": l2_bytes / gpu.l2_bytes_per_cycle / hertz,
        "memory": model.min_bytes / gpu.memory_gb_s / 1e3,
    }
    assumed = execute.assumed([model.code[at] for at in sorted(line.executed)])
    busiest = max(needs.values())
    finished = max(end / hertz, busiest)
    balanced = min(max(equal / hertz, busiest), finished)
    return Prediction(
        version=model.version,
        gpu=gpu.name,
        seqlen=0,
        time_us=finished + gpu.launch_us,
        needs_us=needs,
        waiting_us=balanced - busiest,
        uneven_us=finished - balanced,
        launch_us=gpu.launch_us,
        launches=1,
        instructions=round(total["issue"]),
        load_wavefronts=round(total["loads"]),
        store_wavefronts=round(total["stores"]),
        assumed=tuple(f"{name} is integer arithmetic with the result 0" for name in assumed),
    )


def sum_of(each: Sequence[tuple[int, Prediction]], seqlen: int) -> Prediction:
    """Add up the predictions of a call's launches, given how often each occurs."""
    first = each[0][1]
    needs = {
        name: sum(count * one.needs_us[name] for count, one in each) for name in first.needs_us
    }
    added: dict[str, Any] = {
        field.name: sum(count * getattr(one, field.name) for count, one in each)
        for field in dataclasses.fields(Prediction)
        if field.name not in ("version", "gpu", "seqlen", "needs_us", "assumed", "stalls")
    }
    assumed = tuple(dict.fromkeys(itertools.chain(*(one.assumed for _, one in each))))
    return dataclasses.replace(first, seqlen=seqlen, needs_us=needs, assumed=assumed, **added)
