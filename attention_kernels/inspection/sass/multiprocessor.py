"""A model of one multiprocessor: the cycles in which it executes the warps of some blocks.

It issues the instructions that execute.py records, cycle by cycle, with the stalls and scoreboards
that nvcc encoded in them. docs/prediction.md says what is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from attention_kernels.inspection.launches import WARP
from attention_kernels.inspection.sass import stalls
from attention_kernels.inspection.sass.asynchronous import is_numbered
from attention_kernels.inspection.sass.decode import Instruction
from attention_kernels.inspection.sass.events import Events, Pending, events_of
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.stalls import Watch
from attention_kernels.inspection.sass.state import STORES, WARPGROUP, Blocks

# Latencies in cycles, as scripts/probe.cu measured them on an H200; that of constants is an
# estimate.
_SHUFFLE = 24
# Latency of each pipe until the result is ready, and until the operands have been read.
_LATENCIES = {"special": (17, 8), "constant": (30, 10), "tensor": (24, 10)}
# Cycles from the end of a warpgroup's product until a warp that waits for it can go on. With this
# figure the probe's loops take as long in the simulation as on the GPU.
_PRODUCT = 41
_FIXED = (4, 4)  # arithmetic of fixed latency, which nvcc's stall counts cover
_BARRIER, _ARRIVAL = 12, 2  # cycles per barrier, and per warp that arrives at it
# Cycles from a warp's arrival at a cluster's barrier, with its memory barrier, until it can go on,
# and of these until it can execute what follows the arrival.
_CLUSTER, _CLUSTER_ARRIVAL = 915, 740
# Cycles in which a scheduler hands over one wavefront of a request to shared memory, or a shuffle.
# A warp alone needs twice as long for its requests as four schedulers that take turns.
_PORT = {"shared": 2.0, "shuffle": 4.0}
# A scheduler's instruction cache: instructions in a line, sets, lines in a set, and cycles until a
# line that is not there arrives. A loop of the probe takes 1.04 cycles per instruction within
# 32 KB, 1.14 if it is half a percent longer, as with four lines in a set, and 2.22 at 64 KB.
_LINE, _SETS, _WAYS, _FETCH = 8, 64, 4, 10.8
_QUEUE = 40  # warps wait while this many wavefronts are outstanding
SCHEDULERS = 4
SECTOR, WAVEFRONT = 32, 128  # bytes
# Cycles in which an instruction reads its registers: in each, one from each of two banks
# (Huerta et al., arXiv:2503.20481).
_WINDOW = 3


Issued: TypeAlias = tuple[int, int, int, int]
"""An instruction of a warp: index, wavefronts, lines, sectors that go to L2."""


@dataclass(frozen=True)
class Work:
    """The instructions and the memory traffic of one block's warps."""

    warps: list[list[Issued]]
    """The instructions of each warp."""
    parts: list[list[int]]
    """Position of each warp after 0, 1, ... 7 eighths of the block's instructions."""
    counts: Counter[str]
    """Instructions in total and by pipe, wavefronts, lines and misses; of products of warpgroups
    the FLOP and the wavefronts of their operands."""
    events: Events = field(default_factory=Events)

    @property
    def instructions(self) -> int:
        """Instructions executed by all warps."""
        return self.counts["issue"]


PIPES = {
    "fma": ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"),
    "multiply": ("IMAD",),
    "special": ("MUFU", "I2F", "F2I", "FRND", "F2F"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS", "SYNCS"),
    "global": ("LDG", "STG", "LDGSTS", "LD", "ST", "RED", "ATOM", "ATOMG", "LDL", "STL"),
    "shuffle": ("SHFL",),
    "tensor": ("HMMA", "IMMA"),
    "warpgroup": ("HGMMA",),
    "tile": ("UTMALDG", "UBLKCP"),
    "constant": ("LDC", "ULDC", "S2R"),
    "control": ("BRA", "BSSY", "BSYNC", "EXIT", "BAR", "NOP", "WARPSYNC", "BREAK", "DEPBAR",
                "WARPGROUP", "USETMAXREG", "ELECT"),
}  # fmt: skip
_LOAD_STORE = ("shared", "global", "shuffle")
_SLOW = ("special", "constant")  # queued with the requests to memory
_PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names}
_WAVEFRONTS = {
    "STS": "stores", "STSM": "stores", "LDGSTS": "copies", "UTMALDG": "tiles", "UBLKCP": "tiles",
}  # fmt: skip
# Instructions that contribute to an event or wait for one.
_EVENTFUL = ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "BAR", "WARPGROUP", "USETMAXREG")
_UNIFORM = ("S2UR", "R2UR", "VOTEU")


def _pipe(one: Instruction) -> str:
    if one.base in _PIPE_OF:
        return _PIPE_OF[one.base]
    return "uniform" if one.base[0] == "U" or one.base in _UNIFORM else "integer"


def product_of(one: Instruction) -> tuple[int, int]:
    """Return the FLOP of a product of a warpgroup (HGMMA), and the wavefronts of its operands.

    B is in shared memory, and A may be. Each is read once, for all four warps.
    """
    m, n, k = map(int, one.modifiers[0].split("x"))
    rows = n + (m if one.operands[1].startswith("gdesc") else 0)
    return 2 * m * n * k, rows * k * 2 // WAVEFRONT


def counts_of(blocks: Blocks) -> list[Counter[str]]:
    """Return each block's instructions by pipe, and its wavefronts, lines and misses."""
    code = blocks.code
    shape = len(code), len(blocks.indices), blocks.warps
    executed, *requests = arrays = np.zeros((4, *shape), np.int32)
    for issue in blocks.issued:
        counted = issue.warps, issue.wavefronts, issue.lines, issue.misses
        for total, by_warp in zip(arrays, counted, strict=True):
            if by_warp is not None:
                total[issue.index] += by_warp.reshape(shape[1:])
    found: list[Counter[str]] = [Counter() for _ in blocks.indices]
    for index in np.flatnonzero(executed.any((1, 2))).tolist():
        one = code[index]
        names = "issue", _pipe(one), _WAVEFRONTS.get(one.base, "loads"), "lines", "misses"
        for name, array in zip(names, (executed, executed, *requests), strict=True):
            for counts, count in zip(found, array[index].sum(1).tolist(), strict=True):
                counts[name] += count
        if one.base == "HGMMA":
            for name, per in zip(("products", "operands"), product_of(one), strict=True):
                for counts, warps in zip(found, executed[index].sum(1).tolist(), strict=True):
                    counts[name] += per * warps // WARPGROUP
    return found


def work_of(blocks: Blocks, number: int, counts: Counter[str]) -> Work:
    """Return what the warps of block `number` of the emulated blocks execute."""
    of_block = slice(number * blocks.warps, (number + 1) * blocks.warps)
    issued = [issue for issue in blocks.issued if issue.warps[of_block].any()]
    warps: list[list[Issued]] = [[] for _ in range(blocks.warps)]
    parts: list[list[int]] = []
    for at, issue in enumerate(issued):
        if at >= len(issued) * len(parts) / 8:
            parts.append([len(warp) for warp in warps])
        wavefronts, lines, misses = (
            [0] * blocks.warps if x is None else x[of_block].tolist()
            for x in (issue.wavefronts, issue.lines, issue.misses)
        )
        for warp in np.flatnonzero(issue.warps[of_block]).tolist():
            warps[warp].append((issue.index, wavefronts[warp], lines[warp], misses[warp]))
    return Work(warps, parts, counts, events_of(blocks, number, issued))


class Fetch:
    """The instruction caches of the schedulers, which drop the least recently used line."""

    def __init__(self, lines: Collection[int]) -> None:
        """lines: those of all warps; if they fit, they are there from an earlier launch."""
        self._fits = len(lines) <= _SETS * _WAYS
        self._arrivals: list[defaultdict[int, dict[int, float]]] = [
            defaultdict(dict) for _ in range(SCHEDULERS)
        ]
        self._free = [0.0] * SCHEDULERS  # when each has fetched its last line

    def arrival(self, scheduler: int, line: int, asked: float) -> float:
        """Return when a line that is asked for at a time is there."""
        if self._fits:
            return 0.0
        lines = self._arrivals[scheduler][line % _SETS]
        when = lines.pop(line, None)
        if when is None:
            when = self._free[scheduler] = max(self._free[scheduler], asked) + _FETCH
            if len(lines) == _WAYS:
                del lines[next(iter(lines))]
        lines[line] = when  # now the last in the order
        return when


def cycles_of(  # noqa: C901, PLR0912, PLR0915 - one loop over time, with what one instruction does
    gpu: GpuModel,
    code: Sequence[Instruction],
    works: Sequence[Work],
    miss_latency: float,
    most: float = math.inf,
    watch: Watch | None = None,
) -> tuple[float, list[int]]:
    """Return the cycles in which one multiprocessor executes some blocks, and how many instructions
    each of them executes. watch: records why each warp does not issue, until all have ended.

    Each scheduler issues one instruction a cycle: from the same warp as before if that is ready,
    otherwise from the oldest that is.
    """
    integer = SCHEDULERS * WARP / gpu.integer_lanes
    busy = {
        **dict.fromkeys((*_LOAD_STORE, "control", "warpgroup", "tile"), 1.0),
        **dict.fromkeys(("integer", "multiply", "uniform", "constant"), integer),
        "fma": SCHEDULERS * WARP / gpu.fp32_lanes,
        "special": SCHEDULERS * WARP / gpu.special_lanes,
        "tensor": gpu.tensor_cycles,
    }
    pipe_of = [_pipe(one) for one in code]
    streams = [warp for work in works for warp in work.warps]
    owner = [number for number, work in enumerate(works) for _ in work.warps]
    firsts = [*itertools.accumulate((len(work.warps) for work in works), initial=0)][:-1]
    running = [0] * len(works)
    arrived: list[list[int]] = [[] for _ in works]
    opens = [0.0] * len(works)  # when each block's barrier opens
    at = [0] * len(streams)
    if most < sum(work.instructions for work in works):  # each block starts at another point
        # A block that waits for copies begins with a long wait, which is not part of the pace.
        first = 1 if works[0].events.needs else 0
        parts = (
            work.parts[first + (4 - first) * number // len(works)]
            for number, work in enumerate(works)
        )
        at = list(itertools.chain.from_iterable(parts))
    events = [
        Pending(work.events, at[first : first + len(work.warps)])
        for work, first in zip(works, firsts, strict=True)
    ]
    is_eventful = [one.base in _EVENTFUL for one in code]
    numbered = [is_numbered(one) for one in code]
    product_cycles = {
        index: max(flop / gpu.warpgroup_flop, operands)
        for index, one in enumerate(code)
        if one.base == "HGMMA"
        for flop, operands in [product_of(one)]
    }
    products = 0.0  # when the tensor cores have finished all products of warpgroups so far
    boards = [[0.0] * 6 for _ in streams]
    groups: list[list[float]] = [[] for _ in streams]  # when cp.async groups arrive
    clusters = [0.0] * len(streams)  # when the barrier opens at which a warp has arrived
    pending: list[list[tuple[float, int]]] = [[] for _ in range(SCHEDULERS)]
    ready: list[list[int]] = [[] for _ in range(SCHEDULERS)]
    for warp, stream in enumerate(streams):
        if at[warp] < len(stream):
            running[owner[warp]] += 1
            pending[warp % SCHEDULERS].append((0.0, warp))
    lines_of_code = {index // _LINE for stream in streams for index, *_ in stream}
    fetch = Fetch(lines_of_code)
    free = [0.0] * SCHEDULERS
    ports = [0.0] * SCHEDULERS  # when each has handed over its last request to shared memory
    last = [-1] * SCHEDULERS
    pipes = [dict.fromkeys(busy, 0.0) for _ in range(SCHEDULERS)]
    banks = [[0.0, 0.0] for _ in range(SCHEDULERS)]
    l2_rate = min(64.0, gpu.l2_bytes_per_cycle / gpu.multiprocessors)
    shared = l2 = end = 0.0
    issued = [0] * len(works)
    issued_at = [0.0] * len(streams)  # each warp's last instruction
    left = most

    def wake(warp: int, when: float) -> None:
        index = streams[warp][at[warp]][0]
        arrives = fetch.arrival(warp % SCHEDULERS, index // _LINE, issued_at[warp])
        if arrives > when:
            when = arrives
            if watch:
                watch.add(warp, when, index, stalls.FETCH)
        for board in code[index].waits:
            when = max(when, boards[warp][board])
        heapq.heappush(pending[warp % SCHEDULERS], (when, warp))
        if watch:
            watch.waits(warp, code[index].waits, index)

    def resume(number: int, event: int) -> None:
        """Wake the warps of a block that wait for an event, which is complete."""
        state = events[number]
        for warp, next_at in state.waiting.pop(event, ()):
            index = streams[warp][at[warp] - 1][0]
            one = code[index]
            when = max(next_at, state.when[event] + (_BARRIER if one.base == "BAR" else 0))
            if watch:
                next_up = streams[warp][at[warp]][0]
                watch.add(warp, when, next_up, stalls.awaiting(one.base), state.cause[event])
            if one.base == "SYNCS" and one.writes < 6:  # whether the phase is complete is a result
                result = state.when[event] + gpu.shared_latency
                boards[warp][one.writes] = max(boards[warp][one.writes], result)
                if watch:
                    watch.sets(warp, one.writes, result, index, is_global=False)
            wake(warp, when)

    def held(warp: int, s: int, now: float, *, is_first: bool) -> str:
        """Return why a warp that waits for no result is not the one to issue.

        is_first: whether it would be selected, so that only its registers can hold it back.
        """
        index = streams[warp][at[warp]][0]
        pipe = pipe_of[index]
        found, limit = stalls.NOT_SELECTED, now
        if pipes[s][pipe] > limit:
            found, limit = stalls.MIO if pipe in _SLOW else stalls.MATH, pipes[s][pipe]
        queued = max(shared, ports[s]) - _QUEUE
        if pipe in _LOAD_STORE and queued > limit:
            found, limit = stalls.LG if pipe == "global" else stalls.MIO, queued
        even, odd = code[index].registers
        if is_first and (
            (even and banks[s][0] + even - _WINDOW > limit)
            or (odd and banks[s][1] + odd - _WINDOW > limit)
        ):
            found = stalls.DISPATCH
        return found

    while left > 0:
        times = [
            (free[s] if ready[s] else max(free[s], pending[s][0][0]), s)
            for s in range(SCHEDULERS)
            if ready[s] or pending[s]
        ]
        if not times:
            break
        now, s = min(times)
        while pending[s] and pending[s][0][0] <= now:
            ready[s].append(heapq.heappop(pending[s])[1])
        ready[s].sort()
        order = [last[s], *ready[s]] if last[s] in ready[s] else ready[s]
        soonest = math.inf
        for warp in order:
            index = streams[warp][at[warp]][0]
            pipe, (even, odd) = pipe_of[index], code[index].registers
            possible = pipes[s][pipe]
            if even:
                possible = max(possible, banks[s][0] + even - _WINDOW)
            if odd:
                possible = max(possible, banks[s][1] + odd - _WINDOW)
            if pipe in _LOAD_STORE:
                possible = max(possible, shared - _QUEUE, ports[s] - _QUEUE)
            if possible <= now:
                break
            soonest = min(soonest, possible)
        else:
            free[s] = min(soonest, pending[s][0][0]) if pending[s] else soonest
            if watch:
                for warp in ready[s]:
                    why = held(warp, s, now, is_first=warp == order[0])
                    watch.add(warp, free[s], streams[warp][at[warp]][0], why)
            continue
        ready[s].remove(warp)
        if watch:
            for other in ready[s]:
                why = held(other, s, now, is_first=False)
                watch.add(other, now + 1, streams[other][at[other]][0], why)
            watch.issue(warp, now, streams[warp][at[warp]][0])
        last[s] = warp
        index, wavefronts, lines, misses = streams[warp][at[warp]]
        one, pipe = code[index], pipe_of[index]
        for bank, count in enumerate(one.registers):
            if count:
                banks[s][bank] = max(banks[s][bank], now) + count
        issued[owner[warp]] += 1
        issued_at[warp] = now
        left -= 1
        free[s] = now + 1
        pipes[s][pipe] = now + busy[pipe]
        if pipe == "multiply":
            pipes[s]["fma"] = max(pipes[s]["fma"], now + 1)
        done, read = (now + cycles for cycles in _LATENCIES.get(pipe, _FIXED))
        if pipe in _LOAD_STORE:
            cost = max(1, wavefronts, lines)
            begin = max(shared, now + 2)
            shared = begin + cost
            if pipe in _PORT:
                begin = max(begin, ports[s])
                ports[s] = begin + _PORT[pipe] * cost
            read = begin + 4
            if pipe == "shuffle":
                done = begin + _SHUFFLE - 2
            elif pipe == "shared":
                done = begin + cost - 3 + gpu.shared_latency
            elif one.base in STORES:
                l2 = max(l2, begin) + misses * SECTOR / l2_rate
                done = begin + cost
            elif misses:
                l2 = max(l2, begin) + misses * SECTOR / l2_rate
                done = max(begin, l2) + miss_latency
            else:
                done = begin + cost + gpu.l1_latency
            if one.base == "LDGSTS":
                groups[warp].append(done)
                if watch:
                    watch.copies[warp] = index
        elif pipe == "tile":
            l2 = max(l2, now) + misses * SECTOR / l2_rate
            done = l2 + (miss_latency if misses else gpu.l1_latency)
        for board, when in ((one.writes, done), (one.reads, read)):
            if board < 6:
                boards[warp][board] = max(boards[warp][board], when)
                if watch:
                    watch.sets(warp, board, when, index, is_global=pipe == "global")
        next_at = now + max(1, one.stall)
        if one.base == "DEPBAR" and groups[warp]:  # the latest copies may still be in flight
            next_at = max(next_at, *groups[warp][: max(1, len(groups[warp]) // 2)])
            groups[warp].clear()
            if watch:
                behind = min(at[warp] + 1, len(streams[warp]) - 1)
                next_up = streams[warp][behind][0]
                watch.add(warp, next_at, next_up, stalls.LONG, watch.copies[warp])
        elif one.base == "UCGABAR_ARV":
            clusters[warp] = now + _CLUSTER
            next_at = max(next_at, now + _CLUSTER_ARRIVAL)
        elif one.base == "UCGABAR_WAIT":
            next_at = max(next_at, clusters[warp])
        number = owner[warp]
        awaited = None
        if is_eventful[index]:
            state, local, place = events[number], warp - firsts[number], at[warp]
            event = state.events.signals[local].get(place)
            when = done if pipe == "tile" else begin + cost if pipe == "shared" else now
            if event is not None and state.contribute(event, when, index):
                if pipe == "warpgroup":
                    products = max(products, state.when[event]) + product_cycles[index]
                    state.when[event] = done = products + _PRODUCT
                resume(number, event)
            if "ARV" not in one.modifiers:
                awaited = state.events.awaits[local].get(place)
        at[warp] += 1
        end = max(end, next_at, done)
        if awaited is not None:
            events[number].waiting[awaited].append((warp, next_at))
            if events[number].left[awaited] == 0:
                resume(number, awaited)
            continue
        if at[warp] == len(streams[warp]):
            running[number] -= 1
        elif one.base == "BAR" and not numbered[index]:
            arrived[number].append(warp)
            opens[number] = max(opens[number], now) + _ARRIVAL
        else:
            if watch:
                watch.add(warp, next_at, streams[warp][at[warp]][0], stalls.after(one.base))
            wake(warp, next_at)
            continue
        if arrived[number] and len(arrived[number]) == running[number]:
            for other in arrived[number]:
                if watch:
                    opened = opens[number] + _BARRIER
                    (waiting, *_), (next_up, *_) = streams[other][at[other] - 1 : at[other] + 1]
                    watch.add(other, opened, next_up, stalls.BARRIER, waiting)
                wake(other, opens[number] + _BARRIER)
            arrived[number].clear()
    if watch:
        for warp, stream in enumerate(streams):
            latest = stream[at[warp] - 1][0]
            if at[warp] < len(stream):  # part of what it waits for is missing
                reason = stalls.awaiting(code[latest].base)
                watch.add(warp, end, stream[at[warp]][0], reason, latest)
            else:
                watch.add(warp, end, latest, stalls.EXITED)
    return end, issued
