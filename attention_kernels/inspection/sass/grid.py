"""Choose the blocks of a launch that are executed; they tell the work of all others in the grid."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.launches import Launch, Triple
from attention_kernels.inspection.sass.multiprocessor import Work, counts_of, work_of
from attention_kernels.inspection.sass.program import Program, run_blocks
from attention_kernels.inspection.sass.state import Blocks

_SAMPLED = 8  # blocks executed if the work of the others can be interpolated
_SPREAD = 128  # blocks executed otherwise
_MAX_LANES_TIMES_ISSUED = 500_000_000  # limit for those blocks: a few seconds
_LINEAR = 0.02  # deviation from a line up to which work counts as linear
_MAX_GRID = 2**20  # most blocks in a grid: each is scheduled
_MAX_WHOLE = 32  # block 0 is executed as well if an axis has at most this many blocks


@dataclass(frozen=True)
class Line:
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


def line_of(program: Program, launch: Launch, *, are_alike: bool = True) -> Line:
    """Run some blocks of a launch.

    are_alike: with a second axis, blocks along the first count as alike, unless none of those that
    are run requests memory.
    """
    if (blocks_in_grid := math.prod(launch.grid)) > _MAX_GRID:
        reason = f"a grid of {blocks_in_grid} blocks (predictions take {_MAX_GRID} at most)"
        raise UnsupportedError(program.path.name, [reason])

    def run(positions: Iterable[int]) -> tuple[Blocks, dict[int, Counter[str]]]:
        chosen = sorted(positions)
        blocks = run_blocks(program, launch, [places[position] for position in chosen])
        return blocks, dict(zip(chosen, counts_of(blocks), strict=True))

    if program.heads_first:
        _, y, z = launch.grid
        axes = [1, 2] if are_alike and (y, z) != (1, 1) else [0, 1, 2]
        is_linear = y > 1 and z == 1 and are_alike
    else:
        axes, is_linear = axes_of(program, launch)
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
            ends = _ends(length, any(one.base == "HGMMA" for one in program.code[launch.symbol]))
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
        return line_of(program, launch, are_alike=False)
    busy = sorted(numbers, key=lambda number: numbers[number]["issue"])
    timed = {*busy[:: -(-len(busy) // _SAMPLED) or 1], *busy[-1:]}
    works = [work_of(blocks, number, numbers[number]) for number in sorted(timed)]
    # The recorder of launches puts o and scratch at 4 and 5 terabytes.
    fetched = blocks.fetched.total()
    inputs = (fetched - blocks.fetched[4] - blocks.fetched[5]) / max(1, fetched)
    executed = frozenset(issue.index for issue in blocks.issued)
    return Line(length, samples, works, inputs, alike, repeats, first, executed, blocks.shared_end)


def _places(grid: Triple, axes: Sequence[int]) -> list[Triple]:
    """Return the blocks along some axes of a grid, in starting order."""
    x, y, z = (range(n) if axis in axes else range(1) for axis, n in enumerate(grid))
    return [(i, j, k) for k in z for j in y for i in x]


def axes_of(program: Program, launch: Launch) -> tuple[list[int], bool]:
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
    counts = counts_of(run_blocks(program, launch, probes))
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
