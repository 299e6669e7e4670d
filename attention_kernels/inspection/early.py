"""Predict a chain of kernels, each of which starts before the previous one has ended.

A kernel that is launched early (programmatic dependent launch) first asks for what no kernel of the
chain writes, such as weights, then waits for the previous kernel, and later for what it asked for.
Each part is simulated for the longest block of the grid, with as many copies of it as a
multiprocessor gets; the instruction caches hold the code of other kernels then. What the hardware
adds between kernels was measured by scripts/probe.cu.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from attention_kernels.inspection import execution
from attention_kernels.inspection.asynchronous import is_test
from attention_kernels.inspection.gpus import GpuModel
from attention_kernels.inspection.launches import Launch
from attention_kernels.inspection.multiprocessor import (
    SECTOR,
    Work,
    counts_of,
    cycles_of,
    work_of,
)
from attention_kernels.inspection.program import Program, run_blocks
from attention_kernels.inspection.resources import resident_blocks

_WAIT, _ALLOW = "ACQBULK", "PREEXIT"  # griddepcontrol.wait and .launch_dependents
_Spans: TypeAlias = Sequence[tuple[float, float]]
"""Times from a begin to an end."""


@dataclass(frozen=True)
class Link:
    """A kernel of a chain. Times are in microseconds."""

    kernel: str
    is_early: bool
    """Whether it starts before the previous kernel has ended."""
    allows_first: bool
    """Whether it lets the next kernel start before it waits itself."""
    share: float
    """The share of the GPU's room for such blocks that it takes."""
    reading_us: float
    """What its blocks read from memory, at full bandwidth."""
    asking_us: float
    """From its start until what they ask for before they wait has arrived, if nobody else reads."""
    work_us: float
    """From the end of the previous kernel on, if all of that has arrived."""
    last_us: float
    """From the arrival of what it asked for on."""
    slowed_us: float = 0.0
    """What its work takes longer while memory is read at full bandwidth."""
    assumed: tuple[str, ...] = ()
    """Instructions whose time or result was assumed."""


def link_of(program: Program, launch: Launch, places: Collection[int]) -> Link:
    """Execute all blocks of a kernel, and simulate the longest one.

    places: terabytes of the addresses of what a single block reads, and from memory.
    """
    gpu, code = program.gpu, program.code[launch.symbol]
    compiled = program.compiled[launch.symbol]
    x, y, z = map(range, launch.grid)
    indices = [*itertools.product(x, y, z)]
    blocks = run_blocks(program, launch, indices)
    counts = counts_of(blocks)
    longest = max(range(len(indices)), key=lambda at: counts[at]["issue"])
    work = work_of(blocks, longest, counts[longest])
    warps = [[code[index] for index, *_ in warp] for warp in work.warps]
    names = [[one.base for one in warp] for warp in warps]
    waits = [warp.index(_WAIT) + 1 if _WAIT in warp else 0 for warp in names]
    tests = [next((at for at, one in enumerate(warp) if is_test(one)), 0) for warp in warps]
    shared = compiled.static_smem + launch.dynamic_smem
    fits, _ = resident_blocks(gpu.arch, launch.threads, compiled.registers, shared)
    count = min(max(1, fits), -(-len(indices) // gpu.multiprocessors))
    rounds = -(-len(indices) // (count * gpu.multiprocessors))
    per_us = gpu.clock_ghz * 1e3

    def cycles(part: Work, miss: float, starts: list[int]) -> float:
        copies = [part] * count
        timed = cycles_of(gpu, code, copies, miss, starts=starts * count, is_cold=True)
        return timed[0] * rounds

    # What no kernel of the chain has written is in memory.
    begins = [warp[:wait] for warp, wait in zip(work.warps, waits, strict=True)]
    first_cycles = cycles(dataclasses.replace(work, warps=begins), gpu.memory_latency, [])
    miss = gpu.fresh_latency if any(waits) else gpu.memory_latency
    after = slowed = cycles(work, miss, waits) / per_us
    if any(waits) and gpu.busy_latency != miss:
        slowed = cycles(work, gpu.busy_latency, waits) / per_us
    read = SECTOR * sum(blocks.fetched[place] for place in places) / gpu.memory_gb_s / 1e3
    if any(tests):  # a copy is waited for where its barrier is tested
        last = cycles(work, miss, tests) / per_us
    else:  # loads are needed at once; a ring's copies follow each other to the end
        last = 0.0 if any("LDGSTS" in warp for warp in names) else after
    return Link(
        launch.kernel,
        is_early=any(waits),
        allows_first=any(_ALLOW in warp[:at] for warp, at in zip(names, waits, strict=True)),
        share=min(1.0, len(indices) / (max(1, fits) * gpu.multiprocessors)),
        reading_us=read,
        asking_us=max(first_cycles, gpu.memory_latency) / per_us,
        work_us=after,
        last_us=last,
        slowed_us=slowed - after,
        assumed=tuple(execution.assumed([code[at] for at in {one.index for one in blocks.issued}])),
    )


@dataclass(frozen=True)
class Chain:
    """When the kernels of a chain end. Times are in microseconds."""

    time_us: float
    work_us: float
    """What the kernels do with the output of the previous ones."""
    launch_us: float
    """From the end of a kernel until the next one can go on."""

    @property
    def reading_us(self) -> float:
        """The rest: kernels wait for what they have asked for in memory."""
        return self.time_us - self.work_us - self.launch_us


def chain_of(gpu: GpuModel, links: Sequence[Link]) -> Chain:
    """Return the times of a chain in a graph that is launched again and again.

    A kernel starts when the previous one allows it and its blocks have room next to those of the
    kernels that still run. The first kernel starts after the last of the previous graph.
    """
    _, reads = _schedule(gpu, links, [])
    return _schedule(gpu, links, reads)[0]


def _schedule(gpu: GpuModel, links: Sequence[Link], reads: _Spans) -> tuple[Chain, _Spans]:
    """Return the times of a chain, and when memory is read. reads: when it is, as far as known."""
    end = allowed = launches = memory = works = 0.0
    found: list[tuple[float, float]] = []
    running: list[tuple[float, float]] = []  # end and share of each kernel so far
    for link in links:
        room = _room_at(running, link.share) + gpu.early_room_us
        start = max(allowed + gpu.early_start_us, room)
        ready = max(start, end + gpu.early_wait_us)
        if not link.is_early:
            start = ready = end + gpu.graph_us
        launches += ready - end
        allowed = start if link.allows_first or not link.is_early else ready
        work = link.work_us + link.slowed_us * _share_of(reads, ready, link.work_us)
        works += work
        end = ready + work
        begin = max(memory, start)
        memory = begin + link.reading_us  # one kernel's bytes after the other's
        found.append((begin, memory))
        if link.is_early:
            latency = gpu.copy_latency / gpu.clock_ghz / 1e3
            arrived = max(start + link.asking_us, memory + latency * (link.reading_us > 0))
            end = max(end, arrived + link.last_us)
        running.append((end, link.share))
    return Chain(end, works, launches), found


def _share_of(spans: _Spans, begin: float, length: float) -> float:
    """Return the share of a time that lies in any of the spans, which do not overlap."""
    covered = (min(end, begin + length) - max(first, begin) for first, end in spans)
    return sum(max(0.0, one) for one in covered) / length if length else 0.0


def _room_at(running: Sequence[tuple[float, float]], share: float) -> float:
    """Return when kernels have ended that leave room for a share, given those in order."""
    taken = 0.0
    for end, one in reversed(running):
        taken += one
        if taken + share > 1:
            return end
    return 0.0
