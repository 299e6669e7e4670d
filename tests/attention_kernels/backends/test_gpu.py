"""What each of our kernels does on a GPU, CUDA's and Triton's: streams, graphs and devices."""

from __future__ import annotations

import pytest
import torch

from attention_kernels import list_backends
from attention_kernels.judge.conformance import Case
from tests.conftest import usable

KERNELS = [
    (spec.name, getattr(torch, dtype))
    for spec in list_backends()
    if (spec.version or spec.family == "triton") and "cuda" in spec.device_types
    if spec.family != "decode"  # test_decode.py
    for dtype in spec.dtypes
]
pytestmark = pytest.mark.gpu
for_every_kernel = pytest.mark.parametrize(("name", "dtype"), KERNELS, ids=str)


def inputs(dtype: torch.dtype, seqlen: int = 200, device: str = "cuda", **fields):
    return Case(seqlen, 64, dtype=dtype, **fields).inputs(device)


@for_every_kernel
def test_the_current_stream_is_used(name, dtype):
    spec = usable(name, "cuda")
    q, k, v = inputs(dtype)
    expected = spec.attention(q, k, v)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on the default stream the kernel would overtake the copy
        late.copy_(q)
        o = spec.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)


@for_every_kernel
def test_it_is_captured_in_a_cuda_graph(name, dtype):
    spec = usable(name, "cuda")
    q, k, v = inputs(dtype)
    spec.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = spec.attention(q, k, v)
    for seed in (1, 2):
        for x, y in zip((q, k, v), inputs(dtype, seed=seed), strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(o, spec.attention(q, k, v))


@for_every_kernel
def test_two_runs_are_bit_identical(name, dtype):
    spec = usable(name, "cuda")
    q, k, v = inputs(dtype, 1023, batch=2, num_heads=12)
    expected = spec.attention(q, k, v)
    assert all(torch.equal(spec.attention(q, k, v), expected) for _ in range(5))


@for_every_kernel
def test_it_runs_on_the_device_of_its_inputs(name, dtype):
    spec = usable(name, "cuda")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    q, k, v = inputs(dtype, 100, "cuda:1")
    o = spec.attention(q, k, v)
    assert o.device == q.device
    assert torch.cuda.current_device() == 0
    expected = spec.attention(*(x.to("cuda:0") for x in (q, k, v)))
    if torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability(1):
        assert torch.equal(o.cpu(), expected.cpu())
