"""Predict a chain of kernels, each of which starts before the previous one has ended.

A kernel that is launched early (programmatic dependent launch) first asks for what no kernel of the
chain writes, such as weights, and then waits for the previous kernel. In the probe's chains a wait
ends only when the block's own weights have arrived, too. Each part is simulated for the longest
block of the grid, with as many copies of it as a multiprocessor gets; the instruction caches hold
the code of other kernels then. What the hardware adds was measured by scripts/probe.cu.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from attention_kernels.inspection import execution
from attention_kernels.inspection.blocks import Blocks
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
_REQUESTS = ("LDG", "LDGSTS", "UBLKCP")  # for what may be in memory


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
    delay_us: float
    """From its start until it asks for that."""
    asking_us: float
    """From its start until what they ask for before they wait has arrived, if nobody else reads."""
    work_us: float
    """From the end of its wait on."""
    is_ring: bool = False
    """Whether it works on what it asks for while the rest arrives."""
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
    names = [[code[index].base for index, *_ in warp] for warp in work.warps]
    waits = [warp.index(_WAIT) + 1 if _WAIT in warp else 0 for warp in names]
    shared = compiled.static_smem + launch.dynamic_smem
    fits, _ = resident_blocks(gpu.arch, launch.threads, compiled.registers, shared)
    count = min(max(1, fits), -(-len(indices) // gpu.multiprocessors))
    rounds = -(-len(indices) // (count * gpu.multiprocessors))

    def us(part: Work, miss: float, starts: list[int], sharing: float = 0) -> float:
        copies, at = [part] * count, starts * count
        timed = cycles_of(gpu, code, copies, miss, starts=at, is_cold=True, sharing=sharing)
        return timed[0] * rounds / gpu.clock_ghz / 1e3

    def before(ends: Sequence[int]) -> Work:
        parts = [warp[:end] for warp, end in zip(work.warps, ends, strict=True)]
        return dataclasses.replace(work, warps=parts)

    # What no kernel of the chain has written is in memory. The largest requests are for that; what
    # is loaded before them is a few words that every block loads, so they are in L2.
    sizes = [
        [misses * (code[index].base in _REQUESTS) for index, _, _, misses in warp[:wait]]
        for warp, wait in zip(work.warps, waits, strict=True)
    ]
    firsts = [size.index(max(size)) if size else 0 for size in sizes]
    asking = us(before(waits), gpu.memory_latency, [])
    if any(waits):
        after = us(work, gpu.fresh_latency, waits, _readers(blocks, places) * gpu.line_cycles)
    else:
        after = us(work, gpu.memory_latency, waits)
    read = SECTOR * sum(blocks.fetched[place] for place in places) / gpu.memory_gb_s / 1e3
    return Link(
        launch.kernel,
        is_early=any(waits),
        allows_first=any(_ALLOW in warp[:at] for warp, at in zip(names, waits, strict=True)),
        share=min(1.0, len(indices) / (max(1, fits) * gpu.multiprocessors)),
        reading_us=read,
        delay_us=us(before(firsts), gpu.l2_latency, []),
        asking_us=max(asking, gpu.memory_latency / gpu.clock_ghz / 1e3),
        work_us=after,
        is_ring=any("LDGSTS" in warp for warp in names),
        assumed=tuple(execution.assumed([code[at] for at in {one.index for one in blocks.issued}])),
    )


def _readers(blocks: Blocks, places: Collection[int]) -> float:
    """Return how many blocks ask for the same sector outside the places.

    It is the average over all requests for sectors that several blocks ask for.
    """
    asked = Counter(one for seen in blocks.seen for one in seen if one >> 35 not in places)
    counts = [count for count in asked.values() if count > 1]
    return sum(count * count for count in counts) / max(1, sum(counts))


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

    A kernel's blocks start when the previous one allows it and they have room next to those of the
    kernels that still run: some at once, the others later. Its wait ends when the previous kernel
    has ended and what it asked for has arrived; a ring has asked for a part only. The first kernel
    starts after the last of the previous graph.
    """
    end = allowed = launches = memory = 0.0
    latency = gpu.copy_latency / gpu.clock_ghz / 1e3
    running: list[tuple[float, float]] = []  # until when each kernel so far takes which share
    for link in links:
        start = first = allowed + gpu.early_start_us
        free = 1 - sum(share for until, share in running if until > first)
        at_once = min(1.0, max(0.0, free / link.share))  # how many of the blocks have room then
        if at_once < 1:
            start = max(start, _room_at(running, link.share))
        ready = max(start, end + gpu.early_wait_us)
        if not link.is_early:
            start = first = ready = end + gpu.graph_us
        launches += ready - end
        # One kernel's bytes after the other's
        memory = max(memory, first + link.delay_us) + at_once * link.reading_us
        if at_once < 1:
            memory = max(memory, start + link.delay_us) + (1 - at_once) * link.reading_us
        asks = link.is_early and link.reading_us > 0
        arrived = max(start + link.asking_us, memory + latency) if asks else 0.0
        if not link.is_ring:
            ready = max(ready, arrived)
        allowed = start if link.allows_first or not link.is_early else ready
        end = max(ready + link.work_us, arrived)
        running.append((end + gpu.early_room_us, link.share))
    return Chain(end, sum(link.work_us for link in links), launches)


def _room_at(running: Sequence[tuple[float, float]], share: float) -> float:
    """Return when kernels have ended that leave room for a share, given those in order."""
    taken = 0.0
    for end, one in reversed(running):
        taken += one
        if taken + share > 1:
            return end
    return 0.0
