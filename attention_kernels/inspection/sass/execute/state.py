"""The state of the threads of some blocks while instructions.py executes their machine code.

Integers, predicates and addresses have values; loaded values and floating-point results are zero.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from attention_kernels.inspection.resources import WARP
from attention_kernels.inspection.sass.decode import Code, Instruction, SassError, consecutive

WARPGROUP = 4  # warps
SHARED_WORDS = 1 << 16  # more than a block can have
STORED = (4, 5)  # terabytes of o and scratch, where the recorder of launches puts them
STORES = ("STG", "ST", "RED", "REDG", "STL")  # instructions that write to global or local memory
# One register in every lane. It holds 32 bits; sums and products have room for carries.
Values: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
LOW = 0xFFFFFFFF
# The first rows of registers R, UR, P and UP. The last of each is RZ, URZ, PT or UPT.
_ROWS = {"R": 0, "UR": 256, "P": 512, "UP": 520}
_NEVER_WRITTEN = (255, 511, 519, 527)


Event: TypeAlias = tuple[str, int, int, int]
"""Something that warps wait for: its kind, the block, and two numbers that tell it from others."""


@dataclass
class Mbarrier:
    """A barrier in shared memory that counts arrivals and bytes, in phases."""

    arrivals: int
    """Arrivals that complete a phase."""
    left: int
    """Arrivals that the current phase still waits for."""
    bytes: int = 0
    """Bytes that it still waits for; negative if copies are ahead of their announcement."""
    phase: int = 0
    """Phases that are complete."""


@dataclass
class Issue:
    """One instruction that some warps execute at once."""

    index: int
    """Index of the instruction."""
    warps: Mask
    request: Values | None = None
    """By warp, the wavefronts of shared memory, the L1 cache lines (128 bytes each) that a request
    of global memory touches, the sectors of it (32 bytes each) that go to L2: all of a store's,
    otherwise those that no thread of the block has touched before; and how many of these hold
    inputs of the call."""
    events: dict[int, tuple[Event | None, Event | None]] = field(default_factory=dict)
    """By warp, what it contributes to, and what it waits for."""


@dataclass
class Blocks:
    """The threads of some blocks of a grid: their registers, and what they have executed."""

    code: Code
    constants: bytes
    """Constant bank 0: block and grid dimensions, then the kernel's parameters."""
    block: tuple[int, int, int]
    """Dimensions of a block."""
    indices: Sequence[tuple[int, int, int]]
    """Indices of the blocks in the grid."""
    words: Mapping[int, int] = field(default_factory=dict)
    """What loads of 32 bits return, by terabyte of their address; elsewhere they return zero."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """Blocks of a cluster, by axis. All take themselves for the first."""
    issued: list[Issue] = field(default_factory=list)
    """Instructions executed so far."""

    def __post_init__(self) -> None:
        x, y, z = self.block
        threads = x * y * z
        self.warps = -(-threads // WARP)  # warps per block
        self.lanes = len(self.indices) * self.warps * WARP
        self.values = np.zeros((528, self.lanes), np.int64)
        self.values[[519, 527]] = 1
        at = np.arange(self.lanes) % (self.warps * WARP)
        index = np.repeat(np.array(self.indices), self.warps * WARP, 0)
        self.special = {
            "SR_TID.X": at % x,
            "SR_TID.Y": at // x % y,
            "SR_TID.Z": at // (x * y),
            "SR_LANEID": at % WARP,
            "SR_LTMASK": (1 << at % WARP) - 1,
            **{f"SR_CTAID.{axis}": index[:, i] for i, axis in enumerate("XYZ")},
        }
        self.block_of = np.arange(self.lanes) // (self.warps * WARP)
        self.taken = np.zeros(len(self.indices), np.int64)  # parts of a queue, by block
        self.moves: Counter[int] = Counter()  # of registers, by warp
        self.done: Mask = at >= threads  # lanes that have ended
        self.mask = ~self.done  # the lanes in which the current instruction takes effect
        # The sectors that each block has seen, and how much had been executed then.
        self.seen: list[dict[int, int]] = [{} for _ in self.indices]
        # Tensor maps that a kernel makes, and parts of a queue, pass through shared memory.
        self.keeps_shared = any(one.base == "UTMACCTL" or one.takes_part for one in self.code)
        self.shared = np.zeros((len(self.indices), SHARED_WORDS * self.keeps_shared), np.int64)
        self.stored: dict[int, int] = {}  # words of such maps, by global address
        # The registers with which lanes took a branch, by its index and these lanes.
        self.branched: dict[tuple[int, bytes], int] = {}
        self.waits = False  # whether they wait for other blocks, which are taken to be as far
        self.has_cluster = any(one.base == "UCGABAR_ARV" for one in self.code)
        # The latest store of words for other blocks, by block and sector, and their number by warp.
        self.sent: dict[tuple[int, int], Event] = {}
        self.stores: Counter[tuple[int, int]] = Counter()
        self.spilled: dict[int, Values] = {}  # values by offset from the stack pointer
        self._views: dict[tuple[str, bool], Values] = {}
        self._wavefronts: dict[tuple[int, bool, bytes], int] = {}
        self.mbarriers: dict[tuple[int, int], Mbarrier] = {}  # by block, and shared address
        self.tested: set[tuple[int, int]] = set()  # those for whose phase lanes wait
        # By block and number of a barrier: its generation, and the warps that have arrived, or -1
        # for those that do not wait.
        self.generations: Counter[tuple[int, int]] = Counter()
        self.arrived: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        # By warp: products of its warpgroup, and the last one of each group.
        self.products: Counter[int] = Counter()
        self.groups: defaultdict[int, list[Event]] = defaultdict(list)
        # Lanes that wait for the phase that they test, at a numbered barrier, and at the block's.
        self.testing, self.parked, self.waiting = np.zeros((3, self.lanes), np.bool_)

    # ---- Operands --------------------------------------------------------------------------------

    def read(self, operand: str, *, high: bool = False) -> Values:
        """Return an operand's 32 bits in every lane; high: the upper word of a 64-bit operand."""
        if (operand, high) in self._views:
            return self._views[operand, high]
        if operand[0] in "-~" and not re.match(r"-(0x|\d|INF|QNAN)", operand):
            inverted: Values = self.read(operand[1:], high=high) ^ LOW
            negative: Values = inverted + 1 & LOW
            return negative if operand[0] == "-" else inverted
        view = self._views[operand, high] = self._view(operand.strip("|"), high)
        return view

    def _view(self, operand: str, high: bool) -> Values:
        """Return a live view of a register, or a constant repeated in every lane."""
        if re.match(r"U?R(\d|Z)", operand):
            row = _row(operand)
            values: Values = self.values[row + (high and row not in _NEVER_WRITTEN)]
            return values
        if found := re.fullmatch(r"c\[0x(\w+)\]\[(?:(?:0x|U?RZ)(\w*)|.*)\]", operand):
            word = 0  # the compiler's own constant, or an indexed one
            if found[1] == "0" and found[2] is not None:
                at = int(found[2] or "0", 16) + 4 * high
                word = int.from_bytes(self.constants[at : at + 4], "little")
        elif re.fullmatch(r"-?0x\w+", operand):
            word = int(operand, 16) >> 32 * high & LOW
        elif re.fullmatch(r"[-+]?(\d.*|INF|QNAN)", operand):
            word = int(np.float32(operand.replace("QNAN", "nan")).view(np.uint32))
        else:
            raise SassError(f"unknown operand {operand}")
        return np.broadcast_to(np.int64(word), self.lanes)

    def read64(self, operand: str) -> Values:
        """Return the value of a 64-bit operand."""
        return self.read(operand) | self.read(operand, high=True) << 32

    def predicate(self, name: str) -> Mask:
        """Return the lanes in which a predicate, such as "P0" or "!UPT", holds."""
        holds: Mask = self.values[_row(name.lstrip("!"))] == (name[0] != "!")
        return holds

    def write(self, register: str, values: Values | Mask | int) -> None:
        """Write a register or predicate in the lanes of the mask; uniform ones in whole warps."""
        row, mask = _row(register), self.mask
        if register[0] == "U":
            mask = np.repeat(mask.reshape(-1, WARP).any(1), WARP)
        if row not in _NEVER_WRITTEN:
            np.copyto(self.values[row], np.asarray(values) & LOW, where=mask)

    def write64(self, register: str, values: Values | int) -> None:
        """Write a pair of registers: the lower word into `register`, the upper into the next."""
        low, high = consecutive(register, 2)
        self.write(low, values)
        self.write(high, values >> 32)

    def clear(self, registers: Iterable[str]) -> None:
        """Write 0 to registers."""
        for register in registers:
            self.write(register, 0)

    def repeats(self, index: int, lanes: Mask) -> bool:
        """Return whether lanes take a branch with the registers that they had the last time."""
        key, found = (index, lanes.tobytes()), hash(self.values[:, lanes].tobytes())
        before, self.branched[key] = self.branched.get(key), found
        self.waits |= before == found
        return before == found

    # ---- Memory ----------------------------------------------------------------------------------

    @property
    def request(self) -> Values:
        """The four counts of the current instruction, to be filled in."""
        issue = self.issued[-1]
        if issue.request is None:
            issue.request = np.zeros((4, self.lanes // WARP), np.int64)
        return issue.request

    def address(self, operand: str, *, wide: bool) -> Values:
        """Return the address in each lane; wide: registers without a modifier hold 64 bits."""
        total = np.zeros(self.lanes, np.int64)
        for name, is_wide, factor in _terms(operand, wide):
            total += (self.read64(name) if is_wide else self.read(name)) * factor
        return total

    def request_shared(
        self, addresses: Values, size: int, mask: Mask, *, merges: bool = True
    ) -> None:
        """Count the wavefronts of each warp's request, as csrc/recorders/accesses.cpp does.

        size: bytes per lane. merges: two groups of lanes can share a wavefront.
        """
        by_warp = addresses.reshape(-1, WARP)
        active = mask.reshape(-1, WARP)
        first = np.take_along_axis(by_warp, active.argmax(1)[:, None], 1)
        relative = np.where(active, by_warp - (first & ~127), LOW)
        patterns, row = relative.tobytes(), relative.itemsize * WARP
        for warp in np.flatnonzero(active.any(1)).tolist():
            key = size, merges, patterns[warp * row : (warp + 1) * row]
            if key not in self._wavefronts:
                self._wavefronts[key] = _wavefronts(relative[warp], size, merges)
            self.request[0, warp] = self._wavefronts[key]

    def request_global(self, addresses: Values, one: Instruction) -> None:
        """Count the L1 lines of each warp's request, and the sectors that go to L2."""
        _, lines, misses, inputs = self.request
        mask = self.mask.reshape(-1, WARP)
        active = np.flatnonzero(mask.any(1))
        mask = mask[active]
        ends = np.stack([addresses, addresses + one.size - 1], 1) >> 5
        ends = ends.reshape(-1, WARP, 2)[active]
        first = np.take_along_axis(ends, mask.argmax(1)[:, None, None], 1)
        sectors = np.sort(np.where(mask[..., None], ends, first).reshape(-1, 2 * WARP))
        is_other = np.diff(sectors, prepend=-1) != 0
        lines[active] = 1 + np.count_nonzero(np.diff(sectors >> 2), 1)
        counts, different = is_other.sum(1).tolist(), iter(sectors[is_other].tolist())
        for warp, count in zip(active.tolist(), counts, strict=True):
            touched = [*itertools.islice(different, count)]
            seen = self.seen[warp // self.warps]
            new = touched if one.base in STORES else [x for x in touched if x not in seen]
            misses[warp] = len(new)
            if "STRONG" in one.modifiers:
                self._exchange(warp, one, touched)
            elif new and one.base not in STORES and new[0] >> 35 not in STORED:
                inputs[warp] = len(new)
            seen |= dict.fromkeys(new, len(self.issued))

    def _exchange(self, warp: int, one: Instruction, sectors: Sequence[int]) -> None:
        """Let a load of words wait for those that its block stores there by one instruction.

        Other blocks are taken to be as far, so theirs are there at the same time.
        """
        issue, places = self.issued[-1], [(warp // self.warps, at) for at in sectors]
        if one.base in ("LD", "LDG"):
            issue.events[warp] = None, max(filter(None, map(self.sent.get, places)), default=None)
        else:
            self.stores[warp, issue.index] += 1
            event = "words", warp // self.warps, issue.index, self.stores[warp, issue.index]
            issue.events[warp] = event, None
            self.sent |= dict.fromkeys(places, event)


def _wavefronts(relative: Values, size: int, merges: bool) -> int:
    """Return the wavefronts of a request."""
    lanes = [(lane, int(at)) for lane, at in enumerate(relative) if at != LOW]
    group = WARP if size <= 4 else max(1, 128 // size)
    total = first = 0
    while first < WARP:
        width = group
        if merges and 2 * group <= WARP and first % (2 * group) == 0:
            both = {lane: at for lane, at in lanes if first <= lane < first + 2 * group}
            if any(all(both.get(lane ^ d, at) == at for lane, at in both.items()) for d in (1, 2)):
                width = 2 * group
        words = {
            at // 4 + i
            for lane, at in lanes
            if first <= lane < first + width
            for i in range(max(1, size // 4))
        }
        total += max(Counter(word % 32 for word in words).values(), default=0)
        first += width
    return total


@functools.cache
def _row(register: str) -> int:
    found = re.fullmatch(r"(U?[RP])(?:(\d+)|[ZT])(\.\w+)*", register)
    if found is None:
        raise SassError(f"{register} is not a register")
    last = 7 if "P" in found[1] else 255
    return _ROWS[found[1]] + int(found[2] or last)


@functools.cache
def _terms(operand: str, wide: bool) -> list[tuple[str, bool, int]]:
    """Return the terms of "[R2.64+UR4+0x10]", "desc[UR6][R2.64]" or "[R2.X4+0x10]".

    Each term is a register or number, whether it has 64 bits, and a factor.
    """
    found = []
    inner = operand.rpartition("[")[2].rstrip("]")
    for term in re.split(r"\+(?=-?\w)", inner):
        name, *modifiers = term.split(".")
        factor = next((int(m[1:]) for m in modifiers if re.fullmatch(r"X\d+", m)), 1)
        # A 32-bit register next to a 64-bit uniform one is an offset.
        is_wide = "64" in modifiers or (wide and (name[0] == "U" or "UR" not in inner))
        is_number = name[0] in "-0"
        found.append((name, is_number or (is_wide and "U32" not in modifiers), factor))
    return found
