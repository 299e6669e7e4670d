from __future__ import annotations

import pytest

pytest.importorskip("pygments")

from attention_kernels.inspection.accesses import Access, MemoryRequest
from gpt2_infer.bench.show.page import source


def request(size: int, *offsets: int | None) -> Access:
    at = MemoryRequest(0, 0, 1, "dynamic", (*offsets, *[None] * (32 - len(offsets))))
    return Access((1,), "x", "shared", "load", size, 1, 1, 0, 1, 0, 0, at)


def test_runs_of_lanes_say_every_address():
    for offsets in (
        [128 * lane for lane in range(32)],
        [4 * (lane % 8) + 256 * (lane // 8) for lane in range(32)],
        [None, 0, 0, None, 8, 4, 0, None],
        [0, 100, 4, 4],
    ):
        said = dict[int, int]()
        for first, last, at, step in source.runs(offsets):
            for lane in range(first, last + 1):
                said[lane] = at + (lane - first) * step
        assert said == {lane: at for lane, at in enumerate(offsets) if at is not None}
    assert source.runs([128 * lane for lane in range(32)]) == [(0, 31, 0, 128)]


def test_a_bank_is_busy_where_lanes_want_different_words_of_it():
    assert source.busy_banks(request(4, 0, 4, 8, 8)) == set()
    assert source.busy_banks(request(4, 0, 128, 4, 0)) == {(0, 0), (1, 0), (3, 0)}
    # 8 lanes of 16 bytes are served together: lane 8 is not in the way of lane 0.
    assert source.busy_banks(request(16, *(16 * lane for lane in range(9)))) == set()
    assert source.busy_banks(request(16, 0, 128)) == {
        (lane, b) for lane in (0, 1) for b in range(4)
    }
