"""Run a kernel's machine code (SASS) without a GPU, to see which instructions its warps execute.

All threads of the given blocks run in parallel, those at the lowest address first, so that lanes
that leave a loop wait behind it for the others. Integers, predicates and addresses are computed;
loaded values and floating-point results are zero, so control flow that depends on data is not
followed. The input is cuobjdump's output. NVIDIA publishes the instructions' names but not their
exact meaning (CUDA Binary Utilities, "Instruction Set Reference"); the evidence that they are
understood correctly is that the counts equal the profiler's.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attention_kernels.errors import AttentionError

WARP = 32
STORES = ("STG", "ST", "RED", "REDG")  # to global memory
# One register in every lane. It holds 32 bits; sums and products have room for carries.
Values: TypeAlias = npt.NDArray[np.int64]
Word: TypeAlias = Any  # Values, or an int common to all lanes
Mask: TypeAlias = npt.NDArray[np.bool_]
_LOW = 0xFFFFFFFF
# R0 to R254 are rows 0 to 254, UR0 and up are rows from 256; RZ and URZ are never written.
_RZ, _U, _URZ = 255, 256, 511


class SassError(AttentionError, RuntimeError):
    """A kernel's machine code has an unknown instruction or operand."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, with the scheduling information that the compiler encoded in it."""

    name: str
    """Name with modifiers: "LDS.128"."""
    operands: tuple[str, ...]
    guard: str
    """Predicate that must hold for it to take effect: "P0", "!UP1" or ""."""
    address: int
    stall: int
    """Cycles until the warp's next instruction."""
    writes: int
    """Which of the six scoreboards it frees when its result is ready; 7: none."""
    reads: int
    """Which scoreboard it frees when its operands have been read; 7: none."""
    waits: tuple[int, ...]
    """Scoreboards that it waits for."""
    registers: tuple[int, int] = (0, 0)
    """Number of even and of odd registers that it reads: each kind is a bank of the file."""

    @functools.cached_property
    def base(self) -> str:
        """The name without modifiers."""
        return self.name.split(".")[0]

    @functools.cached_property
    def parts(self) -> tuple[str, ...]:
        """The modifiers."""
        return tuple(self.name.split(".")[1:])

    @functools.cached_property
    def split(self) -> tuple[list[str], list[str], list[str]]:
        """The predicates after the destination, the sources, and the predicates at the end."""
        first, last = 1, len(self.operands)
        while first < last and _IS_PREDICATE.fullmatch(self.operands[first]):
            first += 1
        while first < last and _IS_PREDICATE.fullmatch(self.operands[last - 1]):
            last -= 1
        operands = list(self.operands)
        return operands[1:first], operands[first:last], operands[last:]

    @functools.cached_property
    def size(self) -> int:
        """The bytes of memory that a lane accesses."""
        sizes = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
        return next((size for part, size in sizes.items() if part in self.parts), 4)

    @functools.cached_property
    def loaded(self) -> list[int]:
        """The registers that a load writes."""
        found = [x for x in self.operands if re.fullmatch(r"R\d+", x)]
        if not found or self.base == "LDGSTS" or not self.base.startswith(("LD", "ATOM")):
            return []
        count = int(self.parts[-1]) if self.base == "LDSM" else max(1, self.size // 4)
        return list(range(_row(found[0]), _row(found[0]) + count))


_LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w)\s+)?(?P<name>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);\s*/\* 0x(?P<low>\w{16}) \*/\s*/\* 0x(?P<high>\w{16}) \*/"
)
_IS_PREDICATE = re.compile(r"!?U?P(\d|T)")


def parse(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel in cuobjdump's output, by mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    for part in re.split(r"\n\s*Function : ", text)[1:]:
        code: list[Instruction] = []
        kept: set[tuple[int, str]] = set()  # operands marked .reuse by the instruction before
        for found in _LINE.finditer(part):
            sources = list(enumerate(re.findall(r"\bR\d+\b(?:\.reuse)?", found["operands"])))
            if not _WRITES_NONE.match(found["name"]):
                sources = sources[1:]
            names = {(place, name.removesuffix(".reuse")) for place, name in sources}
            read = {name for _, name in names - kept}
            kept = {(place, name[:-6]) for place, name in sources if name.endswith(".reuse")}
            odd = sum(int(name[1:]) % 2 for name in read)
            code.append(_instruction(found, (len(read) - odd, odd)))
        kernels[part.split("\n", 1)[0].strip()] = code
    return kernels


_WRITES_NONE = re.compile(r"ST|RED|BRA|BAR|EXIT|[IF]SETP|R2P|LDGSTS")


def _instruction(found: re.Match[str], registers: tuple[int, int]) -> Instruction:
    # Bits 105 to 121: stall (4), yield (1), write and read scoreboard (3 each), wait mask (6).
    control = int(found["high"], 16) >> 41
    operands = re.sub(r"\.reuse\b", "", found["operands"])
    mask = control >> 11 & 63
    return Instruction(
        name=found["name"],
        operands=tuple(part.strip() for part in operands.split(",") if part.strip()),
        guard=found["guard"] or "",
        address=int(found["address"], 16),
        stall=control & 15,
        writes=control >> 5 & 7,
        reads=control >> 8 & 7,
        waits=tuple(bit for bit in range(6) if mask >> bit & 1),
        registers=registers,
    )


@dataclass
class Step:
    """One instruction that some warps execute at once."""

    index: int
    """Index of the instruction."""
    warps: Mask
    wavefronts: Values | None = None
    """Wavefronts of shared memory, by warp."""
    lines: Values | None = None
    """L1 cache lines (128 bytes each) that a global-memory request touches, by warp."""
    misses: Values | None = None
    """Sectors of global memory (32 bytes each) that go to L2, by warp: all of a store's,
    otherwise those that no thread of the block has touched before."""


@dataclass
class Blocks:
    """The threads of some blocks of a grid, and the steps that they have executed."""

    code: Sequence[Instruction]
    constants: bytes
    """Constant bank 0: block and grid dimensions, then the kernel's parameters."""
    block: tuple[int, int, int]
    """Dimensions of a block."""
    indices: Sequence[tuple[int, int, int]]
    """Indices of the blocks in the grid."""
    max_steps: int
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        x, y, z = self.block
        threads = x * y * z
        self.warps = -(-threads // WARP)  # per block
        self.lanes = len(self.indices) * self.warps * WARP
        self.values = np.zeros((512, self.lanes), np.int64)
        self.predicates = np.zeros((16, self.lanes), np.bool_)
        self.predicates[[7, 15]] = True
        at = np.arange(self.lanes) % (self.warps * WARP)
        index = np.repeat(np.array(self.indices), self.warps * WARP, 0)
        self.special = {
            "SR_TID.X": at % x,
            "SR_TID.Y": at // x % y,
            "SR_TID.Z": at // (x * y),
            "SR_LANEID": at % WARP,
            **{f"SR_CTAID.{axis}": index[:, i] for i, axis in enumerate("XYZ")},
        }
        self.exists: Mask = at < threads
        self.seen: list[set[int]] = [set() for _ in self.indices]
        self.fetched: Counter[int] = Counter()  # sectors new to a block, by terabyte
        self.patterns: dict[tuple[int, bool, bytes], int] = {}
        self.spilled: dict[int, Word] = {}  # by offset from the stack pointer

    def run(self) -> None:
        """Run until every thread has ended; raises SassError after max_steps instructions."""
        actions = [_action(one) for one in self.code]
        done = ~self.exists
        waiting = np.zeros(self.lanes, np.bool_)
        where = np.zeros(self.lanes, np.int64)
        while not done.all():
            live = ~(done | waiting)
            if not live.any():
                waiting[:] = False  # the barrier of each block is complete
                continue
            pc = int(where[live].min())
            here = live & (where == pc)
            others = where[live & ~here]
            stop = int(others.min()) if others.size else len(self.code)
            # Straight on, until a branch or until these threads meet others.
            while pc < stop:
                one, action = self.code[pc], actions[pc]
                mask = here & self.predicate(one.guard) if one.guard else here
                step = Step(pc, here.reshape(-1, WARP).any(1))
                self.steps.append(step)
                pc += 1
                if action is not None and (mask is here or mask.any()):
                    action(self, one, mask, step)
                if one.base in ("BRA", "CALL", "RET", "EXIT", "BAR"):
                    where[here] = pc
                    if one.base in ("BRA", "CALL"):
                        where[mask & self.branches(one)] = _target(one, self.code)
                    elif one.base == "RET":
                        where[mask] = self.read(one.operands[0].split()[0])[mask] // _length(
                            self.code
                        )
                    elif one.base == "EXIT":
                        done |= mask
                    else:
                        waiting |= here
                    break
            else:
                where[here] = pc
            if len(self.steps) > self.max_steps:
                raise SassError(f"a block executes more than {self.max_steps} instructions")

    def branches(self, one: Instruction) -> Mask:
        """Return the lanes that take a branch, not counting its guard."""
        if "DIV" in one.parts:  # taken only by a diverged warp
            return np.zeros(self.lanes, np.bool_)
        taken = np.ones(self.lanes, np.bool_)
        for operand in one.operands[:-1]:
            if _IS_PREDICATE.fullmatch(operand):
                taken = taken & self.predicate(operand)
        return taken

    def read(self, operand: str, *, high: bool = False) -> Word:
        """Return an operand's 32 bits, per lane or common to all; high: the next 32 bits."""
        return _reader(operand, high)(self)

    def read64(self, operand: str) -> Word:
        """Return the value of a 64-bit operand."""
        return self.read(operand) | np.int64(self.read(operand, high=True)) << 32

    def predicate(self, name: str) -> Mask:
        """Return the lanes in which a predicate, such as "P0" or "!UPT", holds."""
        row: Mask = self.predicates[_predicate_row(name.lstrip("!"))]
        return ~row if name[0] == "!" else row

    def write(self, row: int, values: Values | int, mask: Mask) -> None:
        """Write a register in some lanes; a uniform register is common to the whole warp."""
        if row in (_RZ, _URZ):
            return
        if row >= _U:
            mask = np.repeat(mask.reshape(-1, WARP).any(1), WARP)
        np.copyto(self.values[row], np.asarray(values) & _LOW, where=mask)

    def write_predicate(self, name: str, values: Mask, mask: Mask) -> None:
        """Write a predicate in some lanes."""
        row = _predicate_row(name)
        if row not in (7, 15):
            if row > 7:
                mask = np.repeat(mask.reshape(-1, WARP).any(1), WARP)
            np.copyto(self.predicates[row], values, where=mask)

    def shared(self, addresses: Values, size: int, mask: Mask, *, merges: bool = True) -> Values:
        """Count the wavefronts of each warp's request, as csrc/recorders/accesses.cpp does."""
        by_warp = addresses.reshape(-1, WARP)
        active = mask.reshape(-1, WARP)
        first = np.take_along_axis(by_warp, active.argmax(1)[:, None], 1)
        relative = np.where(active, by_warp - (first & ~127), _LOW)
        found = np.zeros(len(relative), np.int64)
        for warp in np.flatnonzero(active.any(1)).tolist():
            key = (size, merges, relative[warp].tobytes())
            if key not in self.patterns:
                self.patterns[key] = _wavefronts(relative[warp], size, merges)
            found[warp] = self.patterns[key]
        return found

    def touch(self, addresses: Values, one: Instruction, mask: Mask, step: Step) -> None:
        """Count the L1 lines of a global-memory request, and the sectors that go to L2."""
        step.lines, step.misses = np.zeros((2, self.lanes // WARP), np.int64)
        ends = np.stack([addresses, addresses + one.size - 1]) >> 5
        for warp in np.flatnonzero(step.warps).tolist():
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            sectors = {*ends[:, lanes][:, mask[lanes]].ravel().tolist()}
            seen = self.seen[warp // self.warps]
            step.lines[warp] = len({sector >> 2 for sector in sectors})
            new = sectors if one.base in STORES else sectors - seen
            step.misses[warp] = len(new)
            if new and one.base not in STORES:
                self.fetched[min(new) >> 35] += len(new)
            seen |= sectors


def _wavefronts(relative: Values, size: int, merges: bool) -> int:
    lanes = [(lane, int(at)) for lane, at in enumerate(relative) if at != _LOW]
    group = WARP if size <= 4 else max(1, 128 // size)
    total, first = 0, 0
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
        banks = np.bincount([word % 32 for word in words]) if words else np.zeros(1, np.int64)
        total += int(banks.max())
        first += width
    return total


def _predicate_row(name: str) -> int:
    return (8 if name[0] == "U" else 0) + (7 if name[-1] == "T" else int(name[-1]))


def _length(code: Sequence[Instruction]) -> int:
    return code[1].address - code[0].address


def _target(one: Instruction, code: Sequence[Instruction]) -> int:
    address = int(one.operands[-1].strip("`()").split()[0], 16)
    return (address - code[0].address) // _length(code)


# ---- Operands ------------------------------------------------------------------------------------


@functools.cache
def _row(operand: str) -> int:
    found = re.fullmatch(r"(U?)R(\d+|Z)(\.\w+)*", operand)
    if found is None:
        raise SassError(f"{operand} is not a register")
    if found[2] == "Z":
        return _URZ if found[1] else _RZ
    return int(found[2]) + (_U if found[1] else 0)


@functools.cache
def _reader(operand: str, high: bool) -> Callable[[Blocks], Word]:  # noqa: PLR0911 - one per kind
    """Return a function that reads a 32-bit operand; high: the upper half of a 64-bit one."""
    if operand[0] in "-~" and not re.match(r"-(0x|\d|INF|QNAN)", operand):
        inner, one = _reader(operand[1:], high), int(operand[0] == "-")
        return lambda block: (inner(block) ^ _LOW) + one & _LOW
    if operand[0] == "|":
        return _reader(operand.strip("|"), high)
    if found := re.fullmatch(r"c\[0x(\w+)\]\[(?:0x(\w+)|.*)\]", operand):
        if found[1] != "0" or found[2] is None:  # a constant of the compiler's, or an indexed one
            return lambda _: 0
        at = int(found[2], 16) + 4 * high
        return lambda block: int.from_bytes(block.constants[at : at + 4], "little")
    if re.match(r"U?R(\d|Z)", operand):
        row = _row(operand)
        row += high and row not in (_RZ, _URZ)  # these read as zero
        return lambda block: block.values[row]
    if re.fullmatch(r"-?0x\w+", operand):
        word = int(operand, 16) >> 32 * high & _LOW
        return lambda _: word
    if not re.fullmatch(r"[-+]?(\d.*|INF|QNAN)", operand):
        raise SassError(f"unknown operand {operand}")
    bits = int(np.float32(operand.replace("QNAN", "nan")).view(np.uint32))
    return lambda _: bits


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
        pair = "64" in modifiers or (wide and (name[0] == "U" or "UR" not in inner))
        number = name[0] in "-0"
        found.append((name, number or (pair and "U32" not in modifiers), factor))
    return found


def _address(block: Blocks, operand: str, *, wide: bool) -> Values:
    total = np.zeros(block.lanes, np.int64)
    for name, pair, factor in _terms(operand, wide):
        total += (block.read64(name) if pair else block.read(name)) * factor
    return total


def _signed(values: Word) -> Word:
    return (values ^ 0x80000000) - 0x80000000


def _float(values: Word) -> npt.NDArray[np.float32]:
    return np.asarray(values).astype(np.uint32).view(np.float32)


# ---- Instructions --------------------------------------------------------------------------------

Action: TypeAlias = Callable[[Blocks, Instruction, Mask, Step], None]
_NOTHING = {
    "NOP", "BSSY", "BSYNC", "BREAK", "BMOV", "WARPSYNC", "YIELD", "DEPBAR", "LDGDEPBAR", "MEMBAR",
    "ERRBAR", "CCTL", "BRA", "EXIT", "BAR", "ACQBULK", "PREEXIT", "FENCE", "NANOSLEEP",
    "WARPGROUP", "ENDCOLLECTIVE", "CALL", "RET", "BPT", "KILL",
}  # fmt: skip
_COMPARE = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal, "NEU": np.not_equal, "GTU": np.greater, "LTU": np.less,
    "GEU": np.greater_equal, "LEU": np.less_equal, "EQU": np.equal,
}  # fmt: skip
_FLOATING = re.compile(
    r"F(ADD|MUL|FMA|MNMX|RND|SWZADD|ADD2|FMA2|MUL2|2F|2FP)|H\w+|MUFU|D\w+|IMMA|CS2R|SHFL|REDUX"
    r"|MATCH|MOVM"
)


def _action(one: Instruction) -> Action | None:
    base = one.base
    if base in _NOTHING:
        return None
    if base == "HFMA2" and one.operands[1:3] == ("-RZ", "RZ"):  # loads a constant
        return _two_halves
    if base == "MUFU" and "RCP" in one.parts:
        return _value(_reciprocal)
    if _FLOATING.fullmatch(base):
        return _zero
    action = _ACTIONS.get(base) or _ACTIONS.get(base.removeprefix("U"))
    if action is None:
        raise SassError(f"unknown instruction {one.name}")
    return action


def _value(of: Callable[[Blocks, Instruction], Word]) -> Action:
    """Return an action that writes a value to the first operand."""
    return lambda block, one, mask, _: block.write(_row(one.operands[0]), of(block, one), mask)


def _zero(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    found = next((x for x in one.operands[:2] if re.fullmatch(r"U?R(\d+|Z)(\.\w+)?", x)), "RZ")
    block.write(_row(found), 0, mask)
    if one.base == "CS2R" and "32" not in one.parts:
        block.write(_row(found) + 1, 0, mask)


def _two_halves(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    high, low = (np.float16(x.replace("QNAN", "nan")).view(np.uint16) for x in one.operands[3:])
    block.write(_row(one.operands[0]), int(high) << 16 | int(low), mask)


def _shared_access(block: Blocks, one: Instruction, mask: Mask, step: Step) -> None:
    matrices = one.base in ("LDSM", "STSM")
    if matrices:  # each of the first lanes, 8 per matrix, reads a row of 16 bytes
        count = int(one.parts[-1]) if one.parts[-1].isdigit() else 1
        mask = mask & (np.arange(block.lanes) % WARP < 8 * count)
    (where,) = (x for x in one.operands if "[" in x)
    at = _address(block, where, wide=False) & _LOW
    step.wavefronts = block.shared(at, 16 if matrices else one.size, mask, merges=not matrices)
    for row in one.loaded:
        block.write(row, 0, mask)


def _local_access(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    """Execute LDL and STL: spilled registers are at [R1+offset]; other addresses read as 0."""
    (where,) = (x for x in one.operands if "[" in x)
    spill = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", where)
    first = int(spill[1] or "0", 16) if spill else 0
    for i, row in enumerate(one.loaded):
        block.write(row, block.spilled.get(first + 4 * i, 0) if spill else 0, mask)
    if one.base == "STL" and spill:
        row = _row(one.operands[-1])
        for i in range(one.size // 4):
            value = 0 if row == _RZ else block.values[row + i]
            kept = block.spilled.get(first + 4 * i, np.zeros(block.lanes, np.int64))
            block.spilled[first + 4 * i] = np.where(mask, value, kept)


def _global_access(block: Blocks, one: Instruction, mask: Mask, step: Step) -> None:
    places = [x for x in one.operands if "[" in x]
    block.touch(_address(block, places[-1], wide=True), one, mask, step)
    if one.base == "LDGSTS":
        at = _address(block, places[0], wide=False) & _LOW
        step.wavefronts = block.shared(at, one.size, mask)
    for row in one.loaded:
        block.write(row, 0, mask)


def _add(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    """Execute IADD3 and VIADD: up to three terms, carries out and, with .X, carries in."""
    carried, sources, carries = one.split
    total = np.zeros(block.lanes, np.int64)
    for x in sources:
        negative = x[0] == "-" and x[1] in "RUc"
        total += (block.read(x[1:]) ^ _LOW) + 1 if negative else block.read(x)
    for carry in carries if "X" in one.parts else ():
        total += block.predicate(carry)
    block.write(_row(one.operands[0]), total, mask)
    for limit, name in enumerate(carried, 1):
        block.write_predicate(name, total >> 32 >= limit, mask)


def _multiply_add(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    carried, (x, y, z), carries = one.split
    a, b = np.asarray(block.read(x)), np.asarray(block.read(y))
    row = _row(one.operands[0])
    if "WIDE" not in one.parts and "HI" not in one.parts:
        total = a * b + block.read(z)
        if "X" in one.parts and carries:
            total = total + block.predicate(carries[-1])
        block.write(row, total, mask)
        return
    product = a * b if "U32" in one.parts else _signed(a) * _signed(b)
    total = product + block.read64(z)
    block.write(row, total >> 32 if "HI" in one.parts else total, mask)
    if "WIDE" in one.parts and row not in (_RZ, _URZ):
        block.write(row + 1, total >> 32, mask)
    for name in carried[:1]:
        carry = total.astype(np.uint64) < product.astype(np.uint64)
        block.write_predicate(name, np.broadcast_to(carry, mask.shape), mask)


def _shift_add(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    """Execute LEA: (a << s) + b; with .HI the upper word of (c:a) << s, plus b."""
    carried, sources, carries = one.split
    a, shift = block.read(sources[0]), int(sources[-1], 16) & 31
    if "HI" in one.parts:
        upper = _signed(a) >> 32 if "SX32" in one.parts else 0
        if len(sources) == 4 and "SX32" not in one.parts:
            upper = block.read(sources[2])
        term = (a | upper << 32) << shift >> 32
    else:
        term = a << shift
    total = (term & _LOW) + block.read(sources[1])
    if "X" in one.parts and carries:
        total = total + block.predicate(carries[-1])
    block.write(_row(one.operands[0]), total, mask)
    for name in carried[:1]:
        block.write_predicate(name, np.broadcast_to(total > _LOW, mask.shape), mask)


def _shift(block: Blocks, one: Instruction) -> Word:
    """Execute SHF: return one word of a shifted pair, with .HI the upper one."""
    low, amount, high = (np.asarray(block.read(x)) for x in one.operands[1:4])
    parts = one.parts
    most = 64 if any(part.endswith("64") for part in parts) else 32
    by = amount % most if "W" in parts else np.minimum(amount, most)
    pair = low | high << 32
    if parts[0] == "L":
        found = np.where(by >= 64, 0, pair << np.minimum(by, 63))
    elif {"S32", "S64"} & {*parts}:
        found = pair >> np.minimum(by, 63)
    else:
        shifted = pair.astype(np.uint64) >> np.minimum(by, 63).astype(np.uint64)
        found = np.where(by >= 64, 0, shifted.astype(np.int64))
    return found >> 32 if "HI" in parts else found


def _table(lut: int, a: Word, b: Word, c: Word) -> Word:
    found = 0
    for i in range(8):
        if lut >> i & 1:
            inputs = zip((a, b, c), (4, 2, 1), strict=True)
            x, y, z = (value if i & bit else value ^ _LOW for value, bit in inputs)
            found = found | x & y & z
    return found


def _logic(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    operands = [x for x in one.operands if x != "PT"]
    predicate = operands.pop(0) if _IS_PREDICATE.fullmatch(operands[0]) else None
    inputs = (block.read(x) for x in operands[1:4])
    found = np.broadcast_to(_table(int(operands[4], 16), *inputs), mask.shape)
    block.write(_row(operands[0]), found, mask)
    if predicate:
        block.write_predicate(predicate, found != 0, mask)


def _predicate_logic(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    first, second, a, b, c, lut, lut2 = one.operands[-7:]
    bits = [block.predicate(x).astype(np.int64) for x in (a, b, c)]
    for name, table in ((first, lut), (second, lut2)):
        found = np.broadcast_to(_table(int(table, 16), *bits) & 1 != 0, mask.shape)
        block.write_predicate(name, found, mask)


def _compare(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    parts = one.parts
    first, second, a, b, *rest = one.operands
    as_number: Callable[[Word], Word] = _float if one.base == "FSETP" else _signed
    x, y = (block.read(v) if "U32" in parts else as_number(block.read(v)) for v in (a, b))
    found = np.broadcast_to(_COMPARE[parts[0]](x, y), mask.shape)
    if "EX" in parts:  # the upper words decide unless they are equal
        found = np.where(np.equal(x, y), block.predicate(rest[1]), found)
    other = block.predicate(rest[0])
    join = np.logical_or if "OR" in parts else np.logical_xor if "XOR" in parts else np.logical_and
    joined = join(found, other), join(~found, other)
    block.write_predicate(first, joined[0], mask)
    block.write_predicate(second, joined[1], mask)


def _select(block: Blocks, one: Instruction) -> Word:
    a, b = (block.read(x) for x in one.operands[1:3])
    return np.where(block.predicate(one.operands[3]), a, b)


def _minimum(block: Blocks, one: Instruction) -> Word:
    """Execute IMNMX, VIMNMX and VIADDMNMX, which adds its first two operands before."""
    _, sources, trailing = one.split
    *terms, y = (block.read(x) for x in sources)
    x = sum(terms) & _LOW
    if "U32" not in one.parts:
        x, y = _signed(x), _signed(y)
    return np.where(block.predicate(trailing[0]), np.minimum(x, y), np.maximum(x, y))


def _permute(block: Blocks, one: Instruction) -> Word:
    a, select, b = (block.read(x) for x in one.operands[1:4])
    pair = a | np.int64(b) << 32
    total = 0
    for i in range(4):
        byte = pair >> (select >> 4 * i & 7) * 8 & 255
        is_sign = select >> 4 * i & 8 != 0  # repeat the byte's sign bit
        total = total | np.where(is_sign, (byte >> 7) * 255, byte) << 8 * i
    return total


def _load_constant(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    row, source = _row(one.operands[0]), one.operands[1]
    block.write(row, block.read(source) & (1 << 8 * min(4, one.size)) - 1, mask)
    if one.size == 8:
        block.write(row + 1, block.read(source, high=True), mask)


def _to_uniform(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    values = np.broadcast_to(block.read(one.operands[-1]), mask.shape).reshape(-1, WARP)
    first = mask.reshape(-1, WARP).argmax(1)[:, None]
    of_first = np.take_along_axis(values, first, 1).ravel()
    block.write(_row(one.operands[0]), np.repeat(of_first, WARP), mask)


def _to_float(block: Blocks, one: Instruction) -> Word:
    source = np.asarray(block.read(one.operands[-1]))
    exact = (source if "U32" in one.parts else _signed(source)).astype(np.float64)
    rounded = exact.astype(np.float32)
    if "RP" in one.parts:
        rounded = np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)
    return rounded.view(np.uint32).astype(np.int64)


def _to_integer(block: Blocks, one: Instruction) -> Word:
    source = np.nan_to_num(_float(block.read(one.operands[-1])).astype(np.float64))
    return np.clip(source, -(2.0**31), 2.0**32 - 1).astype(np.int64)


def _reciprocal(block: Blocks, one: Instruction) -> Word:
    with np.errstate(all="ignore"):
        return (1 / _float(block.read(one.operands[1]))).view(np.uint32).astype(np.int64)


def _predicates_to_register(block: Blocks, one: Instruction) -> Word:
    which = int(one.operands[-1], 16)
    found = block.read(one.operands[-2]) & (_LOW ^ which)
    for i in range(7):
        if which >> i & 1:
            found = found | block.predicates[i].astype(np.int64) << i
    return found


def _register_to_predicates(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    values = np.broadcast_to(block.read(one.operands[1]), mask.shape)
    for i in range(7):
        if int(one.operands[-1], 16) >> i & 1:
            block.write_predicate(f"P{i}", values >> i & 1 != 0, mask)


def _vote(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    predicates = [x for x in one.operands if _IS_PREDICATE.fullmatch(x)]
    asked = block.predicate(predicates[-1])
    lanes = (asked & mask).reshape(-1, WARP)
    found = ~(~asked & mask).reshape(-1, WARP).any(1) if "ALL" in one.parts else lanes.any(1)
    if len(predicates) > 1:
        block.write_predicate(predicates[0], np.repeat(found, WARP), mask)
    for x in one.operands[:2]:
        if re.fullmatch(r"U?R\d+", x):
            block.write(_row(x), np.repeat((lanes << np.arange(WARP)).sum(1), WARP), mask)


def _false(block: Blocks, one: Instruction, mask: Mask, _: Step) -> None:
    block.write_predicate(one.operands[0], np.zeros(block.lanes, np.bool_), mask)


_ACTIONS: dict[str, Action] = {
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM", "ATOMS"), _shared_access),
    "LDL": _local_access, "STL": _local_access,
    **dict.fromkeys(("LDG", "STG", "LD", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG"),
                    _global_access),
    **dict.fromkeys(("IADD3", "VIADD", "IADD"), _add),
    "IMAD": _multiply_add, "LEA": _shift_add, "SHF": _value(_shift), "LOP3": _logic,
    "PLOP3": _predicate_logic, "ISETP": _compare, "FSETP": _compare, "SEL": _value(_select),
    "FSEL": _value(_select), **dict.fromkeys(("IMNMX", "VIMNMX", "VIADDMNMX"), _value(_minimum)),
    "PRMT": _value(_permute), "LDC": _load_constant, "LDCU": _load_constant, "R2UR": _to_uniform,
    **dict.fromkeys(("S2R", "S2UR"),
                    _value(lambda block, one: block.special.get(one.operands[1], 0))),
    "POPC": _value(lambda block, one: sum(block.read(one.operands[1]) >> i & 1 for i in range(32))),
    **dict.fromkeys(("I2F", "I2FP"), _value(_to_float)), "F2I": _value(_to_integer),
    **dict.fromkeys(("MOV", "MOV32I"), _value(lambda block, one: block.read(one.operands[1]))),
    "P2R": _value(_predicates_to_register), "R2P": _register_to_predicates,
    "VOTE": _vote, "VOTEU": _vote, "FCHK": _false,
    "IABS": _value(lambda block, one: abs(_signed(block.read(one.operands[1])))),
}  # fmt: skip
