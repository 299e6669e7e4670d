"""Run a kernel's machine code (SASS) without a GPU, to see which instructions its warps execute.

All threads of a block run side by side, lowest address first, so that lanes which leave a loop
wait behind it. Integers, predicates and addresses are computed; all that is loaded, and all that is
floating-point, is zero: control flow that depends on data is not followed. Instructions are read as
cuobjdump prints them. NVIDIA publishes their names but not their exact meaning (CUDA Binary
Utilities, "Instruction Set Reference"); that counts made here equal the profiler's is the evidence
that they are read right.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from attention_kernels.errors import AttentionError

WARP = 32
Array: TypeAlias = npt.NDArray[np.uint32]
Mask: TypeAlias = npt.NDArray[np.bool_]
Values: TypeAlias = "Array | np.uint32"
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# R0 to R254 are rows 0 to 254, UR0 and up from 256 on; RZ and URZ are never written.
_RZ, _U, _URZ = 255, 256, 511


class SassError(AttentionError, RuntimeError):
    """A kernel's machine code has an instruction or an operand that is not known here."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, and what the compiler wrote into it for the scheduler."""

    name: str
    """With its modifiers: "LDS.128"."""
    operands: tuple[str, ...]
    guard: str
    """The predicate without which it does nothing: "P0", "!UP1" or ""."""
    address: int
    stall: int
    """Cycles until the warp's next instruction."""
    writes: int
    """Which of the six scoreboards it frees when its result is there; 7: none."""
    reads: int
    """Which one it frees when its operands have been read; 7: none."""
    waits: tuple[int, ...]
    """The scoreboards that it waits for."""

    @property
    def base(self) -> str:
        """The name without modifiers."""
        return self.name.split(".")[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """The modifiers."""
        return tuple(self.name.split(".")[1:])


_LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w)\s+)?(?P<name>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);\s*/\* 0x(?P<low>\w{16}) \*/\s*/\* 0x(?P<high>\w{16}) \*/"
)


def parse(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel in cuobjdump's output, by mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    for part in re.split(r"\n\s*Function : ", text)[1:]:
        kernels[part.split("\n", 1)[0].strip()] = [
            _instruction(found) for found in _LINE.finditer(part)
        ]
    return kernels


def _instruction(found: re.Match[str]) -> Instruction:
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
    )


@dataclass
class Step:
    """One instruction as some warps of a block execute it at once."""

    index: int
    """Of the instruction."""
    warps: Mask
    wavefronts: npt.NDArray[np.int64] | None = None
    """Of shared memory, by warp."""
    lines: npt.NDArray[np.int64] | None = None
    """Of the L1 cache, 128 bytes each, that a request of global memory touches, by warp."""
    sectors: npt.NDArray[np.int64] | None = None
    """Of global memory, 32 bytes each, by warp."""
    misses: npt.NDArray[np.int64] | None = None
    """Those of them that no thread of the block has touched before."""


@dataclass
class Block:
    """The threads of one block, and what they have done."""

    code: Sequence[Instruction]
    constants: bytes
    """Bank 0: block and grid dimensions, then the kernel's parameters."""
    block: tuple[int, int, int]
    index: tuple[int, int, int]
    max_steps: int
    steps: list[Step] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        x, y, z = self.block
        threads = x * y * z
        self.lanes = -(-threads // WARP) * WARP
        self.values = np.zeros((512, self.lanes), np.uint32)
        self.predicates = np.zeros((16, self.lanes), np.bool_)
        self.predicates[[7, 15]] = True
        at = np.arange(self.lanes)
        self.special: dict[str, Values] = {
            "SR_TID.X": (at % x).astype(np.uint32),
            "SR_TID.Y": (at // x % y).astype(np.uint32),
            "SR_TID.Z": (at // (x * y)).astype(np.uint32),
            "SR_LANEID": (at % WARP).astype(np.uint32),
            **{f"SR_CTAID.{axis}": np.uint32(i) for axis, i in zip("XYZ", self.index, strict=True)},
        }
        self.exists: Mask = at < threads
        self.seen: set[int] = set()
        self.patterns: dict[tuple[int, bool, bytes], npt.NDArray[np.int64]] = {}

    def run(self) -> None:
        """Run until every thread has ended, or max_steps instructions were executed."""
        actions = [_action(one) for one in self.code]
        done = ~self.exists
        waiting = np.zeros(self.lanes, np.bool_)
        where = np.zeros(self.lanes, np.int64)
        while len(self.steps) < self.max_steps:
            live = ~(done | waiting)
            if not live.any():
                if done.all():
                    self.finished = True
                    return
                waiting[:] = False  # the barrier is complete
                continue
            pc = int(where[live].min())
            here = live & (where == pc)
            others = where[live & ~here]
            stop = int(others.min()) if others.size else len(self.code)
            # Straight on, until a branch or until the others are met.
            while pc < stop and len(self.steps) < self.max_steps:
                one, action = self.code[pc], actions[pc]
                mask = here & self.predicate(one.guard) if one.guard else here
                step = Step(pc, here.reshape(-1, WARP).any(1))
                self.steps.append(step)
                pc += 1
                if one.base == "BRA":
                    taken = here & mask & self.branches(one)
                    where[here] = pc
                    where[taken] = _target(one, self.code)
                    break
                if one.base == "EXIT":
                    where[here] = pc
                    done |= mask
                    break
                if one.base == "BAR":
                    where[here] = pc
                    waiting |= here
                    break
                if action is not None and (mask is here or mask.any()):
                    action(self, mask, step)
            else:
                where[here] = pc

    def branches(self, one: Instruction) -> Mask:
        """Return which lanes a branch takes, its guard aside."""
        if "DIV" in one.parts:  # only where a warp has parted
            return np.zeros(self.lanes, np.bool_)
        taken = np.ones(self.lanes, np.bool_)
        for operand in one.operands[:-1]:
            if re.fullmatch(r"!?U?P\w", operand):
                taken = taken & self.predicate(operand)
        return taken

    def predicate(self, name: str) -> Mask:
        """Return the lanes in which a predicate holds: "P0", "!UPT"."""
        row: Mask = self.predicates[_predicate_row(name.lstrip("!"))]
        return ~row if name[0] == "!" else row

    def constant(self, offset: int) -> np.uint32:
        """Return a word of constant bank 0; there are zeros beyond what is known."""
        word = self.constants[offset : offset + 4].ljust(4, b"\0")
        return np.uint32(struct.unpack("<I", word)[0])

    def write(self, row: int, values: Values, mask: Mask) -> None:
        """Write a register in some lanes; a uniform one belongs to the whole warp."""
        if row in (_RZ, _URZ):
            return
        if row >= _U:
            mask = np.repeat(mask.reshape(-1, WARP).any(1), WARP)
        np.copyto(self.values[row], values, where=mask)

    def write_predicate(self, name: str, values: Mask, mask: Mask) -> None:
        """Write a predicate in some lanes."""
        row = _predicate_row(name)
        if row not in (7, 15):
            if row > 7:
                mask = np.repeat(mask.reshape(-1, WARP).any(1), WARP)
            np.copyto(self.predicates[row], values, where=mask)

    def shared(self, addresses: Array, size: int, mask: Mask, *, merges: bool = True) -> Array:
        """Return the wavefronts of a request by each warp, as csrc/recorders/accesses.cpp does."""
        by_warp = addresses.reshape(-1, WARP)
        active = mask.reshape(-1, WARP)
        first = active.argmax(1)[:, None]
        base = np.take_along_axis(by_warp, first, 1) & np.uint32(0xFFFFFF80)
        relative = np.where(active, by_warp - base, np.uint32(0xFFFFFFFF))
        key = (size, merges, relative.tobytes())
        if key not in self.patterns:
            self.patterns[key] = np.array([_wavefronts(row, size, merges) for row in relative])
        return self.patterns[key]  # type: ignore[return-value]

    def touch(self, addresses: npt.NDArray[np.uint64], size: int, mask: Mask, step: Step) -> None:
        """Count the sectors of a request of global memory, and those that are new to the block."""
        count = np.zeros(self.lanes // WARP, np.int64)
        new, lines = count.copy(), count.copy()
        last = addresses + np.uint64(size - 1)
        for warp in np.flatnonzero(mask.reshape(-1, WARP).any(1)):
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            on = mask[lanes]
            ends = (addresses[lanes][on] >> np.uint64(5), last[lanes][on] >> np.uint64(5))
            sectors = {*ends[0].tolist(), *ends[1].tolist()}
            count[warp] = len(sectors)
            lines[warp] = len({sector >> 2 for sector in sectors})
            new[warp] = len(sectors - self.seen)
            self.seen |= sectors
        step.lines, step.sectors, step.misses = lines, count, new


def _wavefronts(relative: Array, size: int, merges: bool) -> int:
    lanes = [(lane, int(at)) for lane, at in enumerate(relative) if at != 0xFFFFFFFF]
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
    uniform = name[0] == "U"
    digit = name[-1]
    return (8 if uniform else 0) + (7 if digit == "T" else int(digit))


def _target(one: Instruction, code: Sequence[Instruction]) -> int:
    address = int(one.operands[-1].strip("`()").split()[0], 16)
    return (address - code[0].address) // (code[1].address - code[0].address)


# ---- Operands ------------------------------------------------------------------------------------

Read: TypeAlias = Callable[[Block], Values]
Action: TypeAlias = Callable[[Block, Mask, Step], None]
_IS_PREDICATE = re.compile(r"!?U?P(\d|T)")


def _row(operand: str) -> int:
    found = re.fullmatch(r"(U?)R(\d+|Z)(\.\w+)*", operand)
    if found is None:
        raise SassError(f"{operand} is no register")
    if found[2] == "Z":
        return _URZ if found[1] else _RZ
    return int(found[2]) + (_U if found[1] else 0)


def _read(operand: str, high: bool = False) -> Read:  # noqa: PLR0911 - a return per kind
    """Return how to read an operand of 32 bits; high: the upper half of one of 64."""
    if operand[0] in "-~" and not re.match(r"-(0x|\d|INF|QNAN)", operand):
        inner, negative = _read(operand[1:], high), operand[0] == "-"
        one = np.uint32(1 if negative else 0)
        return lambda block: ~np.asarray(inner(block), np.uint32) + one
    if operand[0] == "|":
        return _read(operand.strip("|"), high)
    if found := re.fullmatch(r"c\[0x(\w+)\]\[(?:0x(\w+)|.*)\]", operand):
        if found[1] != "0" or found[2] is None:  # compiler's constants, or an index
            return lambda block: np.uint32(0)
        offset = int(found[2], 16) + 4 * high
        return lambda block: block.constant(offset)
    if re.match(r"U?R(\d|Z)", operand):
        row = _row(operand)
        if row in (_RZ, _URZ):
            return lambda block: np.uint32(0)
        row += high
        return lambda block: block.values[row]
    if re.fullmatch(r"-?0x\w+", operand):
        literal = int(operand, 16)
        word = np.uint32(literal >> 32 & 0xFFFFFFFF if high else literal & 0xFFFFFFFF)
        return lambda block: word
    try:
        number = float(operand.replace("QNAN", "nan"))
    except ValueError:
        raise SassError(f"operand {operand} is not known") from None
    bits = np.float32(number).view(np.uint32)
    return lambda block: bits


def _wide(operand: str) -> Callable[[Block], npt.NDArray[np.uint64]]:
    low, high = _read(operand), _read(operand, high=True)
    return lambda block: (
        np.asarray(low(block), np.uint64) | np.asarray(high(block), np.uint64) << _HALF
    )


def _constant(value: np.uint64) -> Callable[[Block], npt.NDArray[np.uint64]]:
    return lambda _: np.asarray(value)


def _address(operand: str, wide: bool) -> Callable[[Block], npt.NDArray[np.uint64]]:
    """Return how to read "[R2.64+UR4+0x10]", "desc[UR6][R2.64]" or "[R2.X4+0x10]"."""
    terms: list[Callable[[Block], npt.NDArray[np.uint64]]] = []
    for term in re.split(r"\+(?=-?\w)", operand.rpartition("[")[2].rstrip("]")):
        if re.match(r"-?0x", term):
            literal = np.uint64(int(term, 16) & 0xFFFFFFFFFFFFFFFF)
            terms.append(_constant(literal))
            continue
        name, *modifiers = term.split(".")
        scale = next((np.uint64(int(m[1:])) for m in modifiers if re.fullmatch(r"X\d+", m)), None)
        # A register of 32 bits beside a uniform one of 64 is an offset.
        pair = "64" in modifiers or (wide and (name[0] == "U" or "+" not in operand))
        get = _wide(name) if pair and "U32" not in modifiers else None
        word = _read(name)

        def value(
            block: Block,
            get: Callable[[Block], npt.NDArray[np.uint64]] | None = get,
            word: Read = word,
            scale: np.uint64 | None = scale,
        ) -> npt.NDArray[np.uint64]:
            found = get(block) if get else np.asarray(word(block), np.uint64)
            return found if scale is None else found * scale

        terms.append(value)

    def total(block: Block) -> npt.NDArray[np.uint64]:
        found = np.zeros(block.lanes, np.uint64)
        for term in terms:
            found = found + term(block)
        return found

    return total


# ---- Instructions --------------------------------------------------------------------------------

_NOTHING = {
    "NOP", "BSSY", "BSYNC", "BREAK", "BMOV", "WARPSYNC", "YIELD", "DEPBAR", "LDGDEPBAR", "MEMBAR",
    "ERRBAR", "CCTL", "BRA", "EXIT", "BAR", "STL", "ACQBULK", "PREEXIT", "FENCE", "NANOSLEEP",
    "WARPGROUP", "ENDCOLLECTIVE", "CALL", "RET", "BPT", "KILL",
}  # fmt: skip
_COMPARE = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal, "NEU": np.not_equal, "GTU": np.greater, "LTU": np.less,
    "GEU": np.greater_equal, "LEU": np.less_equal, "EQU": np.equal,
}  # fmt: skip
_FLOATING = re.compile(
    r"(F(ADD|MUL|FMA|MNMX|RND|SWZADD|ADD2|FMA2|MUL2|2F|2FP)|H\w+|MUFU|D\w+|IMMA|F2FP)"
)


def _action(one: Instruction) -> Action | None:  # noqa: PLR0911 - a return per kind
    base, parts = one.base, one.parts
    if base in _NOTHING:
        return None
    if base in ("LDS", "STS", "LDSM", "STSM", "ATOMS"):
        return _shared_access(one)
    if base in ("LDG", "STG", "LD", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG"):
        return _global_access(one)
    if base == "HFMA2" and one.operands[1:3] == ("-RZ", "RZ") and len(one.operands) == 5:
        halves = [
            int(np.float16(float(x.replace("QNAN", "nan"))).view(np.uint16))
            for x in one.operands[3:]
        ]
        return _store(one, lambda block: np.uint32(halves[0] << 16 | halves[1]))
    if base == "MUFU" and "RCP" in parts:
        get = _read(one.operands[1])

        def reciprocal(block: Block) -> Values:
            with np.errstate(all="ignore"):
                found = np.float32(1) / np.asarray(get(block), np.uint32).view(np.float32)
            return np.asarray(found, np.float32).view(np.uint32)

        return _store(one, reciprocal)
    if _FLOATING.fullmatch(base) or base in ("CS2R", "LDL", "SHFL", "REDUX", "MATCH", "MOVM"):
        rows = [_row(x) for x in one.operands[:2] if re.fullmatch(r"U?R(\d+|Z)(\.\w+)?", x)][:1]
        rows += [row + 1 for row in rows if base == "CS2R" and "32" not in parts]

        def clear(block: Block, mask: Mask, _: Step) -> None:
            for row in rows:
                block.write(row, np.uint32(0), mask)

        return clear
    make = _INTEGER.get(base[1:] if base[0] == "U" and base[1:] in _INTEGER else base)
    if make is None:
        raise SassError(f"instruction {one.name} is not known")
    return make(one)


def _store(one: Instruction, value: Callable[[Block], Values]) -> Action:
    row = _row(one.operands[0])
    return lambda block, mask, _: block.write(row, value(block), mask)


def _size(one: Instruction) -> int:
    for part, size in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
        if part in one.parts:
            return size
    return 4


def _loads(one: Instruction, size: int) -> list[int]:
    if not one.base.startswith(("LD", "ATOM")) or one.base == "LDGSTS":
        return []
    operands = [x for x in one.operands if re.fullmatch(r"R(\d+|Z)", x)]
    row = _row(operands[0]) if operands else _RZ
    return [row + i for i in range(max(1, size // 4))] if row != _RZ else []


def _shared_access(one: Instruction) -> Action:
    matrices = one.base in ("LDSM", "STSM")
    size = 16 if matrices else _size(one)
    count = int(one.parts[-1]) if matrices and one.parts[-1].isdigit() else 1
    rows = _loads(one, 4 * count if matrices else size)
    (where,) = (x for x in one.operands if "[" in x)
    address = _address(where, wide=False)

    def act(block: Block, mask: Mask, step: Step) -> None:
        if matrices:  # a row of 16 bytes from each of the first 8 x count lanes
            mask = mask & (np.arange(block.lanes) % WARP < 8 * count)
        at = address(block).astype(np.uint32)
        step.wavefronts = block.shared(at, size, mask, merges=not matrices)  # type: ignore[assignment]
        for row in rows:
            block.write(row, np.uint32(0), mask)

    return act


def _global_access(one: Instruction) -> Action:
    size = _size(one)
    rows = _loads(one, size)
    places = [x for x in one.operands if "[" in x]
    address = _address(places[-1], wide=True)
    to_shared = _address(places[0], wide=False) if one.base == "LDGSTS" else None

    def act(block: Block, mask: Mask, step: Step) -> None:
        block.touch(address(block), size, mask, step)
        if to_shared is not None:
            at = to_shared(block).astype(np.uint32)
            step.wavefronts = block.shared(at, size, mask)  # type: ignore[assignment]
        for row in rows:
            block.write(row, np.uint32(0), mask)

    return act


def _split(one: Instruction) -> tuple[list[str], list[str], list[str]]:
    """Return leading predicates after the destination, sources, and predicates at the end."""
    rest = list(one.operands[1:])
    leading: list[str] = []
    trailing: list[str] = []
    while rest and _IS_PREDICATE.fullmatch(rest[0]):
        leading.append(rest.pop(0))
    while rest and _IS_PREDICATE.fullmatch(rest[-1]):
        trailing.insert(0, rest.pop())
    return leading, rest, trailing


def _as64(values: Values) -> npt.NDArray[np.uint64]:
    return np.asarray(values, np.uint64)


def _signed(values: Values) -> npt.NDArray[np.int64]:
    return np.asarray(values, np.uint32).view(np.int32).astype(np.int64)


def _add(one: Instruction) -> Action:
    """IADD3 and VIADD: up to three terms, carries out, and with .X carries in."""
    leading, sources, trailing = _split(one)
    row = _row(one.operands[0])
    plain = [_read(x[1:] if x[0] == "-" and x[1] in "RUc" else x) for x in sources]
    minus = [x[0] == "-" and x[1] in "RUc" for x in sources]
    carries = trailing if "X" in one.parts else []

    def act(block: Block, mask: Mask, _: Step) -> None:
        total: npt.NDArray[np.uint64] = np.zeros(block.lanes, np.uint64)
        for get, negative in zip(plain, minus, strict=True):
            word = np.asarray(get(block), np.uint32)
            total = total + (_as64(~word) + np.uint64(1) if negative else _as64(word))
        for carry in carries:
            total = total + block.predicate(carry).astype(np.uint64)
        block.write(row, (total & _LOW).astype(np.uint32), mask)
        for limit, name in enumerate(leading, 1):
            block.write_predicate(name, total >> _HALF >= np.uint64(limit), mask)

    return act


def _multiply_add(one: Instruction) -> Action:
    leading, sources, trailing = _split(one)
    row = _row(one.operands[0])
    is_signed = "U32" not in one.parts
    a, b = (_read(x) for x in sources[:2])
    wide, high = "WIDE" in one.parts, "HI" in one.parts
    c32 = _read(sources[2])
    c64 = _wide(sources[2]) if wide or high else None

    def act(block: Block, mask: Mask, _: Step) -> None:
        if is_signed and c64:
            product = (_signed(a(block)) * _signed(b(block))).astype(np.uint64)
        else:
            product = _as64(a(block)) * _as64(b(block))
        if c64 is None:
            total = (product & _LOW) + _as64(c32(block))
            if "X" in one.parts and trailing:
                total = total + block.predicate(trailing[-1]).astype(np.uint64)
            block.write(row, (total & _LOW).astype(np.uint32), mask)
            return
        total = product + c64(block)
        low, up = (total & _LOW).astype(np.uint32), (total >> _HALF).astype(np.uint32)
        block.write(row, up if high else low, mask)
        if wide and row not in (_RZ, _URZ):
            block.write(row + 1, up, mask)
        for name in leading[:1]:
            block.write_predicate(name, np.broadcast_to(total < product, mask.shape), mask)

    return act


def _shift_add(one: Instruction) -> Action:
    """LEA: (a << s) + b; .HI: the upper word of (c:a) << s, plus b."""
    leading, sources, trailing = _split(one)
    row = _row(one.operands[0])
    shift = np.uint64(int(sources[-1], 16) & 31)
    a, b = _read(sources[0]), _read(sources[1])
    c = _read(sources[2]) if len(sources) == 4 else None

    def act(block: Block, mask: Mask, _: Step) -> None:
        low = _as64(a(block))
        upper: npt.NDArray[np.uint64]
        term: npt.NDArray[np.uint64]
        if "HI" in one.parts:
            if "SX32" in one.parts:
                upper = (_signed(a(block)) >> 32).astype(np.uint64) & _LOW
            else:
                upper = _as64(c(block) if c else np.uint32(0))
            term = ((low | upper << _HALF) << shift) >> _HALF
        else:
            term = low << shift & _LOW
        total = term + _as64(b(block))
        if "X" in one.parts and trailing:
            total = total + block.predicate(trailing[-1]).astype(np.uint64)
        block.write(row, (total & _LOW).astype(np.uint32), mask)
        for name in leading[:1]:
            carry = np.broadcast_to(total > _LOW, mask.shape)
            block.write_predicate(name, carry, mask)

    return act


def _shift(one: Instruction) -> Action:
    low, amount, high = (_read(x) for x in one.operands[1:4])
    parts = one.parts
    both = any(part.endswith("64") for part in parts)
    bits = np.uint64(64 if both else 32)

    def value(block: Block) -> Values:
        by = np.minimum(_as64(amount(block)), bits)
        a, c = _as64(low(block)), _as64(high(block))
        if parts[0] == "L":
            pair = a | (c << _HALF) if both else a
            shifted: npt.NDArray[np.uint64] = np.where(
                by >= 64, np.uint64(0), pair << np.minimum(by, np.uint64(63))
            )
        else:
            source = a | c << _HALF if both else (c if "HI" in parts else a)
            if "S32" in parts:
                shifted = (
                    _signed(source.astype(np.uint32)) >> np.minimum(by, 63).astype(np.int64)
                ).astype(np.uint64)
            elif "S64" in parts:
                shifted = (source.view(np.int64) >> np.minimum(by, 63).astype(np.int64)).view(
                    np.uint64
                )
            else:
                shifted = np.where(by >= 64, np.uint64(0), source >> np.minimum(by, np.uint64(63)))
        if both and "HI" in parts:
            shifted = shifted >> _HALF
        return (np.asarray(shifted, np.uint64) & _LOW).astype(np.uint32)

    return _store(one, value)


def _table(lut: int, a: Values, b: Values, c: Values) -> Array:
    a, b, c = (np.asarray(x, np.uint32) for x in (a, b, c))
    found = np.zeros_like(a | b | c)
    for i in range(8):
        if lut >> i & 1:
            found = found | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _logic(one: Instruction) -> Action:
    operands = [x for x in one.operands if x != "PT"]
    predicate = operands.pop(0) if _IS_PREDICATE.fullmatch(operands[0]) else None
    row = _row(operands[0])
    a, b, c = (_read(x) for x in operands[1:4])
    lut = int(operands[4], 16)

    def act(block: Block, mask: Mask, _: Step) -> None:
        found = np.broadcast_to(_table(lut, a(block), b(block), c(block)), mask.shape)
        block.write(row, found, mask)
        if predicate:
            block.write_predicate(predicate, found != 0, mask)

    return act


def _predicate_logic(one: Instruction) -> Action:
    first, second, a, b, c, lut, lut2 = one.operands[-7:]

    def act(block: Block, mask: Mask, _: Step) -> None:
        bits = [block.predicate(x).astype(np.uint32) for x in (a, b, c)]
        for name, table in ((first, lut), (second, lut2)):
            block.write_predicate(name, _table(int(table, 16), *bits) & np.uint32(1) != 0, mask)

    return act


def _compare(one: Instruction) -> Action:
    parts = one.parts
    first, second, a, b, *rest = one.operands
    compare = _COMPARE[parts[0]]
    is_float = one.base == "FSETP"
    join = next((p for p in parts[1:] if p in ("AND", "OR", "XOR")), "AND")
    get_a, get_b = _read(a), _read(b)

    def act(block: Block, mask: Mask, _: Step) -> None:
        x, y = get_a(block), get_b(block)
        if is_float:
            fx, fy = (np.asarray(v, np.uint32).view(np.float32) for v in (x, y))
            found = compare(fx, fy)
        elif "U32" in parts:
            found = compare(x, y)
        else:
            found = compare(_signed(x), _signed(y))
        found = np.broadcast_to(found, mask.shape)
        if "EX" in parts:  # the upper words decide unless they are equal
            lower = block.predicate(rest[1])
            equal = np.broadcast_to(np.equal(x, y), mask.shape)
            found = np.where(equal, lower, found)
        opposite = ~found
        for name, values in ((first, found), (second, opposite)):
            with_other = block.predicate(rest[0])
            joined = (
                values & with_other if join == "AND"
                else values | with_other if join == "OR" else values ^ with_other
            )  # fmt: skip
            block.write_predicate(name, joined, mask)

    return act


def _select(one: Instruction) -> Action:
    a, b = (_read(x) for x in one.operands[1:3])
    return _store(one, lambda block: np.where(block.predicate(one.operands[3]), a(block), b(block)))


def _minimum(one: Instruction) -> Action:
    """IMNMX, VIMNMX and VIADDMNMX, whose first two operands are added."""
    _, sources, trailing = _split(one)
    gets = [_read(x) for x in sources]

    def value(block: Block) -> Values:
        values = [np.asarray(get(block), np.uint32) for get in gets]
        if len(values) == 3:
            values = [values[0] + values[1], values[2]]
        x, y = values if "U32" in one.parts else [_signed(v) for v in values]
        picked = np.where(block.predicate(trailing[0]), np.minimum(x, y), np.maximum(x, y))
        return picked.astype(np.int64).astype(np.uint32)

    return _store(one, value)


def _permute(one: Instruction) -> Action:
    a, select, b = (_read(x) for x in one.operands[1:4])

    def value(block: Block) -> Values:
        pair = _as64(a(block)) | _as64(b(block)) << _HALF
        picks = _as64(select(block))
        found = np.uint64(0)
        for i in range(4):
            pick = picks >> np.uint64(4 * i) & np.uint64(7)
            found = found | (pair >> pick * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i)
        return np.asarray(found).astype(np.uint32)

    return _store(one, value)


def _special(one: Instruction) -> Action:
    name = one.operands[1]
    return _store(one, lambda block: block.special.get(name, np.uint32(0)))


def _load_constant(one: Instruction) -> Action:
    row, size = _row(one.operands[0]), _size(one)
    words = [_read(one.operands[1]), _read(one.operands[1], high=True)]

    def act(block: Block, mask: Mask, _: Step) -> None:
        if size < 4:
            block.write(row, np.asarray(words[0](block)) & np.uint32((1 << 8 * size) - 1), mask)
            return
        for i in range(size // 4):
            block.write(row + i, words[i](block), mask)

    return act


def _to_uniform(one: Instruction) -> Action:
    row = _row(one.operands[0])
    get = _read(one.operands[-1])

    def act(block: Block, mask: Mask, _: Step) -> None:
        values = np.broadcast_to(get(block), mask.shape).reshape(-1, WARP)
        first = mask.reshape(-1, WARP).argmax(1)[:, None]
        block.write(row, np.repeat(np.take_along_axis(values, first, 1), WARP), mask)

    return act


def _to_float(one: Instruction) -> Action:
    get = _read(one.operands[-1])

    def value(block: Block) -> Values:
        source = np.asarray(get(block), np.uint32)
        exact = (
            source.astype(np.float64) if "U32" in one.parts else _signed(source).astype(np.float64)
        )
        rounded = exact.astype(np.float32)
        if "RP" in one.parts:
            rounded = np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)
        return np.asarray(rounded, np.float32).view(np.uint32)

    return _store(one, value)


def _to_integer(one: Instruction) -> Action:
    get = _read(one.operands[-1])

    def value(block: Block) -> Values:
        source = np.nan_to_num(
            np.asarray(get(block), np.uint32).view(np.float32).astype(np.float64)
        )
        return np.clip(source, -(2.0**31), 2.0**32 - 1).astype(np.int64).astype(np.uint32)

    return _store(one, value)


def _move(one: Instruction) -> Action:
    return _store(one, _read(one.operands[1]))


def _predicates_to_register(one: Instruction) -> Action:
    keep, mask_of = _read(one.operands[-2]), int(one.operands[-1], 16)

    def value(block: Block) -> Values:
        found = np.asarray(keep(block), np.uint32) & np.uint32(~mask_of & 0xFFFFFFFF)
        for i in range(7):
            if mask_of >> i & 1:
                found = found | block.predicates[i].astype(np.uint32) << np.uint32(i)
        return found

    return _store(one, value)


def _register_to_predicates(one: Instruction) -> Action:
    get, mask_of = _read(one.operands[1]), int(one.operands[-1], 16)

    def act(block: Block, mask: Mask, _: Step) -> None:
        values = np.broadcast_to(get(block), mask.shape)
        for i in range(7):
            if mask_of >> i & 1:
                block.write_predicate(f"P{i}", values >> np.uint32(i) & np.uint32(1) != 0, mask)

    return act


def _vote(one: Instruction) -> Action:
    predicates = [x for x in one.operands if _IS_PREDICATE.fullmatch(x)]

    def act(block: Block, mask: Mask, _: Step) -> None:
        lanes = (block.predicate(predicates[-1]) & mask).reshape(-1, WARP)
        if "ALL" in one.parts:
            found = ~((~block.predicate(predicates[-1])) & mask).reshape(-1, WARP).any(1)
        else:
            found = lanes.any(1)
        if len(predicates) > 1:
            block.write_predicate(predicates[0], np.repeat(found, WARP), mask)
        for x in one.operands[:2]:
            if re.fullmatch(r"U?R\d+", x):
                bits = (lanes * (1 << np.arange(WARP))).sum(1).astype(np.uint32)
                block.write(_row(x), np.repeat(bits, WARP), mask)

    return act


def _absolute(one: Instruction) -> Action:
    get = _read(one.operands[1])
    return _store(one, lambda block: np.abs(_signed(get(block))).astype(np.uint32))


def _false(one: Instruction) -> Action:
    return lambda block, mask, _: block.write_predicate(
        one.operands[0], np.zeros(block.lanes, np.bool_), mask
    )


_INTEGER: dict[str, Callable[[Instruction], Action]] = {
    "IADD3": _add, "VIADD": _add, "IADD": _add, "IMAD": _multiply_add, "LEA": _shift_add,
    "SHF": _shift, "LOP3": _logic, "PLOP3": _predicate_logic, "ISETP": _compare, "FSETP": _compare,
    "SEL": _select, "FSEL": _select, "IMNMX": _minimum, "VIMNMX": _minimum, "VIADDMNMX": _minimum,
    "PRMT": _permute, "S2R": _special, "S2UR": _special, "LDC": _load_constant,
    "LDCU": _load_constant, "R2UR": _to_uniform, "I2F": _to_float, "I2FP": _to_float,
    "F2I": _to_integer, "MOV": _move, "MOV32I": _move, "P2R": _predicates_to_register,
    "R2P": _register_to_predicates, "VOTE": _vote, "VOTEU": _vote, "FCHK": _false,
    "IABS": _absolute,
}  # fmt: skip
