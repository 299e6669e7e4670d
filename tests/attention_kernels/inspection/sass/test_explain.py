"""Explanations: stalls are at the right source lines."""

from __future__ import annotations

import dataclasses

import pytest

from attention_kernels import ladder
from attention_kernels.inspection.resources import Launch
from attention_kernels.inspection.sass import explain
from attention_kernels.inspection.sass.decode import Instruction, Program
from attention_kernels.inspection.sass.predict import predict
from attention_kernels.inspection.sass.time import EXITED, SELECTED, Stall
from tests.attention_kernels.inspection.sass.common import H200, needs_cuda_programs

# What nvdisasm prints: a kernel at line 20, a function called in line 25, and a lambda in line 30.
TABLE = """
	.section	.text.kernel,"ax",@progbits
.text.kernel:
	//## File "/a/v01.cu", line 20
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "/b/common.cuh", line 7 inlined at "/a/v01.cu", line 9
	//## File "/a/v01.cu", line 9 inlined at "/a/v01.cu", line 25
	//## File "/a/v01.cu", line 25
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/              @P0  BRA `(.L_x_1) ;
.L_x_1:
	//## File "/a/v01.cu", line 31 inlined at "/a/v01.cu", line 35
	//## File "/a/v01.cu", line 35
        /*0030*/                   EXIT ;
	.section	.text.other,"ax",@progbits
.text.other:
        /*0000*/                   EXIT ;
"""


def test_instructions_have_the_lines_of_their_call_chains():
    found = explain.parse(TABLE)
    assert {*found} == {"kernel", "other"}
    load = [("/a/v01.cu", 25), ("/a/v01.cu", 9), ("/b/common.cuh", 7)]
    assert found["kernel"][1:3] == [load, load]
    assert found["other"] == [[]]
    # A lambda's line is the kernel's own; a function's is above the kernel.
    assert explain.own_lines(found["kernel"], "v01.cu") == [(20,), (25, 9), (25, 9), (31,)]
    assert explain.own_lines(found["other"], "v01.cu") == [()]


def test_stalls_are_summed_by_line(monkeypatch, tmp_path):
    """A line that calls a function waits for the result of the line above it."""
    source = tmp_path / "v01.cu"
    source.write_text("f(x)\nx = load();\ny += f(x);\n")
    frames = {"kernel": [[(str(source), 2)], [(str(source), 3), (str(source), 1)], []]}
    monkeypatch.setattr(explain, "line_table", lambda _: frames)
    load = Instruction("LDS", ("R2", "[R4]"), writes=0)
    use = Instruction("FADD", ("R3", "R2", "R2"), waits=(0,))
    program = Program(source, tmp_path, H200, {"kernel": [load, use, use]}, {})
    launch = Launch(64, "kernel", "kernel", (132, 1, 1), (256, 1, 1), 0, b"")
    cycles = {Stall(1, "short scoreboard", 0): 50.0, Stall(1, "wait", 1): 9.7}
    cycles |= {Stall(0, "wait", 0): 0.25, Stall(2, "wait", 2): 0.05}
    cycles |= {Stall(0, SELECTED, 0): 20.0, Stall(0, EXITED, 0): 99.0}
    found = explain.explain(program, [(launch, 3.0, cycles)], 4.0)
    assert (found.issuing, found.us(0.5)) == (0.25, 1.5)
    assert found.reasons == {"short scoreboard": 0.83333, "wait": 0.16667}
    worst, _, none = found.lines
    assert (worst.line, worst.share, worst.source) == (3, 0.995, "y += f(x);")
    assert (worst.through, worst.waits_for) == ([1], {2: 0.83752})
    assert worst.reasons == {"short scoreboard": 0.83752, "wait": 0.16248}
    assert (none.line, none.source) == (0, "")


@pytest.mark.slow
@needs_cuda_programs
def test_a_version_is_explained_line_by_line():
    """The prediction is that of the code without a line table."""
    version = ladder.versions()["CUSTOM_CUDA_VERSION_2"]
    found = predict(version, H200, seqlen=16, num_heads=1, lines=True)
    plain = predict(version, H200, seqlen=16, num_heads=1)
    assert dataclasses.replace(found, stalls=None) == plain
    assert sum(line.share for line in found.stalls.lines) == pytest.approx(1, abs=1e-3)
    text = version.source.split("\n")
    barriers = [line for line in found.stalls.lines if "barrier" in line.reasons]
    waited = {place for line in barriers for place in line.waits_for}
    assert any("__syncthreads" in text[place - 1] for place in waited)
    assert all(line.source == text[line.line - 1].strip() for line in found.stalls.lines[:5])
