"""The Triton kernels: their tiles, threads, refusals, and what a graph captures."""

from __future__ import annotations

import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.judge.suite import Case, run_case
from tests.conftest import usable

NAMES = ["TRITON_FLASH_ATTENTION", "TRITON_FLASH_ATTENTION_TRANSPOSED_K"]
MODULE = "attention_kernels.backends.triton.flash_attention"


@pytest.fixture
def module(tmp_path, monkeypatch) -> ModuleType:
    """Return the kernel's module; Triton compiles into a cache of this test's own."""
    pytest.importorskip("triton", reason="needs the Python package triton", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return importlib.import_module(MODULE)


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def test_every_shape_of_a_tile(name, module, monkeypatch):
    """Test the masks with tiles of keys that are narrower and wider than those of queries."""
    spec = usable(name, "cpu")
    for block_m, block_n in ((16, 16), (16, 128), (64, 32), (32, 64), (128, 16), (128, 128)):
        monkeypatch.setattr(module, "INTERPRETED_TILE", {"block_m": block_m, "block_n": block_n})
        for seqlen, is_causal in itertools.product((1, 64, 100), (True, False)):
            case = Case(seqlen, 32, num_heads=1, is_causal=is_causal)
            assert run_case(spec, case, "cpu").passed, (case, block_m, block_n)


def test_two_threads_may_call_the_kernel_at_once():
    spec = usable(NAMES[0], "cpu")
    inputs = [Case(60, 32, seed=seed).inputs("cpu") for seed in range(2)]
    expected = [spec.attention(*qkv) for qkv in inputs]
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda qkv: spec.attention(*qkv), inputs * 5))
    assert all(torch.equal(o, right) for o, right in zip(outputs, expected * 5, strict=True))


def test_a_reason_is_given_without_triton_or_if_it_would_be_interpreted(monkeypatch):
    spec = get_backend(NAMES[0])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set" in spec.probe("cuda")
    assert spec.probe("cpu") is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert spec.probe("cuda") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert spec.unavailable_reason("cpu") == "needs the Python package triton"


# On a GPU


# The head_dims and masks of compute-sanitizer's cases: Triton then compiles each kernel only once.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "is_causal"), [(32, False), (64, True), (64, False), (128, True)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_tile_is_right(name, dtype, head_dim, is_causal, monkeypatch):
    """Not only the fastest one, which tuning chooses."""
    spec = usable(name, "cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("elsewhere some tiles need too much shared memory")
    tuners = "_float32" if dtype == "float32" else "_half"
    tuner = getattr(importlib.import_module(MODULE), tuners + "_128" * (head_dim == 128))
    case = Case(150, head_dim, num_heads=1, is_causal=is_causal, dtype=getattr(torch, dtype))
    for config in tuner.configs:
        monkeypatch.setattr(tuner, "configs", [config])
        assert run_case(spec, case, "cuda").passed, config


@pytest.mark.gpu
def test_any_length_of_a_tuned_bucket_can_be_captured(module):
    spec = usable(NAMES[0], "cuda")
    spec.attention(*Case(192, 64, dtype=torch.float16).inputs("cuda"))
    tuned = len(module._half.cache)
    q, k, v = Case(224, 64, dtype=torch.float16).inputs("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = spec.attention(q, k, v)
    graph.replay()
    assert torch.equal(o, spec.attention(q, k, v))
    assert len(module._half.cache) == tuned


@pytest.mark.gpu
def test_a_size_that_is_not_tuned_is_not_captured(module):
    spec = usable(NAMES[0], "cuda")
    q, k, v = Case(100, 64, num_heads=1, dtype=torch.float16).inputs("cuda")
    module._half.cache.clear()
    with (
        pytest.raises(RuntimeError, match="call it once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        spec.attention(q * 2, k, v)  # the product is captured: torch warns of an empty graph
    assert run_case(spec, Case(100, 64, num_heads=1, dtype=torch.float16), "cuda").passed
