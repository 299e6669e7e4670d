"""Explanations: stalls are at the right source lines, and what-ifs take away one cause each."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from attention_kernels import ladder
from attention_kernels.inspection import advice, explain, line_table, predict
from attention_kernels.inspection.advice import Call, Place
from attention_kernels.inspection.gpus import gpus
from attention_kernels.inspection.grid import Line
from attention_kernels.inspection.launches import Launch
from attention_kernels.inspection.multiprocessor import Work
from attention_kernels.inspection.predict import Case, LaunchModel
from attention_kernels.inspection.sass import Instruction
from attention_kernels.inspection.stalls import Watch
from tests.attention_kernels.inspection.test_predict import needs_cuda_programs

H200 = gpus()["h200"]
EXAMPLE = Path(__file__).parents[3] / "examples/my_backend/src/my_backend/v01_warp_per_row.cu"
CASE = Case(1, 1024, 12, 64, is_causal=True)

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
    found = line_table.parse(TABLE)
    assert {*found} == {"kernel", "other"}
    load = (("/a/v01.cu", 25), ("/a/v01.cu", 9), ("/b/common.cuh", 7))
    assert found["kernel"][1:3] == [load, load]
    assert found["other"] == [()]
    path = Path("/elsewhere/v01.cu")
    # A lambda's line is the kernel's own; a function's is above the kernel.
    assert line_table.own_lines(found["kernel"], path) == [(20,), (25, 9), (25, 9), (31,)]
    assert line_table.own_lines(found["other"], path) == [()]


def test_the_caller_of_a_nested_call_is_that_of_the_result_it_uses():
    source = "void f() {\n  b();\n  a();\n}\nvoid kernel() {\n  f();\n  f();\n}\n"
    chains = [(6, 2), (7, 2), (6, 3, 1), (6, 3, 1), (6,)]
    waits = [(2, 0), (3, 1), (4, 1)]
    assert line_table.mended(chains, waits, source) == [*chains[:3], (7, 3, 1), (6,)]


def model(code, requests=((0, 0, 0),), blocks=132, **changes):
    """Return a launch of blocks of 8 warps that execute the code 50 times."""
    warp = [(at, *requests[at % len(requests)]) for _ in range(50) for at in range(len(code))]
    counts = Counter(issue=8 * len(warp), misses=1, loads=8 * sum(one[1] for one in warp))
    work = Work([warp] * 8, [[0] * 8] * 8, counts)
    fewest = Counter(dict.fromkeys(range(len(code)), 1))
    line = Line(1, {0: counts}, [work], alike=blocks, fewest=fewest)
    total = defaultdict(float, {name: line.total(name) for name in counts})
    launch = Launch(64, "kernel", "kernel", (blocks, 1, 1), (256, 1, 1), 0, b"")
    found = LaunchModel("v01", H200, launch, code, 32, 0, 1, line, total, 0.0)
    return dataclasses.replace(found, **changes)


def advised(one, places):
    """Return the advice for a launch whose instructions are at lines 1, 2, ..."""
    lines = [range(1, len(one.code) + 1)]
    call = Call(CASE, [(1, one)], lines, [Place(0, *place) for place in places])
    prediction = predict.time_of(one)
    return prediction.time_us, {found.cause: found for found in advice.advise(call, prediction)}


LOAD = Instruction("LDS", ("R2", "[R4]"), writes=0)
USE = Instruction("FADD", ("R3", "R2", "R2"), waits=(0,))


def test_without_bank_conflicts_a_load_needs_fewer_wavefronts():
    before, found = advised(model([LOAD], [(8, 0, 0)]), [(0, "MIO throttle", 0, 1, 1, 1.0)])
    one = found["conflicts"]
    assert (one.line, one.share, one.reason) == (1, 1.0, "MIO throttle")
    assert "8-way" in one.change
    launch = H200.launch_us
    assert one.time_us - launch == pytest.approx((before - launch) / 8, rel=0.1)


def test_bank_conflicts_of_several_lines_are_taken_away_together():
    one = model([LOAD, dataclasses.replace(LOAD, name="LDS.64")], [(8, 0, 0), (4, 0, 0)])
    call = Call(CASE, [(1, one)], [[1, 2]], [Place(0, 0, "MIO throttle", 0, 1, 1, 1.0)])
    found = advice.advise(call, before := predict.time_of(one))
    conflicts = {
        one.line: one.time_us - H200.launch_us for one in found if one.cause == "conflicts"
    }
    whole = before.time_us - H200.launch_us
    assert conflicts == {
        line: pytest.approx(whole * share / 12, rel=0.12)
        for line, share in ((0, 2), (1, 5), (2, 9))
    }


SCATTERED = Instruction("LDG.E", ("R2", "[R4]"), writes=0)


def test_a_load_that_does_not_coalesce_is_told_what_it_would_gain():
    one = model([SCATTERED], [(0, 32, 0)])
    before, found = advised(one, [(0, "LG throttle", 0, 1, 1, 0.8)])
    assert "(a request touches 32 lines of 128 bytes, 1 would do)" in found["sectors"].change
    assert (found["sectors"].line, found["sectors"].share) == (1, 0.8)
    launch = H200.launch_us
    assert found["sectors"].time_us - launch == pytest.approx((before - launch) / 32, rel=0.4)
    wide = dataclasses.replace(SCATTERED, name="LDG.E.128")
    assert "sectors" not in advised(model([wide], [(0, 4, 0)]), [])[1]


def test_a_scattered_store_also_sends_more_sectors_to_l2():
    (store,) = (
        advice.changed(
            one := model([dataclasses.replace(SCATTERED, name="STG.E")], [(0, 32, 32)]),
            "sectors",
            frozenset([0]),
        )
        .line.works[0]
        .warps[0][:1]
    )
    assert store == (0, 0, 1, 4)
    load = dataclasses.replace(one, code=[SCATTERED])
    (kept,) = advice.changed(load, "sectors", frozenset([0])).line.works[0].warps[0][:1]
    assert kept == (0, 0, 1, 32)  # other loads use the rest of the sectors


def test_with_early_results_nothing_waits_for_them():
    places = [(1, "short scoreboard", 0, 2, 1, 1.0)]
    before, found = advised(model([LOAD, USE], [(1, 0, 0), (0, 0, 0)]), places)
    assert found["results"].line == 1
    assert found["results"].time_us < 0.8 * before
    assert "conflicts" not in found


def test_without_a_barrier_fast_warps_run_ahead():
    code = [Instruction("BAR.SYNC", ("0x0",)), Instruction("FADD", ("R1", "R2"), stall=4)]
    before, found = advised(model(code), [(1, "barrier", 0, 2, 1, 1.0)])
    assert found["barrier"].line == 1
    assert found["barrier"].time_us < 0.7 * before


def test_tensor_cores_at_twice_the_rate_take_half_the_time():
    code = [Instruction("HMMA.1688.F32.TF32", ("R1", "R2", "R3", "R1"))]
    one = model(code)
    one.total["tensor"] = one.total["issue"]
    before, found = advised(one, [(0, "math pipe throttle", 0, 1, 1, 1.0)])
    assert found["tensor cores"].time_us - 1.3 == pytest.approx((before - 1.3) / 2, rel=0.05)


def test_one_more_block_has_a_price_and_needs_a_grid_with_enough_of_them():
    code = [LOAD, USE]
    places = [(1, "short scoreboard", 0, 2, 1, 1.0)]
    big = {"registers": 200, "shared": 100 * 1024}
    before, found = advised(model(code, [(1, 0, 0), (0, 0, 0)], 264, **big), places)
    one = found["blocks"]
    assert one.change == "with 2 blocks per multiprocessor, not 1"
    assert one.price == "at most 128 registers per thread, not 200"
    assert one.time_us < before
    more = model(code, [(1, 0, 0), (0, 0, 0)], 264, fits=2, **big)
    price = advice.price_of(more, 3)
    assert price == (
        "at most 80 registers per thread, not 200 and 76800 bytes of shared memory per block, "
        "not 102400"
    )
    assert "blocks" not in advised(model(code, [(1, 0, 0), (0, 0, 0)], 132, **big), places)[1]


def test_multiprocessors_that_idle_at_the_end_are_named():
    before, found = advised(model([USE], blocks=133), [(0, "wait", 0, 1, 1, 1.0)])
    launch = H200.launch_us
    assert found["uneven"].time_us - launch == pytest.approx((before - launch) / 2, rel=0.02)


def test_the_ends_of_blocks_are_observed_as_often_as_their_loops(monkeypatch):
    """The time comes from a part of the instructions, the stalls from all of them."""
    monkeypatch.setattr(predict, "_MAX_TIMED", 1000)
    one = model([USE, LOAD], blocks=264, fits=2)
    (work,) = one.line.works
    halves = dataclasses.replace(work, parts=[[0] * 8] * 4 + [[50] * 8] * 4)
    one = dataclasses.replace(one, line=dataclasses.replace(one.line, works=[halves]))
    watch = Watch()
    predict.time_of(one, watch)
    issued = {stall.place: n for stall, n in watch.cycles.items() if stall.reason == "selected"}
    assert issued == {0: 2 * 8 * 50, 1: 2 * 8 * 50}


@pytest.mark.slow
@needs_cuda_programs
def test_a_version_is_explained_line_by_line():
    """The prediction is that of the code without a line table."""
    version = ladder.versions()["CUSTOM_CUDA_VERSION_2"]
    case = CASE._replace(seqlen=16, num_heads=1)
    found = explain.explain(version, H200, case)
    (plain,) = predict.predict(version, H200, [case])
    assert found.prediction == plain
    assert sum(found.reasons.values()) == pytest.approx(1)
    assert sum(line.share for line in found.lines) == pytest.approx(1)
    for line in found.lines:
        assert sum(line.reasons.values()) == pytest.approx(line.share)
        assert sum(one.share for one in line.instructions) == pytest.approx(line.share)
    text = version.source.split("\n")
    barriers = [line for line in found.lines if "barrier" in line.reasons]
    assert barriers
    waited = {place for line in barriers for place in line.waits_for}
    assert any("__syncthreads" in text[place - 1] for place in waited)
    assert [*found.advice] == sorted(found.advice, key=lambda one: one.time_us)


@pytest.mark.slow
@needs_cuda_programs
def test_the_line_that_does_not_coalesce_is_the_first_to_mend():
    """Each lane of the example reads another row of K."""
    version = ladder.resolve(str(EXAMPLE)).version
    found = explain.explain(version, H200, CASE._replace(seqlen=256, num_heads=1))
    (one,) = (one for one in found.advice if one.cause == "sectors")
    assert "gK[n * k_strides.seqlen + d]" in explain.source_of(found.text, one.line)
    assert "(a request touches 2" in one.change
    assert one.share > 0.5
    assert one is next(other for other in found.advice if other.line)
