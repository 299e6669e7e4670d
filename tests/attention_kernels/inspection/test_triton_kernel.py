"""Triton's backends are compiled without a GPU, and the fastest of their tiles is predicted."""

from __future__ import annotations

import pytest

from attention_kernels.inspection import multiprocessor
from attention_kernels.inspection.predict import Case
from tests.attention_kernels.inspection.test_predict import needs_cuda_programs

pytest.importorskip("triton")
from attention_kernels.backends.triton import flash_attention
from attention_kernels.inspection import triton_kernel

H200 = multiprocessor.gpus()["h200"]


@pytest.mark.slow
@needs_cuda_programs
def test_the_tile_with_the_shortest_prediction_counts(monkeypatch, tmp_path):
    # Another checkout's cubin would do, but its line table names files there.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    every = flash_attention.candidates

    def two(q, **options):
        return [c for c in every(q, **options) if c.tile.kwargs["block_n"] in (16, 32)][-2:]

    monkeypatch.setattr(flash_attention, "candidates", two)
    case = Case(1, 64, 1, 64, is_causal=True)
    explained = triton_kernel.explain_backend("TRITON_FLASH_ATTENTION", H200, case, "float32")
    found = explained.prediction
    assert found.choice == "block_m=16 block_n=16 num_warps=4 num_stages=2"
    assert (found.version, found.seqlen, found.assumed) == ("TRITON_FLASH_ATTENTION", 64, ())
    # Every product of both is a fused multiply-add: of 64 x 64 scores, 10 of 16 tiles are visible.
    products = 2 * 10 * 16 * 16 * 64
    fma = found.needs_us["float32 arithmetic"] * 1e3 * H200.clock_ghz * H200.multiprocessors
    assert products < fma * H200.fp32_lanes < 1.5 * products
    assert any("tl.dot(" in line.source for line in explained.lines)
