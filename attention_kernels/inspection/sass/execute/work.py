"""Find out what the blocks of a launch do: execute some of them, and interpolate the others.

The work of a block is the instructions of its warps with the memory traffic of each, and the events
for which its warps wait: phases of mbarriers, numbered barriers, products of warpgroups, and
registers that other warps give up. An event is complete when every contribution to it has been
made, by threads that arrive, by copies, or by the four warps that issue a product.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.resources import Launch, Triple
from attention_kernels.inspection.sass.decode import PRODUCTS, Instruction, Program
from attention_kernels.inspection.sass.execute.instructions import run_blocks
from attention_kernels.inspection.sass.execute.state import WARPGROUP, Blocks, Event, Issue, Mask

_SAMPLED = 8  # blocks executed if the work of the others can be interpolated
_SPREAD = 128  # blocks executed otherwise
_MAX_LANES_TIMES_ISSUED = 500_000_000  # limit for those blocks: a few seconds
_LINEAR = 0.02  # deviation from a line up to which work counts as linear
_MAX_GRID = 2**20  # most blocks in a grid: each is scheduled
_MAX_WHOLE = 32  # block 0 is executed as well if an axis has at most this many blocks

Issued: TypeAlias = tuple[int, Sequence[int], Event | None, Event | None]
"""An instruction of a warp: its index; its wavefronts, L1 lines, sectors that go to L2 and inputs
among these; the event to which it contributes; and the event for which it waits."""
_NO_REQUEST = [0, 0, 0, 0]


@dataclass(frozen=True)
class Work:
    """The instructions and the memory traffic of one block's warps."""

    warps: list[list[Issued]]
    """The instructions of each warp."""
    parts: list[list[int]]
    """Position of each warp after 0, 1, ... 7 eighths of the block's instructions; empty for one
    that always starts from its first."""
    counts: Counter[str]
    """Instructions in total and by pipe, wavefronts, lines, misses, and of the products of
    warpgroups the FLOP and the wavefronts of their operands."""
    needs: Counter[Event] = field(default_factory=Counter)
    """Number of contributions that complete each event."""


# ---- One block -----------------------------------------------------------------------------------

_TILES = "UTMALDG UTMASTG UTMAREDG UBLKCP"
PIPES = {
    "fma": "FFMA FMUL FADD HFMA2 HADD2 HMUL2", "special": "MUFU I2F F2I FRND F2F",
    "multiply": "IMAD HADD2.F32",  # the latter converts, at half the rate of other HADD2
    "shared": "LDS STS LDSM STSM ATOMS SYNCS STAS", "shuffle": "SHFL", "tensor": "HMMA IMMA",
    "global": "LDG STG LDGSTS LD ST RED ATOM ATOMG LDL STL", "constant": "LDC ULDC S2R",
    "warpgroup": " ".join(PRODUCTS), "tile": _TILES,
    "control": "BRA BSSY BSYNC EXIT BAR NOP WARPSYNC BREAK DEPBAR WARPGROUP USETMAXREG ELECT",
}  # fmt: skip
_PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
_WAVEFRONTS = dict.fromkeys(("STS", "STSM", "STAS"), "stores") | {"LDGSTS": "copies"}
_WAVEFRONTS |= dict.fromkeys(_TILES.split(), "tiles")


def pipe_of(one: Instruction) -> str:
    """Return the pipe that executes an instruction: one of PIPES, "uniform" or "integer"."""
    other = "uniform" if one.base[0] == "U" or one.base in ("S2UR", "R2UR", "VOTEU") else "integer"
    return _PIPE_OF.get(one.name, _PIPE_OF.get(one.base, other))


def counts_of(blocks: Blocks) -> list[Counter[str]]:
    """Return each block's instructions by pipe, and its wavefronts, lines, misses and inputs."""
    totals = np.zeros((5, len(blocks.code), len(blocks.indices), blocks.warps), np.int32)
    for issue in blocks.issued:
        totals[0, issue.index] += issue.warps.reshape(totals.shape[2:])
        if issue.request is not None:
            totals[1:, issue.index] += issue.request.reshape(4, *totals.shape[2:])
    found: list[Counter[str]] = [Counter() for _ in blocks.indices]
    by_block = totals.sum(3)
    for index, block in np.argwhere(by_block[0]).tolist():
        one, counts = blocks.code[index], found[block]
        issued, wavefronts, lines, misses, inputs = by_block[:, index, block].tolist()
        counts["issue"] += issued
        counts[pipe_of(one)] += issued
        counts[_WAVEFRONTS.get(one.base, "loads")] += wavefronts
        counts.update(lines=lines, misses=misses, inputs=inputs)
        if one.base in PRODUCTS:
            flop, operands = one.product
            counts["products"] += flop * issued // WARPGROUP
            counts["operands"] += operands * issued // WARPGROUP
    return found


def work_of(blocks: Blocks, number: int, counts: Counter[str]) -> Work:
    """Return what the warps of block `number` of the emulated blocks execute."""
    first = number * blocks.warps
    of_block = slice(first, first + blocks.warps)
    issued: list[tuple[Issue, list[int]]] = []  # with the warps that execute it
    mask: Mask | None = None
    active: list[int] = []
    for issue in blocks.issued:
        if issue.warps is not mask:
            mask = issue.warps
            active = np.flatnonzero(mask[of_block]).tolist()
        if active:
            issued.append((issue, active))
    found = Work([[] for _ in range(blocks.warps)], [], counts)
    plain: list[Issued] = [(at, _NO_REQUEST, None, None) for at in range(len(blocks.code))]
    for at, (issue, active) in enumerate(issued):
        if at >= len(issued) * len(found.parts) / 8:
            found.parts.append([len(warp) for warp in found.warps])
        if issue.request is None and not issue.events:  # as most: one object for all of them
            for warp in active:
                found.warps[warp].append(plain[issue.index])
            continue
        requests = [_NO_REQUEST] * blocks.warps
        if issue.request is not None:
            requests = issue.request[:, of_block].T.tolist()
        for warp in active:
            signal, awaited = issue.events.get(first + warp, (None, None))
            found.warps[warp].append((issue.index, requests[warp], signal, awaited))
            if signal:
                found.needs[signal] += 1
    return found


# ---- The grid ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Counts and work of the blocks along the axis on which they differ, in starting order."""

    length: int
    samples: dict[int, Counter[str]]
    works: list[Work]
    """Work of those samples that are timed."""
    alike: int = 1
    """Consecutive blocks of the grid that each position stands for."""
    repeats: int = 1
    """How often the positions follow each other in the grid."""
    first: Counter[str] | None = None
    """Counts of block 0, if it does not fit the line: it may have fewer queries."""
    executed: frozenset[int] = frozenset()
    """Indices of the instructions that were executed."""
    waits: bool = False
    """Whether blocks wait for other blocks, which are taken to have come as far."""
    distinct: float = 1.0
    """Share of a block's sectors that L2 delivers to no other block at the same time."""
    taken: int = 0
    """How often a block asks a queue for its next part; the last time it gets none."""

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

    def each(self, of: str) -> list[float]:
        """Return a count of each block of the grid, in starting order."""
        once = [self.value(position, of) for position in range(self.length)]
        return [count for count in once for _ in range(self.alike)] * self.repeats

    def totals(self) -> defaultdict[str, float]:
        """Return the counts of the whole grid."""
        names = {*itertools.chain(*self.samples.values())}
        return defaultdict(float, {name: sum(self.each(name)) for name in names})

    @property
    def busy(self) -> int:
        """The number of blocks that have work."""
        return sum(count > 0 for count in self.each("misses"))


def line_of(program: Program, launch: Launch, *, are_alike: bool = True) -> Line:
    """Execute some blocks of a launch, and let them stand for the others.

    are_alike: on a grid with several axes, blocks along the first count as alike, unless no block
    that is executed requests memory.
    """
    if (blocks_in_grid := math.prod(launch.grid)) > _MAX_GRID:
        reason = f"a grid of {blocks_in_grid} blocks (predictions take {_MAX_GRID} at most)"
        raise UnsupportedError(program.path.name, [reason])

    def run(positions: Iterable[int]) -> tuple[Blocks, dict[int, Counter[str]]]:
        chosen = sorted(positions)
        blocks = run_blocks(program, launch, [places[position] for position in chosen])
        return blocks, dict(zip(chosen, counts_of(blocks), strict=True))

    if program.heads_first:
        axes = _axes_of_rows(program, launch) if are_alike else [0, 1, 2]
        is_linear, distinct = axes == [1], 1.0
    else:
        axes, is_linear, distinct = axes_of(program, launch)
    places = _places(launch.grid, axes)
    length, first = len(places), None
    alike = math.prod(launch.grid[: min(axes)])
    repeats = blocks_in_grid // length // alike
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
            ends = _ends(length, any(one.base in PRODUCTS for one in program.code[launch.symbol]))
            blocks, ran = run(length - 1 - at if is_shortest else at for at in ends)
            first = run([0])[1][0] if length <= _MAX_WHOLE else None
            samples = ran
    else:  # nonlinear: as many blocks as a few seconds allow stand for the others
        blocks, ran = run(_spread(_SAMPLED, length))
        issued = [counts["issue"] for counts in ran.values()]
        are_idle = not any(counts["misses"] for counts in ran.values())
        even = program.heads_first or (len(axes) == 1 and not blocks.taken.any())
        if max(issued) - min(issued) > 0.001 * max(issued) or are_idle or not even:
            limit = _MAX_LANES_TIMES_ISSUED * _SAMPLED // (len(blocks.issued) * blocks.lanes)
            count = min(length, _SPREAD, max(_SAMPLED, limit))
            blocks, ran = run(_spread(count, length) if even else _scattered(count, length))
        samples = {at: ran[min(ran, key=lambda one: abs(one - at))] for at in range(length)}
    # A block without memory requests has no work. Time a few of the others.
    numbers = {n: one for n, (at, one) in enumerate(ran.items()) if one["misses"] and at in samples}
    if not numbers and program.heads_first and alike > 1:
        return line_of(program, launch, are_alike=False)
    busy = sorted(numbers, key=lambda number: numbers[number]["issue"])
    # Blocks that wait for each other all take as long as the longest.
    timed = {*([] if blocks.waits else busy[:: -(-len(busy) // _SAMPLED) or 1]), *busy[-1:]}
    works = [work_of(blocks, number, numbers[number]) for number in sorted(timed)]
    how = alike, repeats, first, frozenset(issue.index for issue in blocks.issued)
    return Line(length, samples, works, *how, blocks.waits, distinct, int(blocks.taken.max()))


def _places(grid: Triple, axes: Sequence[int]) -> list[Triple]:
    """Return the blocks along some axes of a grid, in starting order."""
    x, y, z = (range(n) if axis in axes else range(1) for axis, n in enumerate(grid))
    return [(i, j, k) for k in z for j in y for i in x]


def _axes_of_rows(program: Program, launch: Launch) -> list[int]:
    """Return the axes along which blocks differ where the first is that of heads."""
    _, y, z = launch.grid
    if y > 1 and z > 1:  # if the last is that of groups of heads, these do the same
        halves = run_blocks(program, launch, [(0, y // 2, 0), (0, y // 2, z // 2)])
        return [1] if len({one["issue"] for one in counts_of(halves)}) == 1 else [1, 2]
    return [1] if y > 1 else [1, 2] if z > 1 else [0, 1, 2]


def axes_of(program: Program, launch: Launch) -> tuple[list[int], bool, float]:
    """Return the axes of a grid along which blocks differ, whether their work is linear there, and
    the share of a block's sectors that no other block requests at the same time.

    The last block of an axis may be partial, so it does not count. Blocks may differ along one axis
    only where another begins: where the first keys are masked, no split of the others has any. Work
    is linear along one axis, unless the blocks of a cluster divide its work, or take it from a
    queue.
    """
    grid = launch.grid
    at = [[n * part // 4 for part in range(3)] for n in grid]
    lines = [(rest, axis) for rest in ([2] * 3, [0] * 3) for axis in range(3)]
    parts = [(*rest[:axis], part, *rest[axis + 1 :]) for rest, axis in lines for part in range(3)]
    blocks = run_blocks(program, launch, [(at[0][i], at[1][j], at[2][k]) for i, j, k in parts])
    found = [one["issue"] for one in counts_of(blocks)]
    issued = [found[first : first + 3] for first in range(0, len(found), 3)]
    unlike = (abs(half - start) > 0.001 * half for start, _, half in issued)
    differ = sorted({axis for (_, axis), differs in zip(lines, unlike, strict=True) if differs})
    in_clusters = max(launch.cluster) > 1  # the code alone may be for launches without them, too
    is_regular = not in_clusters and not blocks.taken.any()
    # All blocks of a cluster take themselves for its first: what the others request is not known.
    distinct = _distinct(blocks, grid, 1 if in_clusters else program.gpu.multiprocessors)
    if len(differ) != 1:
        return differ or [grid.index(max(grid))], not differ and is_regular, distinct
    (axis,) = differ
    start, between, half = issued[axis]
    expected = start + (half - start) * at[axis][1] / (at[axis][2] or 1)
    return differ, abs(expected - between) < _LINEAR * half and is_regular, distinct


def _distinct(blocks: Blocks, grid: Triple, running: int) -> float:
    """Return the share of sectors that remains if those requested at the same time count once.

    blocks: lines along each axis whose third block is the same. running: blocks at a time.
    """
    together = np.minimum(grid, np.maximum(1, running // np.cumprod([1, *grid[:2]])))
    mine, neighbors = blocks.seen[2].items(), blocks.seen[1:9:3]
    alike = [[one.get(sector) == when for one in neighbors] for sector, when in mine]
    return float(np.mean(1 / np.where(alike, together, 1).prod(1))) if mine else 1.0


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
    """Return `count` positions without a period, which could be that of the grid, or all."""
    golden = (5**0.5 - 1) / 2
    some = dict.fromkeys(int(length * (i * golden % 1)) for i in range(count))
    return [*some] if count < length else [*range(length)]
