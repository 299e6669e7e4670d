"""Helpers of the tests of predictions."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import Instruction
from attention_kernels.inspection.sass.execute import instructions as execution
from attention_kernels.inspection.sass.execute.state import Blocks
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError

H200 = gpus()["h200"]


def missing_program() -> str:
    """Return why nothing can be predicted here, or an empty string."""
    try:
        decode.find_disassembler("cuobjdump")
    except BuildError as error:
        return str(error)
    return compilers.missing_compiler("cuda") or ""


needs_cuda_programs = pytest.mark.skipif(bool(missing_program()), reason=missing_program())

# A loop of three iterations over a load of a column of shared memory, for threads of two warps;
# those of the second, and odd ones, leave.
CODE = """S2R R0, SR_TID.X
ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT
@P0 EXIT
IMAD.SHL.U32 R1, R0, 0x80, RZ
MOV R2, RZ
LDS R4, [R1+UR4+0x10]
IADD3 R2, R2, 0x1, RZ
ISETP.GE.AND P1, PT, R2, c[0x0][0x18], PT
@!P1 BRA 0x50
EXIT"""
LOOPS = struct.pack("<24xI", 3)  # the constant at 0x18


def instructions(code: str) -> list[Instruction]:
    """Return the instructions in some lines, each without scheduling information."""
    found = []
    for line in code.splitlines():
        guard, name, operands = re.fullmatch(r"\s*(?:@(\S+) +)?(\S+) ?(.*)", line).groups()
        parts = tuple(operands.split(", ")) if operands else ()
        found.append(Instruction(name, parts, guard or ""))
    return found


def executed(
    code: str = CODE, words: dict[int, int] | None = None, constants: bytes = LOOPS, **more: Any
) -> Blocks:
    """Execute the code in a block of two warps; words: what its loads return."""
    blocks = Blocks(instructions(code), constants, (64, 1, 1), [(0, 0, 0)], words or {}, **more)
    execution.run(blocks, 1000)
    return blocks
