"""Hopper's asynchronous instructions are executed and timed; the code lies in `sass/`."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import pytest

from attention_kernels.inspection.sass import decode, execute, multiprocessor, stalls
from attention_kernels.inspection.sass.asynchronous import with_bank_pointer
from attention_kernels.inspection.sass.decode import SassError
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.stalls import Watch
from attention_kernels.inspection.sass.state import Blocks

H200 = gpus()["h200"]
TEXT = (Path(__file__).parent / "warpgroups_sm_90a.sass").read_text("utf-8")
TILES, WARPS = 5, 12
TENSOR, ROW, OUT = 1 << 40, 2 << 40, 4 << 40
PRODUCT_CYCLES = 32  # 64 x 64 x 16 at 4,096 FLOP per cycle


def executed(text: str = TEXT, *, rows: int = 1 << 20) -> Blocks:
    """Execute warpgroups.cu on a tensor of `rows` rows of 128 bytes."""
    sizes, strides, box = (64, 1, rows, 1), (0, 128, 128, 128 * rows), (64, 1, 64, 1)
    tensor = struct.pack("<Q4q4q4i2i", TENSOR, *sizes, *strides, *box, 2, 3).ljust(128, b"\0")
    given = tensor + struct.pack("<QQi", ROW, OUT, TILES)
    constants = struct.pack("<III", 32 * WARPS, 1, 1).ljust(0x280, b"\0") + given
    blocks = Blocks(
        decode.parse(text)["kernel"], with_bank_pointer(constants), (32 * WARPS, 1, 1), [(0, 0, 0)]
    )
    execute.run(blocks, 100_000)
    return blocks


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return executed()


def work_of(blocks: Blocks) -> multiprocessor.Work:
    (counts,) = multiprocessor.counts_of(blocks)
    return multiprocessor.work_of(blocks, 0, counts)


def names(blocks: Blocks, warp: int) -> list[str]:
    return [blocks.code[one.index].base for one in blocks.issued if one.warps[warp]]


def test_each_tile_is_copied_and_multiplied_once(blocks):
    work = work_of(blocks)
    assert [names(blocks, warp).count("HGMMA") for warp in range(WARPS)] == [0] * 4 + [20] * 8
    assert work.counts["products"] == TILES * 4 * 2 * 2 * 64 * 64 * 16
    # A and B of a product, 64 x 16 elements each, are 16 wavefronts each.
    assert work.counts["operands"] == TILES * 4 * 2 * 32
    assert names(blocks, 0).count("UTMALDG") == names(blocks, 0).count("UBLKCP") == TILES
    assert work.counts["tiles"] == TILES * (64 + 2)
    assert (blocks.fetched[1], blocks.fetched[2]) == (TILES * 64 * 4, TILES * 8)


def test_each_wait_is_executed_once(blocks):
    """A thread that has to wait does not test again and again."""
    tests = [name for name in names(blocks, 4) if name == "SYNCS"]
    assert len(tests) == 2 * TILES  # it tests and arrives
    assert names(blocks, 4).count("NANOSLEEP") == 0


def test_each_warpgroup_waits_for_its_own_turn(blocks):
    """The number of its barrier comes from a shuffle."""
    waits = {
        (warp, event[2])
        for one in blocks.issued
        for warp, event in one.awaits.items()
        if event[0] == "numbered"
    }
    assert waits == {(warp, 1 + (warp >= 8)) for warp in range(4, 12)}


def test_rows_out_of_bounds_are_not_fetched():
    found = executed(rows=100)
    assert found.fetched[1] == 100 * 4
    assert work_of(found).counts["tiles"] == TILES * (64 + 2)


def test_warps_that_wait_for_each_other_are_found():
    """Nobody gives the slots back."""
    text = re.sub(r"SYNCS\.ARRIVE\.TRANS64\.A1T0 [^;]*", "NOP ", TEXT)
    with pytest.raises(SassError, match="wait for each other"):
        executed(text)


def test_an_unknown_tensor_map_is_refused():
    with pytest.raises(SassError, match="not a parameter"):
        executed(TEXT.replace("c[0x0][0x198]", "c[0x0][0x190]"))


def cycles(work: multiprocessor.Work, blocks: Blocks, watch: Watch | None = None, **changes):
    gpu = dataclasses.replace(H200, **changes)
    found, issued = multiprocessor.cycles_of(gpu, blocks.code, [work], 1000.0, watch=watch)
    assert issued == [work.instructions]
    return found


def test_products_take_the_tensor_cores_time(blocks):
    """A slower tensor core is what the block waits for."""
    work = work_of(blocks)
    slow = cycles(work, blocks, warpgroup_flop=64)
    slower = cycles(work, blocks, warpgroup_flop=32)
    assert slower - slow == pytest.approx(8 * TILES * PRODUCT_CYCLES * 64, rel=0.01)


def test_a_product_takes_at_least_the_time_of_its_operands(blocks):
    work = work_of(blocks)
    assert cycles(work, blocks, warpgroup_flop=1 << 20) == cycles(work, blocks)


def test_tiles_arrive_at_the_bandwidth_of_l2(blocks):
    work = work_of(blocks)
    gap = 1000.0
    slow = cycles(work, blocks, l2_bytes_per_cycle=132)
    assert slow > gap + TILES * (64 * 128 + 256)
    assert slow == pytest.approx(gap + TILES * (64 * 128 + 256), rel=0.1)


def test_waits_have_the_profilers_reasons(blocks):
    watch = Watch()
    cycles(work_of(blocks), blocks, watch)
    found = {one.reason for one in watch.cycles}
    assert {stalls.LONG, stalls.GMMA, stalls.BARRIER} <= found
    tiles = {blocks.code[one.cause].base for one in watch.cycles if one.reason == stalls.LONG}
    assert tiles & {"UTMALDG", "UBLKCP"}
