"""Machine code of integer, logic and shift operations, from nvcc, computes what C++ says.

The code is in files here, so that neither nvcc nor cuobjdump is needed.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from attention_kernels.inspection.sass import decode, execute
from attention_kernels.inspection.sass.state import Blocks

FOLDER = Path(__file__).parent
PARAMETERS = {"75": 0x160, "90": 0x210}  # where they begin in bank 0
KEY, COUNT = 0xD1B54A32D192ED03, 3
WARPS, OUT = 2, 1 << 40
WORD, WIDE = 2**32 - 1, 2**64 - 1


class Stores(Blocks):
    """Blocks that record what they store in global memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory: dict[int, int] = {}

    def request_global(self, addresses, one) -> None:
        super().request_global(addresses, one)
        values = self.read64(one.operands[-1])
        for lane in np.flatnonzero(self.mask).tolist():
            self.memory[int(addresses[lane])] = int(values[lane]) & WIDE


def signed(value: int, bits: int = 32) -> int:
    return (value ^ 1 << bits - 1) - (1 << bits - 1)


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x >= 0) == (y > 0) else -1)


def float_bits(value: int) -> int:
    return struct.unpack("<I", np.float32(value).tobytes())[0]


def permuted(a: int, b: int, select: int) -> int:
    pair = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(pair[select >> 4 * i & 7] for i in range(4)), "little")


def polynomial(count: int) -> int:
    total = 0
    for i in range(count):
        total = total * 31 + i & WORD
    return total


def inputs(t: int) -> tuple[int, ...]:
    a = t * 0x9E3779B1 + KEY & WORD
    b = (a >> 7) * 0x85EBCA6B & WORD ^ KEY >> 32
    return t, a, b, a << 32 | b, KEY * (2 * t + 1) & WIDE, signed(a), signed(b), t * 3 + COUNT


def words(t: int, *, is_uniform: bool = False) -> list[int]:
    """Return the results that operations.cu stores, in its order, as 64-bit words.

    is_uniform: all lanes have the same t.
    """
    t, a, b, wide, other, x, y, by = inputs(t)
    lanes = [inputs(t if is_uniform else t - t % 32 + i) for i in range(32)]
    divisor = by - 9 | 1
    values = [
        a + b & WORD, a - b & WORD, a + b - t + 17 & WORD,
        wide + other, wide - other,
        a * b & WORD, a * b, x * y, a * b >> 32, (x * y >> 32) & WORD, wide * other, a * b + other,
        a // 7, truncated(x, 7) & WORD, a % 100,
        a // (by + 1), b % (by + 1), truncated(x, divisor) & WORD,
        y - truncated(y, divisor) * divisor & WORD,
        wide // (other >> 20), other % (wide >> 9), wide // (other >> 33 | 1),
        truncated(signed(wide, 64), signed(other, 64) >> 21),
        a << (by & 31) & WORD, a >> (by & 31), x >> (by & 31) & WORD,
        a << by & WORD if by < 32 else 0,
        wide << (by & 63), wide >> (by & 63), signed(wide, 64) >> (by & 63),
        ((b << 32 | a) << (by & 31)) >> 32 & WORD, (b << 32 | a) >> (by & 31) & WORD,
        a & b | ~a & WORD & by, a ^ b ^ by, a & ~b & WORD, wide & other,
        1 if a < b else 2, a if x < y else b, 1 if wide < other else 2,
        1 if signed(wide, 64) < signed(other, 64) else 2, 3 if (a < b) != (x < y) else 4,
        5 if (a < b and x >= y) or by == 9 else 6,
        min(a, b), max(a, b), min(x, y) & WORD, max(x, y) & WORD,
        min(signed(x + 5 & WORD), y) & WORD, max(signed(x - y & WORD), y) & WORD, a.bit_count(),
        permuted(a, b, 0x5042), permuted(a, b, by & 0x7777), abs(x) & WORD,
        a + (b << 3) + 1 & WORD, KEY + (y << 2), a & 0xFF, a >> 8 & 0xFFFF,
        signed(a & 0xFF, 8) & WORD,
        sum((lane[1] & 1) << i for i, lane in enumerate(lanes)),
        1 if any(lane[0] == 40 for lane in lanes) else 2,
        1 if all(lane[0] < 40 for lane in lanes) else 2,
        float_bits(a), float_bits(x),
        1 if np.float32(a) < np.float32(b) else 2,
        a if np.float32(x) >= np.float32(y) or by == 6 else b, x >> 9 & WORD,
        polynomial(COUNT + t % 3),
    ]  # fmt: skip
    return [value & WIDE for value in values]


def kept() -> list[str]:
    """Return the operations of operations.cu, one for each of words()."""
    source = (FOLDER / "operations.cu").read_text()
    return [line.strip() for line in source.splitlines() if line.startswith("  keep(")]


def stored(code: list[decode.Instruction], arch: str, block: int = 0) -> dict[int, int]:
    """Return what a block of operations.cu stores, by address."""
    given = struct.pack("<QQI", OUT, KEY, COUNT)
    constants = struct.pack("<III", 32 * WARPS, 1, 1).ljust(PARAMETERS[arch], b"\0") + given
    done = Stores(code, constants, (32 * WARPS, 1, 1), [(block, 0, 0)])
    execute.run(done, 20_000)
    return done.memory


def operations(arch: str) -> list[decode.Instruction]:
    return decode.parse((FOLDER / f"operations_sm_{arch}.sass").read_text())["kernel"]


@pytest.mark.parametrize("arch", PARAMETERS)
def test_an_operation_computes_what_the_source_says(arch):
    memory = stored(operations(arch), arch)
    assert len(kept()) == len(words(0))
    for t in range(32 * WARPS):
        for at, (operation, expected) in enumerate(zip(kept(), words(t), strict=True)):
            assert memory[OUT + 8 * (64 * at + t)] == expected, (operation, t)


UNIFORM = ("IADD3", "IMAD", "ISETP", "LEA", "LOP3", "MOV", "PRMT", "SEL", "SHF", "PLOP3", "POPC")


@pytest.mark.parametrize("t", [0, 9, 63])
def test_uniform_operations_compute_the_same(t):
    """nvcc has few of them in this code, so those of a thread are renamed."""

    def renamed(operand: str) -> str:
        operand = re.sub(r"\bR(\d+)", lambda x: f"UR{int(x[1]) + 64}", operand)
        operand = re.sub(r"\bP(?=\d|T)", "UP", re.sub(r"\bRZ\b", "URZ", operand))
        return operand.replace("SR_TID", "SR_CTAID")

    code = [
        dataclasses.replace(
            one,
            name=f"U{one.name}" if one.base in UNIFORM else one.name,
            operands=tuple(map(renamed, one.operands)),
            guard=renamed(one.guard),
        )
        for one in operations("90")
    ]
    memory = stored(code, "90", block=t)
    for at, (operation, expected) in enumerate(zip(kept(), words(t, is_uniform=True), strict=True)):
        assert memory[OUT + 8 * (64 * at + t)] == expected, operation


def test_spilled_registers_are_restored():
    """Each thread reads its own value; an address that is not relative to R1 reads as 0."""
    code = [
        decode.Instruction(name, tuple(operands))
        for name, *operands in (
            ("S2R", "R4", "SR_TID.X"),
            ("MOV", "R5", "0x7"),
            ("STL.64", "[R1+0x8]", "R4"),
            ("STL", "[R1]", "R5"),
            ("MOV", "R4", "RZ"),
            ("LDL.64", "R6", "[R1+0x8]"),
            ("LDL", "R8", "[R1+0xc]"),
            ("LDL", "R9", "[R1]"),
            ("LDL", "R10", "[R2]"),
            ("EXIT",),
        )
    ]
    blocks = Blocks(code, b"", (64, 1, 1), [(0, 0, 0)])
    execute.run(blocks, 100)
    threads = np.arange(64)
    for row, expected in ((6, threads), (7, 7), (8, 7), (9, 7), (10, 0), (4, 0)):
        assert (blocks.values[row] == expected).all(), row
    lines = [issue.lines.tolist() for issue in blocks.issued if code[issue.index].memory]
    assert lines == [[2, 2], [1, 1], [2, 2], [1, 1], [1, 1], [1, 1]]  # 32 words each


def ran(*lines: str, constants: bytes = b"") -> Blocks:
    """Run instructions of two warps, such as "S2R R4, SR_TID.X"."""
    code = []
    for line in (*lines, "EXIT"):
        name, _, operands = line.partition(" ")
        code.append(decode.Instruction(name, tuple(operands.split(", ")) if operands else ()))
    blocks = Blocks(code, constants, (64, 1, 1), [(0, 0, 0)])
    execute.run(blocks, 100)
    return blocks


def test_predicates_are_packed_into_a_register_and_back():
    blocks = ran(
        "S2R R4, SR_TID.X",
        "R2P PR, R4, 0x5",  # P0 and P2, from bits 0 and 2 of the thread
        "ISETP.GT.AND P1, PT, R4, 0x1f, PT",
        "MOV R5, 0xff80",
        "P2R R6, PR, R5, 0x7",
        "FSEL R7, R4, RZ, !P2",
        "VOTEU.ANY UR8, UPT, P1",
        "R2UR UR9, R4",
    )
    t = np.arange(64)
    assert (blocks.values[6] == 0xFF80 + (t & 1) + 2 * (t > 31) + (t & 4)).all()
    assert (blocks.values[7] == np.where(t & 4, 0, t)).all()
    assert (blocks.values[256 + 8] == np.where(t > 31, WORD, 0)).all()
    assert (blocks.values[256 + 9] == t // 32 * 32).all()  # that of the warp's first lane


def test_addresses_are_extended_and_constants_have_sizes():
    blocks = ran(
        "MOV R4, 0xfffffffe",
        "LEA R6, P0, R4, 0x18, 0x2",  # 0x18 - 8, which carries
        "LEA.HI.X.SX32 R7, R4, 0x5, 0x2, P0",
        "LDC.U8 R8, c[0x0][0x2]",
        "LDC.64 R10, c[0x0][0x0]",
        "LDC R12, c[0x0][RZ]",
        constants=bytes.fromhex("0102830405060788"),
    )
    assert [int(blocks.values[row][0]) for row in (6, 7, 8)] == [0x10, 5, 0x83]
    assert [int(blocks.values[row][0]) for row in (10, 11)] == [0x04830201, 0x88070605]
    assert int(blocks.values[12][0]) == 0x04830201


@pytest.mark.parametrize(
    ("instruction", "stride", "wavefronts"),
    [
        ("LDS R8, [R5]", 4, 1),
        ("LDS R8, [R5]", 128, 32),
        ("LDS.64 R8, [R5]", 8, 2),
        ("LDS.128 R8, [R5]", 16, 4),
        ("LDS.128 R8, [R5]", 32, 8),
        ("STS.128 [R5], R8", 144, 4),
        ("STS.U16 [R5], R8", 2, 1),
        ("LDSM.16.M88.4 R8, [R5]", 128, 32),
        ("LDSM.16.MT88.4 R8, [R5]", 144, 4),
        ("LDGSTS.E.BYPASS.128 [R5], [R6.64]", 16, 4),
        ("ATOMS.ADD RZ, [R5], R8", 8, 2),
    ],
)
def test_a_request_to_shared_memory_costs_its_wavefronts(instruction, stride, wavefronts):
    blocks = ran("S2R R4, SR_LANEID", f"IMAD R5, R4, {stride:#x}, RZ", instruction)
    assert blocks.issued[2].wavefronts.tolist() == [wavefronts] * 2


@pytest.mark.parametrize(
    ("instruction", "stride", "lines", "misses"),
    [
        ("LDG.E R8, [R6.64]", 4, 1, [4, 0]),  # the second warp finds the sectors of the first
        ("LDG.E.128.CONSTANT R8, [R6.64]", 16, 4, [16, 0]),
        ("LDG.E.64.CONSTANT R8, [R6.64]", 32, 8, [32, 0]),
        ("STG.E [R6.64], R8", 4, 1, [4, 4]),
        ("STG.E.U16 [R6.64], R8", 2, 1, [2, 2]),
        ("STG.E.128 [R6.64], R8", 512, 32, [32, 32]),
        ("LDGSTS.E.BYPASS.128 [R5], [R6.64]", 16, 4, [16, 0]),
        ("RED.E.ADD [R6.64], R8", 4, 1, [4, 4]),
    ],
)
def test_a_request_to_global_memory_costs_its_lines_and_sectors(instruction, stride, lines, misses):
    blocks = ran("S2R R4, SR_LANEID", f"IMAD.WIDE R6, R4, {stride:#x}, RZ", instruction)
    assert blocks.issued[2].lines.tolist() == [lines] * 2
    assert blocks.issued[2].misses.tolist() == misses
