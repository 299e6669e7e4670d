"""Machine code of integer, logic and shift operations, from nvcc, computes what C++ says.

The code lies in `sass/`, so that neither nvcc nor cuobjdump is needed.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from attention_kernels.inspection import execution, sass
from attention_kernels.inspection.blocks import Blocks

FOLDER = Path(__file__).parent / "sass"
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
    return abs(x) // y * (1 if x >= 0 else -1)


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


def words(t: int) -> list[int]:
    """Return the results that operations.cu stores, in its order, as 64-bit words."""
    t, a, b, wide, other, x, y, by = inputs(t)
    lanes = [inputs(t - t % 32 + i) for i in range(32)]
    values = [
        a + b & WORD, a - b & WORD, a + b - t + 17 & WORD,
        wide + other, wide - other,
        a * b & WORD, a * b, x * y, a * b >> 32, (x * y >> 32) & WORD, wide * other, a * b + other,
        a // 7, truncated(x, 7) & WORD, a % 100,
        a << (by & 31) & WORD, a >> (by & 31), x >> (by & 31) & WORD,
        a << by & WORD if by < 32 else 0,
        wide << (by & 63), wide >> (by & 63), signed(wide, 64) >> (by & 63),
        ((b << 32 | a) << (by & 31)) >> 32 & WORD, (b << 32 | a) >> (by & 31) & WORD,
        a & b | ~a & WORD & by, a ^ b ^ by, a & ~b & WORD, wide & other,
        1 if a < b else 2, a if x < y else b, 1 if wide < other else 2,
        1 if signed(wide, 64) < signed(other, 64) else 2, 3 if (a < b) != (x < y) else 4,
        5 if (a < b and x >= y) or by == 9 else 6,
        min(a, b), max(a, b), min(x, y) & WORD, max(x, y) & WORD, a.bit_count(),
        permuted(a, b, 0x5042), permuted(a, b, by & 0x7777), abs(x) & WORD,
        a + (b << 3) + 1 & WORD, KEY + (y << 2), a & 0xFF, a >> 8 & 0xFFFF,
        signed(a & 0xFF, 8) & WORD,
        sum((lane[1] & 1) << i for i, lane in enumerate(lanes)),
        1 if any(lane[0] == 40 for lane in lanes) else 2,
        1 if all(lane[0] < 40 for lane in lanes) else 2,
        float_bits(a), float_bits(x), polynomial(COUNT + t % 3),
    ]  # fmt: skip
    return [value & WIDE for value in values]


@pytest.mark.parametrize("arch", PARAMETERS)
def test_an_operation_computes_what_the_source_says(arch):
    code = sass.parse((FOLDER / f"operations_sm_{arch}.sass").read_text())["kernel"]
    given = struct.pack("<QQI", OUT, KEY, COUNT)
    constants = struct.pack("<III", 32 * WARPS, 1, 1).ljust(PARAMETERS[arch], b"\0") + given
    done = Stores(code, constants, (32 * WARPS, 1, 1), [(0, 0, 0)])
    execution.run(done, 10_000)
    source = (FOLDER / "operations.cu").read_text()
    kept = [line.strip() for line in source.splitlines() if line.startswith("  keep(")]
    assert len(kept) == len(words(0))
    for t in range(32 * WARPS):
        for at, (operation, expected) in enumerate(zip(kept, words(t), strict=True)):
            assert done.memory[OUT + 8 * (64 * at + t)] == expected, (operation, t)


def test_spilled_registers_are_restored():
    """Each thread reads its own value; an address that is not relative to R1 reads as 0."""
    code = [
        sass.Instruction(name, tuple(operands))
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
    execution.run(blocks, 100)
    threads = np.arange(64)
    for row, expected in ((6, threads), (7, 7), (8, 7), (9, 7), (10, 0), (4, 0)):
        assert (blocks.values[row] == expected).all(), row
