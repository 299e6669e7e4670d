"""Predict how long a kernel takes on a GPU, and what limits it, without running it there.

sass.py executes nvcc's machine code and returns the instructions of each warp, with their
wavefronts and sectors. A model of one multiprocessor issues them cycle by cycle, with the stalls
and scoreboards that nvcc encoded in them; then the blocks of the grid are assigned to
multiprocessors as these become free. docs/prediction.md says what is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import importlib.util
import itertools
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import execution, launches, sass
from attention_kernels.inspection.asynchronous import with_bank_pointer
from attention_kernels.inspection.blocks import WARP, Blocks
from attention_kernels.inspection.launches import Launch, Triple
from attention_kernels.inspection.multiprocessor import (
    SCHEDULERS,
    SECTOR,
    GpuModel,
    Work,
    counts_of,
    cycles_of,
    work_of,
)
from attention_kernels.inspection.resources import Compiled, compile_version, resident_blocks
from attention_kernels.inspection.sass import Instruction
from attention_kernels.inspection.stalls import Watch
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import VersionHeader

_MAX_ISSUED = 3_000_000  # most instructions to execute: takes seconds
_MAX_TIMED = 100_000  # instructions timed; the rest are assumed to run at the same pace
_MAX_OBSERVED = 200_000  # instructions in which stalls are recorded
_SAMPLED = 8  # blocks executed if the work of the others can be interpolated
_SPREAD = 128  # blocks executed otherwise
_MAX_LANES_TIMES_ISSUED = 500_000_000  # limit for those blocks: a few seconds
_LINEAR = 0.02  # deviation from a line up to which work counts as linear
_MAX_GRID = 2**20  # most blocks in a grid: each is scheduled
_MAX_WHOLE = 32  # block 0 is executed as well if an axis has at most this many blocks
LOAD_STORE_UNIT = "load-store unit"
"""The unit that issues one wavefront a cycle: of shared memory, of an L1 line or of a shuffle."""
_LOAD_STORE_PARTS = ("shared memory", "L1")
# Offset of the parameters in constant bank 0, by compute capability.
_PARAMETERS = {"75": 0x160, "80": 0x160, "86": 0x160, "89": 0x160, "90": 0x210}

_MAP_ALIGNMENT = 128  # of a tensor map, in cuda.h of CUDA 13


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
    choice: str = ""
    """The meta-parameters that an autotuner would choose."""

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


@dataclass
class Program:
    """Kernels compiled for a GPU."""

    path: Path
    """Their source, or the binary that they are in."""
    label: str
    """Their name in tables."""
    gpu: GpuModel
    code: dict[str, list[Instruction]]
    """The kernels' instructions, by mangled name."""
    compiled: dict[str, Compiled]
    heads_first: bool = False
    """Whether the first of several axes of the grid counts heads: its blocks are alike."""

    def uses_warpgroups(self, launch: Launch) -> bool:
        """Return whether a kernel has products of warpgroups (wgmma)."""
        return any(one.base == "HGMMA" for one in self.code[launch.symbol])


@dataclass(kw_only=True)
class VersionProgram(Program):
    """A version compiled for a GPU, and the recorder of its launches."""

    version: VersionHeader
    recorder: Path

    def launches(self, case: Sequence[int], head_dim: int) -> Counter[Launch]:
        """Count the launches of a call; those that differ only in parameters count as the first."""
        recorded = launches.record(
            self.version,
            self.recorder,
            [head_dim],
            case=case,
            multiprocessors=self.gpu.multiprocessors,
        )
        found: Counter[Launch] = Counter()
        first: dict[Launch, Launch] = {}
        for launch in recorded:
            alike = dataclasses.replace(launch, parameters=b"")
            found[first.setdefault(alike, launch)] += 1
        return found


def find_disassembler(program: str = "cuobjdump") -> str:
    """Find a program next to nvcc, on PATH or in Triton's package, or raise BuildError."""
    folders = [str(compilers.cuda_root(nvcc) / "bin")] if (nvcc := compilers.find_nvcc()) else []
    folders.append(os.environ.get("PATH", ""))
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        folders.append(f"{folder}/backends/nvidia/bin")
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        raise BuildError(f"needs {program}, from the CUDA toolkit or the triton package")
    return found


def compile_program(
    version: VersionHeader, gpu: GpuModel, folder: Path, *flags: str
) -> VersionProgram:
    """Compile a version to kernel.cubin in a folder, with additional flags for nvcc."""
    compiled = compile_version(version, gpu.arch, folder, *flags)
    text = compilers.output_of([find_disassembler(), "-sass", str(folder / "kernel.cubin")])
    recorder = launches.build_recorder(version, folder)
    code = sass.parse(text)
    program = version.path, version.label, gpu, code, compiled, True
    return VersionProgram(*program, version=version, recorder=recorder)


# ---- The whole grid ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Counts and work of the blocks along the axis on which they differ, in starting order."""

    length: int
    samples: dict[int, Counter[str]]
    works: list[Work]
    """Work of those samples that are timed."""
    inputs: float = 1.0
    """Share of the loaded sectors that hold the call's inputs, not an earlier launch's output."""
    alike: int = 1
    """Consecutive blocks of the grid that each position stands for."""
    repeats: int = 1
    """How often the positions follow each other in the grid."""
    first: Counter[str] | None = None
    """Counts of block 0, if it does not fit the line: it may have fewer queries."""
    executed: frozenset[int] = frozenset()
    """Indices of the instructions that were executed."""
    shared_end: int = 0
    """Bytes of shared memory up to the highest address that a block accesses."""
    fewest: Counter[int] = field(default_factory=Counter)
    """Most wavefronts of a request if it had no bank conflict, by instruction."""

    def value(self, position: int, of: str) -> float:
        """Return a count at a position, on the line through the two nearest samples.

        If a tile of keys spans the queries of two blocks, pairs of blocks do the same work: odd
        positions lie on one line, even ones on another.
        """
        if position == 0 and self.first:
            return self.first[of]
        if position in self.samples:
            return self.samples[position][of]
        if len(self.samples) == 1:
            return next(iter(self.samples.values()))[of]
        alike = [at for at in self.samples if (at - position) % 2 == 0]
        near = alike if len(alike) > 1 else self.samples
        a, b = heapq.nsmallest(2, near, key=lambda at: abs(at - position))
        first, second = self.samples[a][of], self.samples[b][of]
        return max(0.0, first + (second - first) * (position - a) / (b - a))

    def total(self, of: str) -> float:
        """Return a count summed over the grid."""
        once = sum(self.value(position, of) for position in range(self.length))
        return self.alike * self.repeats * once


def _line(program: Program, launch: Launch, *, are_alike: bool = True) -> _Line:
    """Run some blocks of a launch.

    are_alike: with a second axis, blocks along the first count as alike, unless none of those that
    are run requests memory.
    """
    if (blocks_in_grid := math.prod(launch.grid)) > _MAX_GRID:
        reason = f"a grid of {blocks_in_grid} blocks (predictions take {_MAX_GRID} at most)"
        raise UnsupportedError(program.path.name, [reason])

    def run(positions: Iterable[int]) -> tuple[Blocks, dict[int, Counter[str]]]:
        chosen = sorted(positions)
        blocks = _run(program, launch, [places[position] for position in chosen])
        return blocks, dict(zip(chosen, counts_of(blocks), strict=True))

    if program.heads_first:
        _, y, z = launch.grid
        axes = [1, 2] if are_alike and (y, z) != (1, 1) else [0, 1, 2]
        is_linear = y > 1 and z == 1 and are_alike
    else:
        axes, is_linear = _axes(program, launch)
    places = _places(launch.grid, axes)
    length = len(places)
    alike = math.prod(launch.grid[: min(axes)])
    repeats = blocks_in_grid // length // alike
    first = None
    if length <= _SAMPLED:
        blocks, ran = run(range(length))
        samples = ran
    elif is_linear:
        # Neighbours may do the same work, and the last may be partial.
        blocks, ran = run([length - _SAMPLED, length - 2, length - 1])
        far, near = ran[length - _SAMPLED]["issue"], ran[length - 2]["issue"]
        if abs(far - near) < 0.001 * far:
            samples = {length - 2: ran[length - 2]}
        else:
            # The last is the shortest or the longest; from there, work changes linearly.
            is_shortest = far > near
            ends = _ends(length, program.uses_warpgroups(launch))
            blocks, ran = run(length - 1 - at if is_shortest else at for at in ends)
            first = run([0])[1][0] if length <= _MAX_WHOLE else None
            samples = ran
    else:  # nonlinear: as many blocks as a few seconds allow stand for the others
        blocks, ran = run(_spread(_SAMPLED, length))
        issued = [counts["issue"] for counts in ran.values()]
        are_idle = not any(counts["misses"] for counts in ran.values())
        even = program.heads_first or len(axes) == 1
        if max(issued) - min(issued) > 0.001 * max(issued) or are_idle or not even:
            limit = _MAX_LANES_TIMES_ISSUED * _SAMPLED // (len(blocks.issued) * blocks.lanes)
            count = min(length, _SPREAD, max(_SAMPLED, limit))
            blocks, ran = run(_spread(count, length) if even else _scattered(count, length))
        samples = {at: ran[min(ran, key=lambda one: abs(one - at))] for at in range(length)}
    # A block without memory requests has no work. Time a few of the others.
    numbers = {
        number: counts
        for number, (at, counts) in enumerate(ran.items())
        if counts["misses"] and at in samples
    }
    if not numbers and program.heads_first and alike > 1:
        return _line(program, launch, are_alike=False)
    busy = sorted(numbers, key=lambda number: numbers[number]["issue"])
    timed = {*busy[:: -(-len(busy) // _SAMPLED) or 1], *busy[-1:]}
    works = [work_of(blocks, number, numbers[number]) for number in sorted(timed)]
    # The recorder of launches puts o and scratch at 4 and 5 terabytes.
    fetched = blocks.fetched.total()
    inputs = (fetched - blocks.fetched[4] - blocks.fetched[5]) / max(1, fetched)
    executed = frozenset(issue.index for issue in blocks.issued)
    return _Line(
        length,
        samples,
        works,
        inputs,
        alike,
        repeats,
        first,
        executed,
        blocks.shared_end,
        blocks.fewest,
    )


def _places(grid: Triple, axes: Sequence[int]) -> list[Triple]:
    """Return the blocks along some axes of a grid, in starting order."""
    x, y, z = (range(n) if axis in axes else range(1) for axis, n in enumerate(grid))
    return [(i, j, k) for k in z for j in y for i in x]


def _run(program: Program, launch: Launch, indices: Sequence[Triple]) -> Blocks:
    """Execute some blocks of a launch."""
    dimensions = b"".join(n.to_bytes(4, "little") for n in (*launch.block, *launch.grid))
    base = _PARAMETERS[program.gpu.arch]
    if "CUtensorMap" in launch.symbol:
        base = -(-base // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    constants = with_bank_pointer(dimensions.ljust(base, b"\0") + launch.parameters)
    blocks = Blocks(program.code[launch.symbol], constants, launch.block, indices)
    execution.run(blocks, _MAX_ISSUED)
    return blocks


def _axes(program: Program, launch: Launch) -> tuple[list[int], bool]:
    """Return the axes of a grid along which blocks differ, and whether their work is linear there.

    The last block of an axis may be partial, so it does not count. Work is linear along one axis.
    """
    grid = launch.grid
    x, y, z = (n // 2 for n in grid)
    of_axis: list[list[Triple]] = [
        [(n, y, z) for n in (0, grid[0] // 4, x)],
        [(x, n, z) for n in (0, grid[1] // 4, y)],
        [(x, y, n) for n in (0, grid[2] // 4, z)],
    ]
    probes = [*dict.fromkeys(itertools.chain(*of_axis))]
    counts = counts_of(_run(program, launch, probes))
    issued = {at: one["issue"] for at, one in zip(probes, counts, strict=True)}
    differ = [
        axis
        for axis, (start, _, half) in enumerate(of_axis)
        if abs(issued[half] - issued[start]) > 0.001 * issued[half]
    ]
    if len(differ) != 1:
        return differ or [max(range(3), key=lambda axis: grid[axis])], not differ
    first, second, third = of_axis[differ[0]]
    at = [one[differ[0]] for one in (first, second, third)]
    between = issued[first] + (issued[third] - issued[first]) * at[1] / (at[2] or 1)
    return differ, abs(between - issued[second]) < _LINEAR * issued[third]


def _ends(length: int, uses_warpgroups: bool) -> set[int]:
    """Return the distances from the end of a line of the blocks whose work tells that of all.

    Products of warpgroups make few instructions, so only longer blocks show the pace.
    """
    if not uses_warpgroups:
        return {0, 1, _SAMPLED - 2, _SAMPLED - 1}
    far = min(length, _MAX_WHOLE)
    return {0, *(far * i // _SAMPLED for i in range(2, _SAMPLED)), 1, far - 2, far - 1}


def _spread(count: int, length: int) -> list[int]:
    """Return the middle of each of `count` equal parts of a length."""
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


def _scattered(count: int, length: int) -> list[int]:
    """Return `count` positions without a period, which could be that of the grid."""
    golden = (5**0.5 - 1) / 2
    return [*dict.fromkeys(int(length * (i * golden % 1)) for i in range(count))]


def _finish(
    line: _Line, gpu: GpuModel, alone: float, paces: Sequence[float], extra: float
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


def _alone(
    gpu: GpuModel,
    code: Sequence[Instruction],
    works: Sequence[Work],
    miss: float,
) -> tuple[float, float]:
    """Return the cycles per instruction of a block that runs alone, and its additional cycles.

    If the blocks differ in length, two lengths are timed: the difference is the iterations that
    only the longer one executes.
    """
    short, *longer = _by_length(works)
    first, few = cycles_of(gpu, code, [short], miss, _MAX_TIMED)
    if not longer:
        return first / sum(few), 0.0
    longest = _longest(longer, _MAX_TIMED)
    cycles, issued = cycles_of(gpu, code, [longest], miss)
    per = (cycles - first) / (sum(issued) - sum(few))
    return per, max(0.0, first - per * sum(few))


def _together(
    gpu: GpuModel,
    code: Sequence[Instruction],
    works: Sequence[Work],
    miss: float,
    count: int,
) -> list[float]:
    """Return cycles per instruction of `count` blocks on one multiprocessor, the oldest first."""
    short, *longer = _by_length(works)
    if longer:  # time half of the blocks' instructions
        work = _longest(longer, 2 * _MAX_TIMED // count)
        most = work.instructions * count // 2
    else:
        work, most = short, min(_MAX_TIMED, short.instructions * count)
    cycles, issued = cycles_of(gpu, code, [work] * count, miss, most)
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
    registers: int
    """Registers per thread."""
    shared: int
    """Bytes of shared memory per block."""
    fits: int
    """Blocks that a multiprocessor has room for."""
    line: _Line
    total: dict[str, float]
    """Counts of the whole grid."""
    min_bytes: float
    """Bytes that have to pass between the GPU and its memory."""

    def with_shared(self, dynamic: int) -> LaunchModel:
        """Return the launch with dynamic shared memory in addition; raises UnsupportedError."""
        shared = self.shared + dynamic
        launch = dataclasses.replace(self.launch, dynamic_smem=self.launch.dynamic_smem + dynamic)
        fits = _fits(self.version, self.gpu, launch, self.registers, shared)
        return dataclasses.replace(self, launch=launch, shared=shared, fits=fits)

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


def _fits(name: str, gpu: GpuModel, launch: Launch, registers: int, shared: int) -> int:
    fits, limit = resident_blocks(gpu.arch, launch.threads, registers, shared)
    if fits == 0:
        reason = f"a block does not fit on a multiprocessor of {gpu.name}: too much {limit}"
        raise UnsupportedError(name, [reason])
    return fits


def model_of(program: Program, launch: Launch, min_bytes: float) -> LaunchModel:
    """Execute some blocks of a launch; raises UnsupportedError if no block fits on the GPU."""
    gpu, code = program.gpu, program.code[launch.symbol]
    compiled = program.compiled[launch.symbol]
    shared = compiled.static_smem + launch.dynamic_smem
    fits = _fits(program.path.name, gpu, launch, compiled.registers, shared)
    line = _line(program, launch)
    names = {*itertools.chain(*line.samples.values())}
    total = defaultdict(float, {name: line.total(name) for name in names})
    return LaunchModel(
        program.label, gpu, launch, code, compiled.registers, shared, fits, line, total, min_bytes
    )


def time_of(model: LaunchModel, watch: Watch | None = None) -> Prediction:
    """Simulate a launch. watch: records the stalls on a multiprocessor with all of its blocks."""
    gpu, code, line, total = model.gpu, model.code, model.line, model.total
    # Blocks that start together request the inputs they share at the same time, and all wait for
    # memory. The output of an earlier launch is in L2.
    at_once = model.fits * gpu.multiprocessors
    cold = line.inputs * min(1.0, at_once / max(1, model.busy))
    fits = min(model.fits, model.most)
    l2_bytes = total["misses"] * SECTOR
    miss = gpu.l2_latency + cold * (gpu.memory_latency - gpu.l2_latency)
    end = equal = 0.0
    if line.works:
        timed = gpu, code, line.works, miss
        alone, extra = _alone(*timed)
        paces = _together(*timed, fits) if fits > 1 else [alone]
        if watch:
            _observe(model, miss, fits, watch)
        end, equal = _finish(line, gpu, alone, paces, extra)
    hertz = gpu.clock_ghz * 1e3  # cycles per microsecond
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
        assumed=tuple(
            f"{name} is integer arithmetic with the result 0"
            for name in execution.assumed([code[at] for at in sorted(line.executed)])
        ),
    )


def predict(
    version: VersionHeader,
    gpu: GpuModel,
    seqlens: Iterable[int],
    *,
    head_dim: int = 64,
    batch: int = 1,
    num_heads: int = 12,
    is_causal: bool = True,
) -> list[Prediction]:
    """Predict one call of a version at each sequence length, in the version's first dtype.

    Raises UnsupportedError for a version or a case that cannot be predicted, BuildError if a
    compiler is missing or the version does not compile, and SassError for an unknown instruction.
    """
    cases = [Case(batch, seqlen, num_heads, head_dim, is_causal) for seqlen in seqlens]
    return predict_cases(version, gpu, cases)


def predict_cases(version: VersionHeader, gpu: GpuModel, cases: Sequence[Case]) -> list[Prediction]:
    """Predict one call of a version in each case; they differ only in length. See predict()."""
    version = checked(version, gpu, cases)
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(version, gpu, Path(folder))
        return [
            sum_of([(count, time_of(model)) for count, model in models_of(program, case)], case)
            for case in cases
        ]


class Case(NamedTuple):
    """The shape of a call."""

    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    is_causal: bool


def checked(version: VersionHeader, gpu: GpuModel, cases: Sequence[Case]) -> VersionHeader:
    """Return a version in its first dtype; raise UnsupportedError with every reason against it.

    cases: they differ only in length.
    """
    batch, _, num_heads, head_dim, _ = cases[0]
    reasons = launches.case_faults(
        version,
        seqlens=[case.seqlen for case in cases],
        head_dim=head_dim,
        batch=batch,
        num_heads=num_heads,
    )
    if version.needs and not version.compiles_for(gpu.arch):
        needed = "".join(map(str, version.needs)) + "a" * version.needs_exactly
        reasons.append(f"it needs sm_{needed}, and {gpu.name} is sm_{gpu.arch}")
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    return version.builds()[0]


def models_of(program: VersionProgram, case: Case) -> list[tuple[int, LaunchModel]]:
    """Execute some blocks of each launch of a call; return how often each launch occurs, too."""
    batch, seqlen, num_heads, head_dim, is_causal = case
    counted = program.launches((batch, seqlen, num_heads, int(is_causal)), head_dim)
    item = {"float32": 4, "float64": 8}.get(program.version.dtype, 2)
    min_bytes = 4.0 * batch * seqlen * num_heads * head_dim * item
    return [
        (count, model_of(program, launch, min_bytes / counted.total()))
        for launch, count in counted.items()
    ]


def sum_of(each: Sequence[tuple[int, Prediction]], case: Case) -> Prediction:
    """Add up the predictions of a call's launches, given how often each occurs."""
    first = each[0][1]
    needs = {
        name: sum(count * one.needs_us[name] for count, one in each) for name in first.needs_us
    }
    added: dict[str, Any] = {
        field.name: sum(count * getattr(one, field.name) for count, one in each)
        for field in dataclasses.fields(Prediction)
        if field.name not in ("version", "gpu", "seqlen", "needs_us", "assumed", "choice")
    }
    assumed = tuple(dict.fromkeys(itertools.chain(*(one.assumed for _, one in each))))
    return dataclasses.replace(first, seqlen=case.seqlen, needs_us=needs, assumed=assumed, **added)
