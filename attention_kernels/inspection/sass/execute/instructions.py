"""Execute a kernel's machine code without a GPU, to see which instructions its warps execute.

All threads of the blocks run in parallel, those at the lowest address first, so lanes that have
left a loop wait behind it for the others. Loaded values and floating-point results are zero, so
control flow that depends on data is not followed. test_execute.py compares results with g++'s, and
test_predict.py compares counts with the profiler's.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from attention_kernels.inspection.resources import HOPPER_PARAMETERS, WARP, Launch, Triple
from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import IS_PREDICATE, Instruction, Program, SassError
from attention_kernels.inspection.sass.execute import asynchronous
from attention_kernels.inspection.sass.execute.state import LOW, Blocks, Issue, Mask, Values

_MAX_ISSUED = 3_000_000  # most instructions to execute: takes seconds
_INSTRUCTION_BYTES = 16
# Constant bank 0 up to the parameters: the sizes of block and grid; from Hopper on, at 0xc0 and at
# 0x198, where the bank and where its parameters are in memory, as code looks there for tensor maps,
# and at 0x140 whether there are clusters, without which code waits for the block alone.
_HEAD_UP_TO_8, _HEAD = struct.Struct("<6I328x"), struct.Struct("<6I168xQ120xI84xQ112x")
_BRANCHES = ("BRA", "CALL", "RET")
_CONTROL = (*_BRANCHES, "EXIT", "BAR", "UCGABAR_WAIT")

# ---- Control flow --------------------------------------------------------------------------------


def run_blocks(program: Program, launch: Launch, indices: Sequence[Triple]) -> Blocks:
    """Execute some blocks of a launch."""
    head, layout = [*launch.block, *launch.grid], _HEAD_UP_TO_8
    if int(program.gpu.arch) >= 90:
        begin = asynchronous.BANK_ADDRESS
        head, layout = [*head, begin, max(launch.cluster) > 1, begin + HOPPER_PARAMETERS], _HEAD
    constants = layout.pack(*head) + launch.parameters
    code, words = program.code[launch.symbol], dict(launch.words)
    blocks = Blocks(code, constants, launch.block, indices, words, launch.cluster)
    run(blocks, _MAX_ISSUED)
    return blocks


def run(blocks: Blocks, max_issued: int) -> None:
    """Run until every thread has ended.

    Raises SassError after max_issued instructions, and for an unknown branch or operand. Other
    unknown instructions write zero.
    """
    operations = [_operation(one) for one in blocks.code]
    where = np.zeros(blocks.lanes, np.int64)
    polls = {index for index, one in enumerate(blocks.code) if _is_poll(blocks.code, index, one)}
    while not blocks.done.all():
        live = ~(blocks.done | blocks.waiting | blocks.parked | blocks.testing)
        if not live.any():
            asynchronous.open_barriers(blocks)
            continue
        pc = int(where[live].min())
        here = live & (where == pc)
        others = where[live & ~here]
        stop = int(others.min()) if others.size else len(blocks.code)
        warps = here.reshape(-1, WARP).any(1)
        # Run without a branch until these threads branch or meet others.
        while pc < stop:
            one, operation = blocks.code[pc], operations[pc]
            blocks.mask = here & blocks.predicate(one.guard) if one.guard else here
            if one.base == "SYNCS" and asynchronous.hold(blocks, one):
                break
            blocks.issued.append(Issue(pc, warps))
            pc += 1
            if operation and (not one.guard or blocks.mask.any()):
                value = operation(blocks, one)
                if value is not None:
                    blocks.write(one.operands[0], value)
            if one.base in _CONTROL:
                break
        where[here] = pc
        if one.base in _BRANCHES:
            taken = _taken(blocks, one, here)
            # The index of the instruction to which each lane branches
            place = one.operands[0 if one.base == "RET" else -1].strip("`()").split()[0]
            targets = blocks.read(place) // _INSTRUCTION_BYTES
            if pc - 1 in polls and blocks.repeats(pc - 1, taken):
                continue  # another block ends this loop
            where[taken] = targets[taken]
        if len(blocks.issued) > max_issued:
            raise SassError(f"a block executes more than {max_issued} instructions")


def _is_poll(code: decode.Code, index: int, one: Instruction) -> bool:
    """Return whether an instruction branches back over a load of what another block may store."""
    target = re.match(r"0x\w+$", one.operands[-1]) if one.base == "BRA" else None
    first = int(target[0], 16) // _INSTRUCTION_BYTES if target else index
    return any(x.base in ("LD", "LDG") and "STRONG" in x.modifiers for x in code[first:index])


def _taken(blocks: Blocks, one: Instruction, here: Mask) -> Mask:
    """Return the lanes that take the branch, of those that have reached it."""
    taken = blocks.mask
    if "ANY" in one.modifiers:  # all lanes of a warp in which any lane does
        return here & np.repeat(taken.reshape(-1, WARP).any(1), WARP)
    if "DIV" in one.modifiers:  # only a diverged warp takes this branch
        return np.zeros_like(taken)
    for operand in one.operands[:-1]:
        if IS_PREDICATE.fullmatch(operand):
            taken = taken & blocks.predicate(operand)
    return taken


# ---- Memory --------------------------------------------------------------------------------------


def _shared_access(blocks: Blocks, one: Instruction) -> None:
    size, mask, is_matrix = one.size, blocks.mask, one.base in ("LDSM", "STSM")
    if is_matrix:  # each of the first lanes, 8 per matrix, accesses a row of 16 bytes
        count = int(one.modifiers[-1]) if one.modifiers[-1].isdigit() else 1
        size, mask = 16, mask & (np.arange(blocks.lanes) % WARP < 8 * count)
    at = blocks.address(one.memory[0], wide=False) & LOW
    blocks.request_shared(at, size, mask, merges=not is_matrix)
    blocks.clear(one.loaded)
    if blocks.keeps_shared and one.base in ("LDS", "STS") and size >= 4:
        stored = one.operands[-1] if one.base == "STS" else "RZ"
        for i, register in enumerate(one.loaded or decode.consecutive(stored, size // 4)):
            words = (at >> 2) + i % blocks.shared.shape[1]
            if one.base == "STS":
                blocks.shared[blocks.block_of[mask], words[mask]] = blocks.read(register)[mask]
            else:
                blocks.write(register, blocks.shared[blocks.block_of, words])


def _global_access(blocks: Blocks, one: Instruction) -> None:
    addresses = blocks.address(one.memory[-1], wide=True)
    blocks.request_global(addresses, one)
    if one.base == "LDGSTS":
        at = blocks.address(one.memory[0], wide=False) & LOW
        blocks.request_shared(at, one.size, blocks.mask)
    blocks.clear(one.loaded)
    if one.takes_part:  # of a queue: clusters take turns, in their order
        x, y, z = np.frombuffer(blocks.constants, np.uint32, 3, 12) // blocks.cluster
        part = np.array(blocks.indices) // blocks.cluster @ (1, x, x * y) + x * y * z * blocks.taken
        blocks.write(one.loaded[0], part[blocks.block_of])
        blocks.taken[np.unique(blocks.block_of[blocks.mask])] += 1
    if blocks.keeps_shared and "EXCH" in one.modifiers:
        values = blocks.read(one.operands[-1])[blocks.mask].tolist()
        blocks.stored |= zip(addresses[blocks.mask].tolist(), values, strict=True)
    for place, word in blocks.words.items() if len(one.loaded) == 1 else ():
        found = np.where(addresses >> 40 == place, word, blocks.read(one.loaded[0]))
        blocks.write(one.loaded[0], found)


def _local_access(blocks: Blocks, one: Instruction) -> None:
    """Execute LDL and STL: spilled registers are at [R1+offset]; other addresses read as 0.

    The lanes' words are next to each other, and stay in L1.
    """
    active = blocks.mask.reshape(-1, WARP).any(1)
    blocks.request[1] = np.where(active, max(1, one.size // 4), 0)
    found = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", one.memory[0])
    if not found:
        blocks.clear(one.loaded)
        return
    first = int(found[1] or "0", 16)
    stored = one.operands[-1] if one.base == "STL" else "RZ"
    for i, register in enumerate(one.loaded or decode.consecutive(stored, one.size // 4)):
        kept = blocks.spilled.get(first + 4 * i, blocks.read("RZ"))
        if one.base == "STL":
            kept = np.where(blocks.mask, blocks.read(register), kept)
            blocks.spilled[first + 4 * i] = kept
        else:
            blocks.write(register, kept)


def _load_constant(blocks: Blocks, one: Instruction) -> None:
    register, source = one.operands[:2]
    if one.size == 8:
        blocks.write64(register, blocks.read64(source))
    else:
        blocks.write(register, blocks.read(source) & (1 << 8 * min(4, one.size)) - 1)


# ---- Integers ------------------------------------------------------------------------------------


def _signed(values: Values) -> Values:
    return (values ^ 0x80000000) - 0x80000000


def _carry_in(blocks: Blocks, one: Instruction) -> Values | int:
    return sum(blocks.predicate(x).astype(int) for x in one.split[2]) if "X" in one.modifiers else 0


def _add(blocks: Blocks, one: Instruction) -> Values | None:
    """Execute IADD3 and VIADD: up to three terms, carries out and, with .X, carries in."""
    carried, sources, _ = one.split
    if "64" in one.modifiers:
        blocks.write64(one.operands[0], sum(blocks.read64(x) for x in sources))
        return None
    total = np.zeros(blocks.lanes, np.int64)
    for x in sources:
        is_negative = x[0] == "-" and x[1] in "RUc"  # subtracting 0 produces a carry
        total += (blocks.read(x[1:]) ^ LOW) + 1 if is_negative else blocks.read(x)
    total += _carry_in(blocks, one)
    for limit, name in enumerate(carried, 1):
        blocks.write(name, total >> 32 >= limit)
    return total


def _multiply_add(blocks: Blocks, one: Instruction) -> Values | None:
    carried, (x, y, z), _ = one.split
    a, b = blocks.read(x), blocks.read(y)
    if "WIDE" not in one.modifiers and "HI" not in one.modifiers:
        return a * b + blocks.read(z) + _carry_in(blocks, one)
    product = a * b if "U32" in one.modifiers else _signed(a) * _signed(b)
    total: Values = product + blocks.read64(z)
    for name in carried[:1]:
        blocks.write(name, total.astype(np.uint64) < product.astype(np.uint64))
    if "HI" in one.modifiers:
        return total >> 32
    blocks.write64(one.operands[0], total)
    return None


def _shift_add(blocks: Blocks, one: Instruction) -> Values:
    """Execute LEA: (a << s) + b; with .HI the upper word of (c:a) << s, plus b."""
    carried, sources, _ = one.split
    a, shift = blocks.read(sources[0]), int(sources[-1], 16) & 31
    term = a << shift
    if "HI" in one.modifiers:
        upper = blocks.read(sources[2] if len(sources) == 4 else "RZ")
        if "SX32" in one.modifiers:
            upper = _signed(a) >> 32
        term = (a | upper << 32) << shift >> 32
    total = (term & LOW) + blocks.read(sources[1]) + _carry_in(blocks, one)
    for name in carried[:1]:
        blocks.write(name, total > LOW)
    return total


def _shift(blocks: Blocks, one: Instruction) -> Values:
    """Execute SHF: return one word of a shifted pair, with .HI the upper one."""
    low, amount, high = (blocks.read(x) for x in one.operands[1:4])
    width = 64 if {"U64", "S64"} & {*one.modifiers} else 32
    by = amount % width if "W" in one.modifiers else np.minimum(amount, width)
    pair = low | high << 32
    if "L" in one.modifiers:
        found = np.where(by >= 64, 0, pair << np.minimum(by, 63))
    elif {"S32", "S64"} & {*one.modifiers}:
        found = pair >> np.minimum(by, 63)
    else:
        shifted = pair.view(np.uint64) >> np.minimum(by, 63).view(np.uint64)
        found = np.where(by >= 64, 0, shifted.view(np.int64))
    return found >> 32 if "HI" in one.modifiers else found


def _minimum(blocks: Blocks, one: Instruction) -> Values:
    """Execute IMNMX, VIMNMX(3), and VIADDMNMX, which first adds its first two operands."""
    _, sources, trailing = one.split
    values = [blocks.read(x) for x in sources]
    if one.base == "VIADDMNMX":
        values[:2] = [values[0] + values[1] & LOW]
    if "U32" not in one.modifiers:
        values = [_signed(x) for x in values]
    found: Values = np.where(blocks.predicate(trailing[0]), np.min(values, 0), np.max(values, 0))
    return found


def _extend(blocks: Blocks, one: Instruction) -> Values:
    """Execute SGXT: repeat the sign bit of the lowest bits, or with .U32 clear the bits above."""
    source, width = (blocks.read(x) for x in one.operands[1:3])
    bits = source & (1 << width) - 1
    if "U32" in one.modifiers:
        return bits
    sign: Values = 1 << np.maximum(width, 1) - 1
    return (bits ^ sign) - sign


def _permute(blocks: Blocks, one: Instruction) -> Values:
    a, select, b = (blocks.read(x) for x in one.operands[1:4])
    pair = a | b << 32
    total = np.zeros_like(a)
    for i in range(4):
        byte = pair >> (select >> 4 * i & 7) * 8 & 255
        is_sign = select >> 4 * i & 8 != 0  # repeat the byte's sign bit
        total |= np.where(is_sign, (byte >> 7) * 255, byte) << 8 * i
    return total


# ---- Logic and predicates ------------------------------------------------------------------------

_Bits = TypeVar("_Bits", Values, Mask)


def _lookup(table: str, a: _Bits, b: _Bits, c: _Bits) -> _Bits:
    """Look up each bit's result in a table of eight, the binary digits of a number."""
    found = np.zeros_like(a)
    for i in range(8):
        if int(table, 16) >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _logic(blocks: Blocks, one: Instruction) -> None:
    operands = [x for x in one.operands if x != "PT"]
    predicate = operands.pop(0) if IS_PREDICATE.fullmatch(operands[0]) else "PT"
    register, a, b, c, table = operands[:5]
    found = _lookup(table, blocks.read(a), blocks.read(b), blocks.read(c))
    blocks.write(register, found)
    blocks.write(predicate, found & LOW != 0)


def _predicate_logic(blocks: Blocks, one: Instruction) -> None:
    first, second, a, b, c, *tables = one.operands[-7:]
    bits = [blocks.predicate(x) for x in (a, b, c)]
    for name, table in zip((first, second), tables, strict=True):
        blocks.write(name, _lookup(table, *bits))


def _compare(blocks: Blocks, one: Instruction) -> None:
    first, second, a, b, *rest = one.operands
    convert: Callable[[Values], npt.NDArray[Any]] = (
        _float if one.base == "FSETP" else np.asarray if "U32" in one.modifiers else _signed
    )
    x, y = convert(blocks.read(a)), convert(blocks.read(b))
    relation = one.modifiers[0].removesuffix("U")
    if relation in ("NAN", "NUM"):
        found = (np.isnan(x) | np.isnan(y)) == (relation == "NAN")
    else:
        found = getattr(operator, relation.lower())(x, y)
    if "EX" in one.modifiers:  # the upper words decide unless they are equal
        found = np.where(np.equal(x, y), blocks.predicate(rest[1]), found)
    joins = {"OR": np.logical_or, "XOR": np.logical_xor}
    join = next((joins[part] for part in one.modifiers if part in joins), np.logical_and)
    other = blocks.predicate(rest[0])
    both = join(found, other), join(~found, other)
    blocks.write(first, both[0])
    blocks.write(second, both[1])


def _select(blocks: Blocks, one: Instruction) -> Values:
    _, a, b, predicate, *_ = one.operands
    return np.where(blocks.predicate(predicate), blocks.read(a), blocks.read(b))


def _predicates_to_register(blocks: Blocks, one: Instruction) -> Values:
    _, file, source, which = one.operands
    kind = file.removesuffix("R")  # of PR or UPR
    packed: Values = np.sum([blocks.predicate(f"{kind}{i}").astype(int) << i for i in range(7)], 0)
    return blocks.read(source) & ~int(which, 16) | packed & int(which, 16)


def _register_to_predicates(blocks: Blocks, one: Instruction) -> None:
    file, source, which = one.operands
    for i in range(7):  # not PT
        if int(which, 16) >> i & 1:
            blocks.write(f"{file.removesuffix('R')}{i}", blocks.read(source) >> i & 1 != 0)


def _vote(blocks: Blocks, one: Instruction) -> None:
    predicates = [x for x in one.operands if IS_PREDICATE.fullmatch(x)]
    asked = blocks.predicate(predicates[-1])
    lanes = (asked & blocks.mask).reshape(-1, WARP)
    is_all = "ALL" in one.modifiers
    found = ~(~asked & blocks.mask).reshape(-1, WARP).any(1) if is_all else lanes.any(1)
    if len(predicates) > 1:
        blocks.write(predicates[0], np.repeat(found, WARP))
    for x in one.operands[:2]:
        if re.fullmatch(r"U?R\d+", x):
            blocks.write(x, np.repeat((lanes << np.arange(WARP)).sum(1), WARP))


def _shuffle(blocks: Blocks, one: Instruction) -> None:
    """Execute SHFL as PTX defines it ("shfl.sync")."""
    predicate, register, *sources = one.operands
    values, b, c = (blocks.read(x) for x in sources)
    lane = np.arange(blocks.lanes) % WARP
    clamp, segment = c & 31, c >> 8 & 31
    most = lane & segment | clamp & ~segment
    by = {"UP": lane - b, "DOWN": lane + b, "BFLY": lane ^ b}
    other = by.get(one.modifiers[0], lane & segment | b & 31 & ~segment)
    is_within = other >= most if one.modifiers[0] == "UP" else other <= most
    blocks.write(predicate, is_within)
    first = np.arange(blocks.lanes) - lane
    blocks.write(register, values[first + np.where(is_within, other, lane)])


def _to_uniform(blocks: Blocks, one: Instruction) -> Values:
    """Execute R2UR: return the value of each warp's first active lane."""
    values, mask = blocks.read(one.operands[-1]).reshape(-1, WARP), blocks.mask.reshape(-1, WARP)
    return np.repeat(np.take_along_axis(values, mask.argmax(1)[:, None], 1), WARP)


# ---- Floating point ------------------------------------------------------------------------------

_FLOATING = re.compile(
    r"F(ADD|MUL|FMA|MNMX|SET|RND|SWZADD|ADD2|FMA2|MUL2|2F|2FP)|H\w+|MUFU|D\w+|IMMA|CS2R|REDUX"
    r"|MATCH|MOVM"
)


def _float(values: Values) -> npt.NDArray[np.float32]:
    return values.astype(np.uint32).view(np.float32)


def _zero(blocks: Blocks, one: Instruction) -> None:
    found = next((x for x in one.operands[:2] if re.fullmatch(r"U?R(\d+|Z)(\.\w+)?", x)), "RZ")
    wide = one.base == "CS2R" and "32" not in one.modifiers
    blocks.clear(decode.consecutive(found, 2) if wide else [found])


_unknown = functools.partial(_zero)


def _two_halves(blocks: Blocks, one: Instruction) -> int:
    """Execute HFMA2 -RZ, RZ, which loads a constant."""
    high, low = (np.float16(x.replace("QNAN", "nan")).view(np.uint16) for x in one.operands[3:])
    return int(high) << 16 | int(low)


def _to_float(blocks: Blocks, one: Instruction) -> Values:
    source: npt.NDArray[Any] = blocks.read(one.operands[-1])
    if "U64" in one.modifiers:
        source = blocks.read64(one.operands[-1]).view(np.uint64)
    elif "U32" not in one.modifiers:
        source = _signed(source)
    exact = source.astype(np.longdouble)
    rounded = exact.astype(np.float32)
    if "RP" in one.modifiers:
        rounded = np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)
    return rounded.view(np.uint32).astype(np.int64)


def _to_integer(blocks: Blocks, one: Instruction) -> None:
    source = np.nan_to_num(_float(blocks.read(one.operands[-1])).astype(np.float64))
    if "U64" in one.modifiers:
        most = np.nextafter(2.0**64, 0.0)
        found = np.clip(source, 0.0, most).astype(np.uint64)
        blocks.write64(one.operands[0], found.view(np.int64))
    else:
        blocks.write(one.operands[0], np.clip(source, -(2.0**31), 2.0**32 - 1).astype(np.int64))


def _reciprocal(blocks: Blocks, one: Instruction) -> Values:
    with np.errstate(all="ignore"):
        return (1 / _float(blocks.read(one.operands[1]))).view(np.uint32).astype(np.int64)


# ---- What each instruction does ------------------------------------------------------------------

Operation: TypeAlias = Callable[[Blocks, Instruction], Values | int | None]
"""Executes an instruction; a value that it returns is written to the first operand."""
_NO_EFFECT = {
    "NOP", "BSSY", "BSYNC", "BREAK", "BMOV", "WARPSYNC", "YIELD", "DEPBAR", "LDGDEPBAR", "MEMBAR",
    "ERRBAR", "CCTL", "ACQBULK", "PREEXIT", "FENCE", "NANOSLEEP", "ENDCOLLECTIVE",
    "BPT", "KILL", "CGAERRBAR", "UTMACMDFLUSH", "UTMACCTL", "UCGABAR_ARV", *_BRANCHES,
}  # fmt: skip
_OPERATIONS_BY_NAMES: dict[str, Operation] = {
    "LDS STS LDSM STSM ATOMS": _shared_access, "LDL STL": _local_access,
    "LDG STG LD ST LDGSTS ATOM ATOMG RED REDG": _global_access, "LDC LDCU": _load_constant,
    "IADD IADD3 VIADD": _add, "IMAD": _multiply_add, "LEA": _shift_add, "SHF": _shift,
    "IMNMX VIMNMX VIMNMX3 VIADDMNMX": _minimum, "SGXT": _extend, "PRMT": _permute, "LOP3": _logic,
    "PLOP3": _predicate_logic, "ISETP FSETP": _compare, "SEL FSEL": _select,
    "P2R P2UR": _predicates_to_register, "R2P R2UP": _register_to_predicates, "F2I": _to_integer,
    "I2F I2FP": _to_float, "VOTE VOTEU": _vote, "SHFL": _shuffle, "R2UR": _to_uniform,
    "BAR UCGABAR_WAIT": asynchronous.barrier, "SYNCS": asynchronous.mbarrier,
    "UTMALDG UTMASTG UTMAREDG UBLKCP": asynchronous.copy_tile, "STAS": asynchronous.store_remote,
    " ".join(decode.PRODUCTS): asynchronous.product, "WARPGROUP": asynchronous.await_products,
    "USETMAXREG": asynchronous.move_registers, "ELECT": asynchronous.elect,
    "MOV MOV32I": lambda blocks, one: blocks.read(one.operands[1]), "EXIT": asynchronous.end,
    "S2R S2UR": lambda blocks, one: blocks.special.get(one.operands[1], 0),
    "IABS": lambda blocks, one: abs(_signed(blocks.read(one.operands[1]))),
    "FLO": lambda blocks, one: np.frexp(blocks.read(one.operands[1]))[1].astype(np.int64) - 1,
    "POPC": lambda blocks, one: sum(blocks.read(one.operands[1]) >> i & 1 for i in range(32)),
    "FCHK": lambda blocks, one: blocks.write(one.operands[0], False),
}  # fmt: skip
_OPERATIONS = {name: run for names, run in _OPERATIONS_BY_NAMES.items() for name in names.split()}
_DOUBLE = re.compile(r"D(ADD|MUL|FMA|MNMX|SETP|MMA)")
_UNKNOWN_BRANCH = re.compile(r"BRXU?|JMPU?|JMXU?|RPCMOV")


def assumed(code: decode.Code) -> list[str]:
    """Return what is assumed of instructions for lack of data, in sentences."""
    unknown = {one.name for one in code if _operation(one) is _unknown}
    unknown |= {one.name for one in code if _DOUBLE.fullmatch(one.base)}
    atomics = [one for one in code if one.base[:4] == "ATOM" and "RZ" not in one.loaded]
    found = [f"{name} is integer arithmetic with the result 0" for name in sorted(unknown)]
    results = {one.name: "the next block's number" if one.takes_part else "0" for one in atomics}
    return [*found, *(f"{name} returns {what}" for name, what in sorted(results.items()))]


def _operation(one: Instruction) -> Operation | None:
    base = one.base
    if base in _NO_EFFECT:
        return None
    if base == "HFMA2" and one.operands[1:3] == ("-RZ", "RZ"):
        return _two_halves
    if base == "MUFU" and "RCP" in one.modifiers:
        return _reciprocal
    if _FLOATING.fullmatch(base) and base not in decode.PRODUCTS:
        return _zero
    if _UNKNOWN_BRANCH.fullmatch(base):
        raise SassError(f"cannot follow the branch {one.name}")
    return _OPERATIONS.get(base) or _OPERATIONS.get(base.removeprefix("U"), _unknown)
