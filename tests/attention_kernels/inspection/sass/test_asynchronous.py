"""Hopper's asynchronous instructions are executed and timed; the code lies in `sass/`."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections import defaultdict
from pathlib import Path

import pytest

from attention_kernels.inspection.resources import HOPPER_PARAMETERS
from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import SassError
from attention_kernels.inspection.sass.execute import work
from attention_kernels.inspection.sass.execute.asynchronous import BANK_ADDRESS
from attention_kernels.inspection.sass.execute.instructions import run
from attention_kernels.inspection.sass.execute.state import Blocks
from attention_kernels.inspection.sass.time import Multiprocessor
from tests.attention_kernels.inspection.sass.common import H200

TEXT = (Path(__file__).parent / "warpgroups_sm_90a.sass").read_text("utf-8")
TILES, WARPS = 5, 12
TENSOR, ROW, OUT = 1 << 40, 2 << 40, 4 << 40
PRODUCT_CYCLES = 32  # 64 x 64 x 16 at 4,096 FLOP per cycle


def executed(text=TEXT, *, rows=1 << 20, tensor=b"") -> tuple[Blocks, work.Work]:
    """Execute warpgroups.cu on a tensor of `rows` rows of 128 bytes, or with a tensor map."""
    sizes, strides = (64, 1, rows, 1, 1), (0, 128, 128, 128 * rows, 0)
    words = (TENSOR, *sizes, *strides, 64, 1, 64, 1, 1, 2, 3)
    tensor = tensor or struct.pack("<Q5q5q5i2i", *words).ljust(128, b"\0")
    given = tensor + struct.pack("<QQi", ROW, OUT, TILES)
    places = BANK_ADDRESS, BANK_ADDRESS + HOPPER_PARAMETERS
    constants = struct.pack("<I188xQ208xQ224x", 32 * WARPS, *places) + given
    code = decode.parse(text)["kernel"]
    blocks = Blocks(code, constants, (32 * WARPS, 1, 1), [(0, 0, 0)])
    run(blocks, 100_000)
    (counts,) = work.counts_of(blocks)
    return blocks, work.work_of(blocks, 0, counts)


def fetched(blocks: Blocks, terabyte: int) -> int:
    return sum(sector >> 35 == terabyte for sector in blocks.seen[0])


@pytest.fixture(scope="module")
def done() -> tuple[Blocks, work.Work]:
    return executed()


def test_each_copy_product_and_wait_is_executed_once(done):
    blocks, one = done

    def names(warp: int) -> list[str]:
        return [blocks.code[issue.index].base for issue in blocks.issued if issue.warps[warp]]

    assert [names(warp).count("HGMMA") for warp in range(WARPS)] == [0] * 4 + [20] * 8
    assert one.counts["products"] == TILES * 4 * 2 * 2 * 64 * 64 * 16
    # A and B of a product, 64 x 16 elements each, are 16 wavefronts each.
    assert one.counts["operands"] == TILES * 4 * 2 * 32
    assert names(0).count("UTMALDG") == names(0).count("UBLKCP") == TILES
    assert one.counts["tiles"] == TILES * (64 + 2)
    # The other input is one row, which is copied again and again.
    assert (fetched(blocks, 1), one.counts["inputs"]) == (TILES * 64 * 4, TILES * (64 * 4 + 8))
    # A thread that has to wait does not test again and again: it tests and arrives.
    assert names(4).count("SYNCS") == 2 * TILES
    assert names(4).count("NANOSLEEP") == 0


def test_hoppers_tensor_map_is_that_of_the_emulator():
    tensor, *_ = decode.pack(["bf16[100x1x64/64x1x64]"], [(0, 128)], "f")
    blocks, one = executed(tensor=tensor)
    assert fetched(blocks, 8) == 100 * 4
    assert one.counts["tiles"] == TILES * (64 + 2)


def test_a_map_that_the_driver_has_encoded_is_read():
    words = [0xE2000000, 0x7FA2, 0x46310, 0x200] + [0] * 4 + [0xFFF] * 2 + [0] * 3
    words += [0x3F000000, 0x7F, 0, 0x4000, 0, 0x400]  # 4096 x 4096 of float16, recorded on an H200
    found = decode.read_map(struct.pack("<32I", *words, *[0] * 13))
    assert decode.read_map(struct.pack("<16I", *words[:16]) * 2) == found  # another follows at once
    tensor, element, sizes, strides, box = found
    assert (tensor, element, strides[:2]) == (0x7FA2E2000000, 2, [2, 8192])
    assert (sizes, box) == ([4096, 4096, 1, 1, 1], [64, 128, 1, 1, 1])


def test_a_block_of_a_cluster_waits_in_vain_for_others_only_here():
    text = re.sub(r"SYNCS\.ARRIVE\.TRANS64\.A1T0 [^;]*", "UCGABAR_ARV ", TEXT)
    text = text.replace("/*0170*/ NOP ", "/*0170*/ STAS [R8.64+0x10], R3 ")
    blocks, one = executed(text)
    assert (blocks.waits, one.counts["tiles"]) == (True, TILES * (64 + 2))


def test_a_copy_to_two_blocks_of_a_cluster_comes_from_both():
    """As in cuBLAS, whose code finds its tensor maps from the bank's beginning on."""
    tensor, *_ = decode.pack(["bf16[9999x1x64/32x1x64]"], [(0, 128)], "f")
    text = TEXT.replace("4D [UR8], [UR16] ", "4D.MULTICAST [UR8], [UR16], 0x30000 ")
    text = text.replace("c[0x0][0x198]", "c[0x0][0xc0]").replace("UR14, 0x70,", "UR14, 0x280,")
    blocks, one = executed(text, tensor=tensor)
    assert (fetched(blocks, 8), one.counts["tiles"]) == (TILES * 32 * 4, TILES * (64 + 2))


def test_rows_out_of_bounds_are_not_fetched():
    blocks, one = executed(rows=100)
    assert fetched(blocks, 1) == 100 * 4
    assert one.counts["tiles"] == TILES * (64 + 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Nobody gives the slots back.
        (re.sub(r"SYNCS\.ARRIVE\.TRANS64\.A1T0 [^;]*", "NOP ", TEXT), "wait for each other"),
        (TEXT.replace("c[0x0][0x198]", "c[0x0][0x190]"), "a tensor map is neither a parameter"),
    ],
)
def test_code_that_cannot_be_executed_is_refused(text, words):
    with pytest.raises(SassError, match=words):
        executed(text)


def test_a_block_takes_the_time_of_the_slowest_unit(done):
    """The tensor cores, the operands that they read from shared memory, or memory."""
    blocks, one = done

    def cycles(rate: float = 64.0, **changes: int) -> float:
        gpu = dataclasses.replace(H200, **changes)
        found, issued = Multiprocessor(
            gpu, blocks.code, dict.fromkeys(("global", "tile"), (1000.0, rate))
        ).run([one])
        assert issued == [one.counts["issue"]]
        return found

    slower = cycles(warpgroup_flop=32) - cycles(warpgroup_flop=64)
    assert slower == pytest.approx(8 * TILES * PRODUCT_CYCLES * 64, rel=0.01)
    assert cycles(warpgroup_flop=1 << 20) == cycles()
    copied = TILES * (64 * 128 + 256)
    assert 1000 + copied < cycles(rate=1.0) < 1.1 * (1000 + copied)


def test_waits_have_the_profilers_reasons(done):
    blocks, one = done
    stalls = defaultdict(float)
    Multiprocessor(H200, blocks.code, dict.fromkeys(("global", "tile"), (1000.0, 64.0))).run(
        [one], stalls=stalls
    )
    causes = {(stall.reason, blocks.code[stall.cause].base) for stall in stalls}
    assert {"long scoreboard", "gmma", "barrier"} <= {reason for reason, _ in causes}
    assert causes & {("long scoreboard", "UTMALDG"), ("long scoreboard", "UBLKCP")}
