"""Time the blocks of a launch: simulate one multiprocessor, and share out the grid among all.

A multiprocessor issues the instructions that its warps execute cycle by cycle, with the stalls and
scoreboards that nvcc encoded in them. docs/prediction.md says what is left out.

It can also record in every cycle why each warp does not issue. The reasons are Nsight Compute's
(`smsp__pcsamp_warps_issue_stalled_*`). As in its samples, a stall belongs to the instruction that
the warp issues next: a warp at a barrier stalls at the instruction behind it.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from attention_kernels.inspection.resources import WARP
from attention_kernels.inspection.sass.decode import PRODUCTS, Code, Instruction
from attention_kernels.inspection.sass.execute.asynchronous import is_numbered
from attention_kernels.inspection.sass.execute.state import STORES, Event
from attention_kernels.inspection.sass.execute.work import Issued, Line, Work, pipe_of
from attention_kernels.inspection.sass.gpus import SCHEDULERS, SECTOR, GpuModel

# Latencies in cycles, as scripts/probe.cu measured them on an H200.
_SHUFFLE = 24
# Latency of each pipe until the result is ready, and until the operands have been read.
_LATENCIES = {"special": (17, 8), "constant": (30, 10), "tensor": (24, 10)}
# Cycles from the end of a warpgroup's product until a warp that waits for it can go on. With this
# figure the probe's loops take as long in the simulation as on the GPU.
_START, _PRODUCT = 12, 29
# A warpgroup's next product is issued this many cycles after the seventh before it has ended: so
# the probe's stamps say. A warp that has issued more waits, whatever follows.
_AHEAD, _NEXT = 7, 20
_FIXED = (4, 4)  # arithmetic of fixed latency, which nvcc's stall counts cover
# Cycles per barrier, per warp that arrives at it, and per barrier of a cluster.
_BARRIER, _ARRIVAL, _CLUSTER = 12, 2, 400
# Cycles until what a block sends is there. With these figures an exchange in a cluster takes longer
# in the simulation than the probe's of 1 word with all 8 blocks, and less time than that of 96; one
# through memory takes as long as that of 12 of 96 blocks, which poll.
_SENT = {"STAS": 200} | dict.fromkeys((*STORES, "ATOM", "ATOMG"), 760)
# Cycles in which a scheduler hands over one wavefront of a request to shared memory, or a shuffle.
# A warp alone needs twice as long for its requests as four schedulers that take turns.
_PORT = {"shared": 2.0, "shuffle": 4.0}
# A scheduler's instruction cache: instructions in a line, sets, lines in a set, and cycles until a
# line that is not there arrives. A loop of the probe takes 1.04 cycles per instruction within
# 32 KB, 1.14 if it is half a percent longer, as with four lines in a set, and 2.22 at 64 KB.
_LINE, _SETS, _WAYS, _FETCH = 8, 64, 4, 10.8
# While tensor cores execute a product of a warpgroup, other instructions keep their pipes busy
# longer by these factors, by pipe or by name, presumably because both need the ports of registers.
_BESIDE = {"fma": 2.0, "multiply": 2.0, "integer": 2.0, "special": 1.3}
# The cycles by which the results of such instructions are late; the cycles by which each of those
# named here delays products if its pipe has no gap.
_LATER, _DELAY, _DELAYING = 3, 0.2, ("FFMA", "FMUL", "FADD")
# Cycles of a request beside products, and of each of its wavefronts: if products load operands half
# of the time, as with A from registers, and how many more if they load all the time; and those of
# each register that it writes, or stores. Loads from global memory take the same way.
_REQUEST, _WRITTEN, _STORED = ((0.2, 2.2), (1.2, 1.4)), 1.7, 0.7
# Warps that ask for shared memory wait while this many wavefronts are outstanding, and those that
# ask for global memory while the load-store unit has this many such requests: so the probe says.
_QUEUE, _REQUESTS = 160, 64
# If all multiprocessors ask memory at once: the share of its bandwidth that loads get, that copies
# to shared memory get, and the cycles until the latter begin to arrive. So the probe says.
_LOADS, _COPIES, _COPIED = 0.7, 1.11, 850
# Cycles by which a request for several lines is answered later than one for a single line, if all
# multiprocessors ask: it waits for the farthest line.
_FARTHEST = 84
# Cycles in which an instruction reads its registers: in each, one from each of two banks
# (Huerta et al., arXiv:2503.20481).
_WINDOW = 3
# Cycles for which the warp that issued last comes before the others: less than a special function
# takes, or one warp would have them all.
_GREEDY = 5
_LOAD_STORE = ("shared", "global", "shuffle")
_SLOW = ("special", "constant")  # queued with the requests to memory
_MAX_TIMED = 100_000  # instructions timed; the rest are assumed to run at the same pace
_MAX_OBSERVED = 200_000  # instructions in which stalls are recorded
MARKED = 500_000
"""Instructions, from the blocks' first ones, in which readings of the clock are recorded."""

# ---- Stalls --------------------------------------------------------------------------------------

SELECTED, NOT_SELECTED = "selected", "not selected"
LONG, SHORT = "long scoreboard", "short scoreboard"
MIO, WAIT = "MIO throttle", "wait"
EXITED = "exited"
"""The warp has ended, but not yet the others: a profiler takes no sample of it."""


# The reason why a warp waits after an instruction: for its fixed latency, or until others wake it.
_AFTER = dict.fromkeys(("BRA", "BRX", "CALL", "RET", "JMP"), "branch resolving")
_AWAITING = {"SYNCS": LONG, "WARPGROUP": "gmma", "BAR": "barrier"}


class Stall(NamedTuple):
    """What a warp waits for, and where."""

    place: int
    """Index of the instruction that is issued next."""
    reason: str
    cause: int
    """Index of the instruction whose result is awaited, or of the barrier, otherwise `place`."""


StallCycles: TypeAlias = defaultdict[Stall, float]
"""The cycles that warps spent in each stall."""

# ---- The simulation ------------------------------------------------------------------------------


class _Scheduler:
    """A scheduler: its warps, its pipes, and its cache of instructions."""

    def __init__(self, pipes: Iterable[str], has_all_lines: bool) -> None:
        self.pending: list[tuple[float, int]] = []
        """Warps that wait for results, with the times at which these are there: a heap."""
        self.ready: list[int] = []
        """Warps that wait for no result."""
        self.last = -1
        """The warp that issued last."""
        self.free = self.issued = self.port = 0.0
        """When it can issue, when it last has, and when its last request is in shared memory."""
        self.pipes = dict.fromkeys(pipes, 0.0)
        """When each pipe is free."""
        self.banks = [0.0, 0.0]
        """When the even and the odd registers of the last instructions have been read."""
        self.has_all_lines = has_all_lines
        """Whether all code fits into the cache and is there, from an earlier block."""
        self._lines: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._fetched = 0.0

    def fetch(self, line: int, requested: float) -> float:
        """Return when a requested line of code is in the cache.

        The least recently used line of its set makes room.
        """
        if self.has_all_lines:
            return 0.0
        lines = self._lines[line % _SETS]
        when = lines.pop(line, None)
        if when is None:
            when = self._fetched = max(self._fetched, requested) + _FETCH
            if len(lines) == _WAYS:
                del lines[next(iter(lines))]
        lines[line] = when  # now the last in the order
        return when


class _Block:
    """A block: its warps at the barrier, and the events for which its warps wait."""

    def __init__(self, number: int, work: Work, starts: Sequence[int]) -> None:
        """starts: position of each warp's first instruction that is simulated."""
        self.number, self.work = number, work
        self.issued = self.running = 0
        self.arrived: list[_Warp] = []
        self.opens = 0.0
        """When the barrier opens."""
        self.left = Counter(work.needs)
        """Contributions that each event still needs."""
        self.when: defaultdict[Event, float] = defaultdict(float)
        """When the last contribution to an event was made; if it is complete, when it was."""
        self.cause: dict[Event, int] = {}
        """The instruction that made that contribution."""
        self.arrives: defaultdict[int, float] = defaultdict(float)
        """When the latest request of each instruction is there."""
        self.waiting: defaultdict[Event, list[tuple[_Warp, float]]] = defaultdict(list)
        """Warps that wait for an event, and the time from which they could go on."""
        for warp, at in zip(work.warps, starts, strict=True):
            self.left.subtract(one[2] for one in warp[:at] if one[2])

    def contribute(self, event: Event, when: float, index: int) -> bool:
        """Record a contribution, and return whether it was the last one."""
        self.left[event] -= 1
        if when >= self.when[event]:
            self.when[event], self.cause[event] = when, index
        return self.left[event] == 0


@dataclass
class _Warp:
    """A warp of a block."""

    number: int
    """Its number on the multiprocessor."""
    block: _Block
    stream: list[Issued]
    at: int
    """Position of the next instruction in the stream."""
    issued: float = 0.0
    """When it issued the last instruction."""
    ready: float = 0.0
    """When the last result, barrier or event for which it waited was there."""
    boards: list[tuple[float, int, str]] = field(default_factory=lambda: [(0.0, 0, SHORT)] * 6)
    """When each of its scoreboards is released, by which instruction, and the reason to wait."""
    watched: float = 0.0
    """The time up to which its stalls have been recorded."""
    copies: list[float] = field(default_factory=list)
    """When its groups of asynchronous copies (cp.async) arrive."""
    copied: int = 0
    """The index of its last such copy."""
    products: list[Event] = field(default_factory=lambda: [("", 0, 0, 0)] * _AHEAD)
    """Its products of a warpgroup, in order, after some that never happen."""

    def __post_init__(self) -> None:
        self.advance(0)

    def advance(self, count: int = 1) -> None:
        """Move to the next instruction."""
        self.at += count
        # The index of the next instruction, or of the last if the warp has ended.
        self.index = self.stream[min(self.at, len(self.stream) - 1)][0]

    def release(self, board: int, result: tuple[float, int, str]) -> None:
        """Release a scoreboard when the last result for it is there."""
        if board < len(self.boards):
            self.boards[board] = max(self.boards[board], result)


class Multiprocessor:
    """One multiprocessor of a GPU that executes blocks of a kernel.

    Each scheduler issues one instruction a cycle: from the same warp as before if that is ready
    soon, otherwise, among the oldest block's, from the one that has been ready for longest.
    Schedulers take turns at what they share.
    """

    def __init__(
        self, gpu: GpuModel, code: Code, inputs: Mapping[str, tuple[float, float]]
    ) -> None:
        """inputs: of requests for them, by pipe, the latency in cycles and bytes per cycle."""
        self.gpu, self.code, self.inputs = gpu, code, inputs
        integer = SCHEDULERS * WARP / gpu.integer_lanes
        self.busy = {
            **dict.fromkeys((*_LOAD_STORE, "control", "warpgroup", "tile"), 1.0),
            **dict.fromkeys(("integer", "multiply", "uniform", "constant"), integer),
            "fma": SCHEDULERS * WARP / gpu.fp32_lanes,
            "special": SCHEDULERS * WARP / gpu.special_lanes,
            "tensor": gpu.tensor_cycles,
        }
        self.pipe_of = [pipe_of(one) for one in code]
        self.l2_rate = min(64.0, gpu.l2_bytes_per_cycle / gpu.multiprocessors)
        self.released, self.is_first = 0.0, False
        """When the previous launch has ended, for which blocks of an early launch wait; whether the
        blocks are the first of a launch after others, so that their code is not in the cache."""

    def run(
        self, works: Sequence[Work], most: float = math.inf, stalls: StallCycles | None = None
    ) -> tuple[float, list[int]]:
        """Return the cycles in which blocks are executed, and each one's number of instructions.

        most: instructions after which the simulation stops. stalls: records why warps do not issue,
        until all have ended. `marks` has the warp, the instruction and the cycle of each reading of
        the clock.
        """
        self._start(works, most)
        self.stalls = stalls
        self.marks: list[tuple[int, int, float]] = []
        issued = 0
        while issued < most:
            turns = [
                (one.free if one.ready else max(one.free, one.pending[0][0]), one.issued, n, one)
                for n, one in enumerate(self.schedulers)
                if one.ready or one.pending
            ]
            if not turns:
                break
            now, _, _, scheduler = min(turns)
            if warp := self._select(scheduler, now):
                self._issue(warp, scheduler, now)
                issued += 1
        for warp in self.warps:
            latest, reason = warp.stream[warp.at - 1][0], EXITED
            if warp.at < len(warp.stream):  # an event for which it waits never happens
                reason = _AWAITING.get(self.code[latest].base, WAIT)
            self._watch(warp, self.end, reason, latest)
        return self.end, [block.issued for block in self.blocks]

    def _start(self, works: Sequence[Work], most: float) -> None:
        # When the load-store unit, L2, the tensor cores and all units have served all requests so
        # far; and when the load-store unit has served each of the latest ones to global memory.
        self.asked = deque([0.0] * _REQUESTS, _REQUESTS)
        self.shared = self.l2 = self.products = self.end = 0.0
        starts = [[0] * len(work.warps) for work in works]
        if works[0].parts and most < sum(work.counts["issue"] for work in works):
            # Each block starts at another point.
            # A block that waits for copies begins with a long wait, which is not part of the pace.
            first = 1 if works[0].needs else 0
            places = (first + (4 - first) * number // len(works) for number in range(len(works)))
            starts = [work.parts[place] for work, place in zip(works, places, strict=True)]
        self.blocks = [_Block(i, *one) for i, one in enumerate(zip(works, starts, strict=True))]
        self.warps: list[_Warp] = []
        for block, start in zip(self.blocks, starts, strict=True):
            for stream, at in zip(block.work.warps, start, strict=True):
                self.warps.append(_Warp(len(self.warps), block, stream, at))
        lines = {index // _LINE for warp in self.warps for index, *_ in warp.stream}
        has_all = len(lines) <= _SETS * _WAYS and not self.is_first
        self.schedulers = [_Scheduler(self.busy, has_all) for _ in range(SCHEDULERS)]
        for warp in self.warps:
            if warp.at < len(warp.stream):
                warp.block.running += 1
                self.schedulers[warp.number % SCHEDULERS].pending.append((0.0, warp.number))

    def _watch(self, warp: _Warp, until: float, reason: str, cause: int | None = None) -> None:
        """Record why a warp does not issue its next instruction until a time.

        cause: the instruction for which it waits, if that is another one.
        """
        if self.stalls is not None and until > warp.watched:
            stall = Stall(warp.index, reason, warp.index if cause is None else cause)
            self.stalls[stall] += until - warp.watched
            warp.watched = until

    def _select(self, scheduler: _Scheduler, now: float) -> _Warp | None:
        """Return the warp that issues; if none can, set when the scheduler tries again."""
        ready, pending = scheduler.ready, scheduler.pending
        while pending and pending[0][0] <= now:
            ready.append(heapq.heappop(pending)[1])
        own, last = self.warps, scheduler.last if now - scheduler.issued < _GREEDY else -1
        ready.sort(key=lambda n: (n != last, own[n].block.number, own[n].ready, -n))
        first, selected, soonest = ready[0], None, math.inf
        for number in ready:
            possible, _ = self._possible(own[number], scheduler, now)
            if possible <= now:
                first, selected = -1, own[number]
                ready.remove(number)
                scheduler.last, scheduler.issued, scheduler.free = number, now, now + 1
                break
            soonest = min(soonest, possible)
        else:
            scheduler.free = min(soonest, pending[0][0]) if pending else soonest
        for number in ready if self.stalls is not None else ():
            _, why = self._possible(own[number], scheduler, now, is_first=number == first)
            self._watch(own[number], scheduler.free, why)
        return selected

    def _possible(
        self, warp: _Warp, scheduler: _Scheduler, now: float, *, is_first: bool = True
    ) -> tuple[float, str]:
        """Return when a warp that waits for no result can issue, and the reason if it is not now.

        is_first: whether it would be selected, so that only its registers can hold it back.
        """
        index = warp.index
        pipe, registers = self.pipe_of[index], self.code[index].registers
        when, why = now, NOT_SELECTED
        if scheduler.pipes[pipe] > when:
            when, why = scheduler.pipes[pipe], MIO if pipe in _SLOW else "math pipe throttle"
        if pipe == "warpgroup":
            ended = warp.block.when[warp.products[-_AHEAD]]  # 0 if not all warps have issued it
            when, why = max((when, why), (ended - _PRODUCT + _NEXT, "gmma"))
        if pipe in _LOAD_STORE:
            full = self.asked[0] if pipe == "global" else max(self.shared, scheduler.port) - _QUEUE
            if full > when:
                when, why = full, "LG throttle" if pipe == "global" else MIO
        for count, read in zip(registers, scheduler.banks, strict=True) if is_first else ():
            if count and read + count - _WINDOW > when:
                when, why = read + count - _WINDOW, "dispatch stall"
        return when, why

    def _issue(self, warp: _Warp, scheduler: _Scheduler, now: float) -> None:
        """Issue a warp's next instruction."""
        index, request, signal, awaited = warp.stream[warp.at]
        one, pipe, block = self.code[index], self.pipe_of[index], warp.block
        self._watch(warp, now, NOT_SELECTED)
        self._watch(warp, now + 1, SELECTED)
        if "SR_CLOCKLO" in one.operands:
            self.marks.append((warp.number, index, now))
        for bank, count in enumerate(one.registers):
            if count:
                scheduler.banks[bank] = max(scheduler.banks[bank], now) + count
        block.issued += 1
        warp.issued = now
        later = self._occupy(one, pipe, scheduler, now)
        read, served, done = self._serve(warp, pipe, scheduler, now, request)
        reason = LONG if pipe == "global" else SHORT
        warp.release(one.writes, (done + later, index, reason))
        warp.release(one.reads, (read, index, reason))
        # The next instruction is issued when nothing holds it back.
        held = self.released if one.base == "ACQBULK" else 0.0
        next_at = max(held, now + max(1, one.stall) + (later if one.stall >= _FIXED[0] else 0))
        next_at += _CLUSTER if one.base == "UCGABAR_WAIT" else 0
        warp.advance()
        if one.base == "LDGSTS":
            warp.copies.append(done)
            warp.copied = index
        elif one.base == "DEPBAR" and warp.copies:  # the latest copies may still be in flight
            next_at = max(next_at, *warp.copies[: max(1, len(warp.copies) // 2)])
            warp.copies.clear()
            self._watch(warp, next_at, LONG, warp.copied)
        warp.products += [signal] if signal and pipe == "warpgroup" else []
        if signal and block.contribute(signal, served + _SENT.get(one.base, 0), index):
            if one.base in PRODUCTS:
                block.when[signal] = done = self._multiply(one, block.when[signal])
            self._resume(block, signal)
        self.end = max(self.end, next_at, done)
        if awaited:
            block.waiting[awaited].append((warp, next_at))
            if block.left[awaited] == 0:
                self._resume(block, awaited)
        elif warp.at == len(warp.stream):
            block.running -= 1
            self._open(block)
        elif one.base == "BAR" and not is_numbered(one):
            block.arrived.append(warp)
            block.opens = max(block.opens, now) + _ARRIVAL
            self._open(block)
        else:
            self._watch(warp, next_at, _AFTER.get(one.base, WAIT))
            self._wake(warp, next_at)

    def _multiply(self, one: Instruction, issued: float) -> float:
        """Return when a warpgroup's product has ended, given when its last warp has issued it."""
        flop, operands = one.product
        cycles = max(flop / self.gpu.warpgroup_flop, operands)
        self.beside = [half + (2 * operands / cycles - 1) * more for half, more in _REQUEST]
        self.products = max(self.products, issued + _START) + cycles
        return self.products + _PRODUCT

    def _occupy(self, one: Instruction, pipe: str, scheduler: _Scheduler, now: float) -> int:
        """Keep a pipe busy with an instruction, and return the cycles by which its result is late.

        The instruction delays the next product: the end of the current one is known already.
        """
        later = _LATER if now < self.products and pipe in _BESIDE else 0
        if later and one.base in _DELAYING and scheduler.pipes[pipe] == now:
            self.products += _DELAY
        scheduler.pipes[pipe] = now + self.busy[pipe] * (_BESIDE[pipe] if later else 1.0)
        if pipe == "multiply":
            scheduler.pipes["fma"] = max(scheduler.pipes["fma"], now + 1)
        return later

    def _serve(
        self, warp: _Warp, pipe: str, scheduler: _Scheduler, now: float, request: Sequence[int]
    ) -> tuple[float, float, float]:
        """Return when operands are read, a request (of Issued) is served, and the result ready."""
        wavefronts, lines, *fetched = request
        if pipe == "tile":
            done = self._fetch(pipe, now, *fetched)
            return now + _FIXED[1], done, done
        if pipe not in _LOAD_STORE:
            result, operands = _LATENCIES.get(pipe, _FIXED)
            return now + operands, now, now + result
        cost = max(1, wavefronts, lines)
        begin = max(self.shared, now + 2)
        self.shared = begin + cost
        if now < self.products:
            one = self.code[warp.index]
            registers = one.size // 4 * (_STORED if one.base in ("STS", *STORES) else _WRITTEN)
            self.shared = begin + self.beside[0] + cost * self.beside[1] + registers
        if pipe in _PORT:
            begin = max(begin, scheduler.port)
            scheduler.port = begin + _PORT[pipe] * cost
        else:
            self.asked.append(self.shared)
        read, served = begin + 4, begin + cost
        if pipe == "shuffle":
            return read, served, begin + _SHUFFLE - 2
        if pipe == "shared":
            return read, served, served - 3 + self.gpu.shared_latency
        done = self._fetch(pipe, begin, *fetched) if fetched[0] else served + self.gpu.l1_latency
        arrives = warp.block.arrives  # what another warp has requested is there when it gets it
        done = arrives[warp.index] = max(done, arrives[warp.index])
        return read, served, served if self.code[warp.index].base in STORES else done

    def _fetch(self, pipe: str, now: float, misses: int, inputs: int) -> float:
        """Return when sectors that go to L2 are there, some of which hold inputs."""
        latency, rate = self.inputs[pipe]
        cycles = (misses - inputs) / self.l2_rate + inputs / rate
        self.l2 = max(self.l2, now) + cycles * SECTOR
        later = _FARTHEST if pipe == "global" and misses > 4 else 0
        return self.l2 + (latency if inputs else self.gpu.l2_latency) + later

    def _wake(self, warp: _Warp, when: float) -> None:
        """Let a warp go on at a time, once its code and the results that it needs are there."""
        one, scheduler = self.code[warp.index], self.schedulers[warp.number % SCHEDULERS]
        arrives = scheduler.fetch(warp.index // _LINE, warp.issued)
        if arrives > when:
            when = arrives
            self._watch(warp, when, "no instruction")
        if one.waits:
            released, cause, reason = max(warp.boards[board] for board in one.waits)
            self._watch(warp, released, reason, cause)
            if released > when:
                when = warp.ready = released
        heapq.heappush(scheduler.pending, (when, warp.number))

    def _resume(self, block: _Block, event: Event) -> None:
        """Wake the warps of a block that wait for an event, which is complete."""
        for warp, next_at in block.waiting.pop(event, ()):
            latest = warp.stream[warp.at - 1][0]
            one = self.code[latest]
            when = max(next_at, block.when[event] + (_BARRIER if one.base == "BAR" else 0))
            self._watch(warp, when, _AWAITING.get(one.base, WAIT), block.cause.get(event, 0))
            warp.ready = when
            if one.base == "SYNCS":  # whether the phase is complete is a result
                result = block.when[event] + self.gpu.shared_latency
                warp.release(one.writes, (result, latest, SHORT))
            elif event[0] == "words":
                warp.release(one.writes, (when + self.gpu.l2_latency, latest, LONG))
            self._wake(warp, when)

    def _open(self, block: _Block) -> None:
        """Open the barrier of a block if all warps that have not ended have arrived."""
        if block.arrived and len(block.arrived) == block.running:
            when = block.opens + _BARRIER
            for warp in block.arrived:
                self._watch(warp, when, "barrier", warp.stream[warp.at - 1][0])
                warp.ready = when
                self._wake(warp, when)
            block.arrived.clear()

    # ---- The pace of blocks ----------------------------------------------------------------------

    def alone(self, works: Sequence[Work]) -> tuple[float, float]:
        """Return the cycles per instruction of a block that runs alone, and its additional cycles.

        If the blocks differ in length, two lengths are timed: the difference is the iterations that
        only the longer block executes.
        """
        short, *longer = _by_length(works)
        first, few = self.run([short], _MAX_TIMED)
        if not longer:
            return first / sum(few), 0.0
        cycles, issued = self.run([_longest(longer, _MAX_TIMED)])
        # Not more per instruction than the longer one takes altogether.
        per = min(cycles / sum(issued), (cycles - first) / (sum(issued) - sum(few)))
        return per, max(0.0, first - per * sum(few))

    def start(self, works: Sequence[Work], count: int, released: float) -> float:
        """Return when the first `count` blocks would have to start if all code were there.

        They start `released` cycles before 0, until when they may have to wait for the previous
        launch; then they end as if they had started later, or earlier, with all code in the cache.
        """
        # Only the beginning, where it waits. In an early launch's shortest block, another wait may
        # take longer.
        begin = [dataclasses.replace(_by_length(works)[: 1 + (released > 0)][-1], parts=[])] * count
        cycles, _ = self.run(begin, _MAX_TIMED)
        self.released, self.is_first = released, True
        first, _ = self.run(begin, _MAX_TIMED)
        self.released, self.is_first = 0.0, False
        return max(0.0, first - cycles) - released

    def together(self, works: Sequence[Work], count: int) -> float:
        """Return the cycles per instruction of each of `count` blocks that run at once.

        The oldest is ahead in the simulation, but stamps say that on a GPU all take as long.
        """
        short, *longer = _by_length(works)
        work, most = short, min(_MAX_TIMED, short.counts["issue"] * count)
        if longer:  # time half of the blocks' instructions
            work = _longest(longer, 2 * _MAX_TIMED // count)
            most = work.counts["issue"] * count // 2
        cycles, issued = self.run([work] * count, most)
        return cycles * count / sum(issued)

    def observe(self, works: Sequence[Work], count: int, mean: float, stalls: StallCycles) -> None:
        """Record the stalls of `count` blocks of about `mean` instructions that run at once.

        They start at different points, and each is followed by another block until all of a block
        has been executed: beginnings and ends count as often as they occur.
        """
        some = [work for work in works if work.counts["issue"] * count <= _MAX_OBSERVED]
        work = min(some or _by_length(works)[:1], key=lambda one: abs(one.counts["issue"] - mean))
        blocks = []
        for number in range(count):
            start = work.parts[len(work.parts) * number // count]
            warps = [
                warp[at:] + [_of_next_block(one) for one in warp[:at]]
                for warp, at in zip(work.warps, start, strict=True)
            ]
            needs = Counter(one[2] for warp in warps for one in warp if one[2])
            blocks.append(dataclasses.replace(work, warps=warps, needs=needs))
        self.run(blocks, stalls=stalls)


def _of_next_block(one: Issued) -> Issued:
    """Return the same instruction of the block that follows, which has events of its own."""
    index, request, *events = one
    signal, awaited = (event and (f"next {event[0]}", *event[1:]) for event in events)
    return index, request, signal, awaited


def _by_length(works: Sequence[Work]) -> list[Work]:
    """Return the shortest work, then those over 1.2 times as long, in order of length."""
    short, *longer = sorted(works, key=lambda work: work.counts["issue"])
    return [short, *(work for work in longer if work.counts["issue"] > 1.2 * short.counts["issue"])]


def _longest(works: Sequence[Work], most: int) -> Work:
    """Return the longest work of at most this many instructions; if none, the shortest."""
    return next((work for work in reversed(works) if work.counts["issue"] <= most), works[0])


# ---- The grid ------------------------------------------------------------------------------------


def time_grid(
    gpu: GpuModel,
    code: Code,
    line: Line,
    room: int,
    from_memory: float,
    stalls: StallCycles | None,
    released: Sequence[float],
) -> tuple[float, float, float]:
    """Return the cycles until all blocks of a grid have ended, with the work shared equally, and
    those of a block.

    room: blocks that fit on a multiprocessor. from_memory: the share of the inputs that do not come
    from L2. stalls: records those on a full multiprocessor. released: the cycles by which the first
    blocks start before the previous launch has ended, for each multiprocessor with room for one.
    """
    if not line.works:
        return 0.0, 0.0, 0.0
    fits, one, full = multiprocessors(gpu, code, line, room, from_memory)
    alone, extra = one.alone(line.works)
    pace = full.together(line.works, fits) if fits > 1 else alone
    if stalls is not None:
        full.observe(line.works, fits, sum(line.each("issue")) / line.busy, stalls)
    # Each different start is simulated once.
    early = Counter([*released, *[0.0] * (gpu.multiprocessors - len(released))])
    starts = [x for by, n in early.items() for x in [full.start(line.works, fits, by)] * n]
    end, equal = finish(line, gpu, alone, pace, fits, extra, *starts)
    end = equal + (end - equal) / max(1, line.taken - 1)  # a block that is late takes fewer parts
    return end, equal, alone * min(work.counts["issue"] for work in line.works)


def multiprocessors(
    gpu: GpuModel, code: Code, line: Line, room: int, from_memory: float
) -> tuple[int, Multiprocessor, Multiprocessor]:
    """Return how many blocks run at once, and the multiprocessor for one block and for those.

    The arguments are those of time_grid().
    """
    misses = [count for count in line.each("misses") if count]  # of each block with work
    # No multiprocessor gets more blocks than if all are shared out equally.
    fits = min(room, -(-len(misses) // gpu.multiprocessors))
    resident = min(len(misses), fits * gpu.multiprocessors)
    # Blocks that start together request the inputs they share at the same time, and all wait for
    # memory. So do later ones, if one of each kind together read more than L2 keeps, and a block
    # that requests data of its own. The output of an earlier launch is in L2, and so is all if
    # nothing is known to come from memory.
    kept = gpu.l2_kept_mb * 1e6 / SECTOR / line.alike / line.distinct
    lost = sum(count for count in misses[resident:] if count > kept) / sum(misses)
    waiting = sum(misses[:resident]) / sum(misses) + lost
    from_memory = min(1.0, from_memory * (1 + lost * (len(misses) / resident - 1)))
    l2 = (1 - from_memory) * gpu.multiprocessors / gpu.l2_bytes_per_cycle  # cycles per byte
    memory = from_memory * gpu.clock_ghz / gpu.memory_gb_s
    kinds = ("global", gpu.memory_latency, _LOADS), ("tile", _COPIED, _COPIES)

    def inputs(share: float, waits: float) -> dict[str, tuple[float, float]]:
        cold = max(waits, from_memory) * (from_memory > 0)
        near = (1 - cold) * gpu.l2_latency
        return {
            pipe: (near + cold * cycles, min(64.0, 1 / (l2 + memory / part / share)))
            for pipe, cycles, part in kinds
        }

    one = Multiprocessor(gpu, code, inputs(1 / resident, waiting))
    # Where multiprocessors have fewer blocks, these are ahead: others find in L2 what they share.
    ahead = gpu.multiprocessors < resident < fits * gpu.multiprocessors
    full = Multiprocessor(gpu, code, inputs(fits / resident, 0.0 if ahead else waiting))
    return fits, one, full


def finish(
    line: Line, gpu: GpuModel, alone: float, pace: float, room: int, extra: float, *starts: float
) -> tuple[float, float]:
    """Return the cycles until the last multiprocessor finishes, and with the work shared equally.

    alone: cycles per instruction of a block that has a multiprocessor to itself. pace: those of
    each of `room` blocks, which fill one. extra: additional cycles per block. starts: when the
    first block of each multiprocessor starts, if not at 0. Blocks start in order, each on the first
    multiprocessor with room.
    """
    counts = zip(line.each("issue"), line.each("misses"), strict=True)
    waiting = [issue + (extra / pace if misses else 0.0) for issue, misses in counts][::-1]
    total = sum(waiting)
    paces = [alone + (pace - alone) * (n - 1) / max(1, room - 1) for n in range(room + 1)]
    places: list[list[float]] = [[] for _ in range(gpu.multiprocessors)]
    for place in places * room:
        if waiting:
            place.append(waiting.pop())

    def event(number: int, now: float) -> tuple[float, int, int, float]:
        """Return when a multiprocessor's next block ends; those that tie take turns."""
        place = places[number]
        return round(now + min(place) * paces[len(place)], 3), -len(waiting), number, now

    events = [event(n, starts[n] if starts else 0.0) for n, place in enumerate(places) if place]
    heapq.heapify(events)
    end = 0.0
    while events:
        end, _, number, since = heapq.heappop(events)
        place = places[number]
        done = (end - since) / paces[len(place)]
        place[:] = sorted(work - done for work in place)[1:]  # without the one that has ended
        if waiting:
            place.append(waiting.pop())
        if place:
            heapq.heappush(events, event(number, end))
    return end, total * pace / room / gpu.multiprocessors
