from __future__ import annotations

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from attention_kernels.inspection.accesses import Access, MemoryRequest
from gpt2_infer.bench.show.page.lanes import busy_banks


def request(size: int, *offsets: int) -> Access:
    at = MemoryRequest(0, 0, 1, "dynamic", (*offsets, *[None] * (32 - len(offsets))))
    return Access((1,), "x", "shared", "load", size, 1, 1, 0, 1, 0, 0, at)


def test_a_bank_is_busy_where_lanes_want_different_words_of_it():
    assert busy_banks(request(4, 0, 4, 8, 8)) == set()
    assert busy_banks(request(4, 0, 128, 4, 0)) == {(0, 0), (1, 0), (3, 0)}
    # 8 lanes of 16 bytes are served together: lane 8 is not in the way of lane 0.
    assert busy_banks(request(16, *(16 * lane for lane in range(9)))) == set()
    assert busy_banks(request(16, 0, 128)) == {(lane, b) for lane in (0, 1) for b in range(4)}
