"""Predictions: blocks stand for the right others, and the parts add up."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from attention_kernels import UnsupportedError, ladder, list_backends
from attention_kernels.inspection.resources import Launch
from attention_kernels.inspection.sass import predict
from attention_kernels.inspection.sass.decode import Instruction, Program
from attention_kernels.inspection.sass.execute.work import Line, Work, axes_of, line_of
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.time import finish, multiprocessors
from tests.attention_kernels.inspection.sass.common import (
    CODE,
    H200,
    instructions,
    needs_cuda_programs,
)
from tests.conftest import ROOT

FIRST = "CUSTOM_CUDA_VERSION_1"
predicted = functools.partial(predict.predict, gpu=H200, seqlen=128)


def program_of(code, *, heads_first=False):
    kernels = {"kernel": instructions(code)}
    return Program(ROOT / "v01.cu", ROOT, H200, kernels, {}, heads_first)


def launch_of(grid, **more):
    return Launch(64, "kernel", "kernel", grid, (64, 1, 1), 0, b"", **more)


@pytest.mark.parametrize(("blocks", "waves"), [(132, 1), (133, 2), (265, 3)])
def test_a_last_wave_takes_as_long_as_the_others(blocks, waves):
    counts = Counter(issue=40)
    line = Line(1, {0: counts}, [Work([], [], counts)], alike=blocks)
    end, equal = finish(line, H200, 2.0, 2.0, 1, 0.0)
    assert end == pytest.approx(waves * 40 * 2.0)
    assert equal == pytest.approx(blocks / 132 * 40 * 2.0)


def test_multiprocessors_that_get_room_together_take_turns():
    line = Line(1, {0: Counter(issue=40)}, [], alike=5 * 132)
    end, _ = finish(line, H200, 1.0, 2.0, 4, 0.0)
    assert end == pytest.approx(40 * 2.0 + 40)  # then each has one block more


def test_blocks_that_run_at_once_wait_at_the_same_time():
    line = Line(1, {0: Counter(issue=40, misses=1)}, [], alike=2 * 132)
    assert finish(line, H200, 1.0, 2.0, 2, 30.0)[0] == pytest.approx(40 * 2.0 + 30)


def test_blocks_wait_for_memory_unless_others_have_lately_read_the_same():
    """Two fit on each of 132 multiprocessors; a tenth of what is read is not in L2 at first."""

    def cold(heads, rows, sectors):
        counts = {0: Counter(issue=1, misses=sectors)}
        _, *both = multiprocessors(H200, [], Line(rows, counts, [], heads), 2, 0.1)
        return [(one.inputs["global"][0] - H200.l2_latency) / 400 for one in both]

    assert cold(48, 11, 20_000) == pytest.approx([0.5, 0.5])  # half of them start together
    assert cold(48, 11, 30_000) == pytest.approx([1.0, 1.0])  # all heads have 46 MB
    assert cold(4, 50, 20_000) == pytest.approx([1.0, 0.1])  # 64 have one block, which is ahead


def test_blocks_that_are_alike_in_pairs_are_counted_exactly():
    """Pairs of blocks are alike with 32 queries per block and 64 keys per tile."""
    issued = [100 * (1 + at // 2) for at in range(32)]
    line = Line(32, {at: Counter(issue=issued[at]) for at in (0, 1, 6, 7)}, [])
    assert [line.value(at, "issue") for at in range(32)] == issued
    code = CODE.replace("S2R R0, SR_TID.X", "S2R R5, SR_CTAID.Y")
    code = code.replace("@P0 EXIT", "    SHF.R.U32.HI R5, RZ, 0x1, R5")
    code = code.replace("MOV R2, RZ", "MOV R2, 0xffffffff")
    code = code.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64+0x100]")
    code = code.replace("c[0x0][0x18]", "R5")
    for grid in ((4, 32, 1), (2, 32, 2)):  # the latter has groups of heads
        line = line_of(program_of(code, heads_first=True), launch_of(grid))
        assert (line.length, line.totals()["global"]) == (32, 2 * 4 * sum(issued) / 100)


# Blocks with z > 0 end at once; the others load once for each index along y.
IDLE = CODE.replace("SR_TID.X", "SR_CTAID.Z").replace("0x1f", "0x0")
IDLE = IDLE.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64]")
IDLE = IDLE.replace("c[0x0][0x18]", "c[0x0][0x10]")  # gridDim.y


@pytest.mark.parametrize(("address", "inputs"), [("0x100", 1), ("0x500", 0)])
def test_blocks_along_every_axis_are_counted(address, inputs):
    """They load from q or from scratch."""
    code = IDLE.replace("MOV R2, RZ", f"MOV R3, {address}")
    line = line_of(program_of(code, heads_first=True), launch_of((2, 3, 4)))
    warps = 2 * 3 * 2
    assert line.totals()["global"] == 3 * warps
    assert line.totals()["issue"] == (6 + 3 * 4) * warps + 3 * 3 * warps
    assert line.totals()["inputs"] == line.totals()["misses"] * inputs


def test_few_blocks_with_work_are_found_among_many_without():
    """The first blocks that are executed have none."""
    line = line_of(program_of(IDLE, heads_first=True), launch_of((1, 4, 70)))
    # Both warps of a block load four times, and every second block is run.
    assert 4 * 2 * 4 <= line.totals()["global"] <= 5 * 2 * 4
    assert line.works


@pytest.mark.parametrize(
    ("axis", "grid", "axes", "alike"),
    [("X", (16, 3, 2), [0], 1), ("Y", (3, 16, 2), [1], 3), ("Z", (16, 3, 12), [2], 48)],
)
def test_of_other_kernels_the_axes_along_which_blocks_differ_are_found(axis, grid, axes, alike):
    """A block with index i along the axis runs max(i, 1) iterations."""
    code = CODE.replace("IMAD.SHL.U32 R1, R0, 0x80, RZ", f"S2R R5, SR_CTAID.{axis}")
    code = code.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64+0x100]")
    code = code.replace("c[0x0][0x18]", "R5").replace("\nEXIT", "\nUCGABAR_ARV\nEXIT")
    program, launch = program_of(code), launch_of(grid)
    # All load the same word; the first 96 or so run on 132 multiprocessors at once.
    assert axes_of(program, launch)[::2] == (axes, pytest.approx(1 / 96))
    assert axes_of(program, launch_of(grid, cluster=(2, 1, 1)))[2] == 1  # of clusters it is unknown
    line, length, blocks = line_of(program, launch), grid[axes[0]], grid[0] * grid[1] * grid[2]
    assert line.totals()["global"] == sum(max(i, 1) for i in range(length)) * blocks / length
    assert (line.length, line.alike, line.alike * line.repeats * length) == (length, alike, blocks)


def test_blocks_that_differ_along_one_axis_only_where_another_begins_are_counted():
    """As with a mask, a block works only if its split of the keys, y, is not beyond its row, x."""
    code = "S2R R5, SR_CTAID.X\n" + CODE.replace("R0, 0x1f", "R0, R5").replace("0x50", "0x60")
    code = code.replace("SR_TID.X", "SR_CTAID.Y").replace("[R1+UR4+0x10]", "[R2.64]")
    program, grid = program_of(code.replace("LDS", "LDG").replace("[0x18]", "[0x10]")), (16, 4, 3)
    assert axes_of(program, launch_of(grid))[:2] == ([0, 1], False)
    busy = sum(x >= y for x in range(16) for y in range(4))
    assert line_of(program, launch_of(grid)).totals()["global"] == busy * 3 * 2 * 4


def l2_bytes(found):
    return found.needs_us["L2"] * H200.l2_bytes_per_cycle * H200.clock_ghz * 1e3


@needs_cuda_programs
@pytest.mark.slow
def test_wavefronts_are_the_profilers_and_the_parts_add_up():
    """Counts are of nvcc's code, which keeps some of the source's loads in registers."""
    list_backends()
    file = ROOT / "results" / "2026-11-22_h200_profile-fp32-128.json"
    rows = json.loads(file.read_text("utf-8"))["rows"]
    mine = (row for row in rows if row["contender"] == "CUSTOM_CUDA_VERSION_2")
    metrics = {row["metric"]: row["samples"][0] for row in mine}
    found = predicted(ladder.versions()["CUSTOM_CUDA_VERSION_2"], num_heads=1)
    assert found.load_wavefronts == metrics["shared_load_wavefronts"]
    assert found.store_wavefronts == metrics["shared_store_wavefronts"]
    # From L2: Q once, and K and V once by each of three blocks of 48 rows.
    rows = 128 + 2 * (48 + 96 + 128)
    assert l2_bytes(found) == pytest.approx(rows * 64 * 4 + metrics["global_store_bytes"])
    parts = found.waiting_us + found.uneven_us + found.launch_us
    assert found.time_us == pytest.approx(parts + max(found.needs_us.values()))
    # Block 0 of v17's second kernel, which starts early, joins nothing.
    early = predicted(ladder.versions()["CUSTOM_CUDA_VERSION_17"], seqlen=192)
    assert (early.launches, early.launch_us) == (2, H200.launch_us + H200.early_launch_us)


@pytest.mark.slow
@needs_cuda_programs
def test_a_hopper_version_needs_its_products_and_its_tiles():
    """The second block multiplies 192 queries, of which 64 exist and are copied."""
    list_backends()
    version = ladder.versions()["HOPPER_VERSION_5"]
    found = predicted(version, seqlen=256, num_heads=2, is_causal=False)
    products = 2 * 2 * (2 * 192 * 256 * 64) * 2  # heads, blocks, FLOP of a product, products
    clock_ghz = products / 4096 / 4 / found.needs_us["tensor cores"] / 1e3
    assert clock_ghz == pytest.approx(1.8, rel=0.01)  # as soon as there are products
    # Q once, K and V in each of two blocks, and O in stores of half sectors.
    size = l2_bytes(found) * clock_ghz / H200.clock_ghz
    assert size == pytest.approx(2 * 256 * 64 * 2 * (1 + 2 * 2 + 2), rel=0.01)


@pytest.mark.slow
@needs_cuda_programs
def test_a_decode_kernel_reads_the_whole_cache_of_every_row():
    list_backends()
    found = predicted(ladder.versions("decode")["DECODE_SPLIT_KV_VERSION_2"], batch=2, seqlen=512)
    cache, row = 2 * 2 * 512 * 12 * 64 * 4, 2 * 12 * 64 * 4
    assert cache + 2 * row <= l2_bytes(found) <= 1.01 * cache + 2 * row
    assert found.needs_us["memory"] == pytest.approx((cache + 2 * row) / H200.memory_gb_s / 1e3)


@pytest.mark.parametrize(
    ("name", "gpu", "shape", "words"),
    [
        (
            FIRST,
            "t4",
            {"head_dim": 48, "seqlen": 0},
            "head_dim 48 (it takes 32, 64, 128); seqlen 0 (1 or more)",
        ),
        ("HOPPER_VERSION_2", "a100", {"head_dim": 32}, "it needs sm_90a, and A100 SXM is sm_80"),
        (FIRST, "h200", {"seqlen": 10**12}, "1000000000000 (1048560 or less)"),
        (FIRST, "h200", {"batch": 10**11}, "batch * num_heads 1200000000000 (2147483647 or less)"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_every_reason(name, gpu, shape, words):
    list_backends()
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        predict.predict(ladder.versions()[name], gpus()[gpu], **shape)


def test_a_grid_with_too_many_blocks_is_refused():
    with pytest.raises(UnsupportedError, match="a grid of 2097152 blocks"):
        line_of(program_of(CODE), launch_of((2**20, 2, 1)))


def test_a_launch_starts_early_only_where_its_blocks_have_room():
    """66 of 132 multiprocessors have one block of the first launch, the others two."""
    code = {"a": [Instruction("PREEXIT", ())], "b": [Instruction("ACQBULK", ())]}
    program = Program(Path(), Path(), gpus()["h200"], code, dict.fromkeys(code, (32, 0)))
    shape = (198, 1, 1), (256, 1, 1)
    launches = [Launch(0, x, x, *shape, size << 10, b"") for x, size in (("a", 48), ("b", 150))]
    assert len(predict._released(program, launches, 1e4)) == 66
    assert predict._released(program, launches[::-1], 1e4) is None
