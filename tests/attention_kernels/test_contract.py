from __future__ import annotations

import math

import pytest
import torch

from attention_kernels import ArgumentError, UnsupportedError, attention, get_backend
from tests.conftest import usable

GOOD = torch.randn(2, 5, 3, 8)


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        (GOOD[0], GOOD, GOOD, ["q must be (batch, seqlen, num_heads, head_dim), not (5, 3, 8)"]),
        (GOOD, GOOD[:, :4], GOOD, ["must have the same shape", "(2, 4, 3, 8)"]),
        (GOOD, GOOD.double(), GOOD, ["must have the same dtype", "float32, float64, float32"]),
        (GOOD, GOOD, GOOD.to("meta"), ["must be on the same device", "cpu, cpu, meta"]),
        (GOOD[:, :0], GOOD[:, :0], GOOD[:, :0], ["q is empty", "k is empty", "v is empty"]),
        (GOOD, GOOD.mT.contiguous().mT, GOOD, ["the last stride of k must be 1, not 3"]),
        (GOOD, GOOD, GOOD.mT.contiguous().mT, ["the last stride of v must be 1, not 3"]),
        (GOOD, GOOD, GOOD[:, :4], ["must have the same shape", "(2, 5, 3, 8), (2, 4, 3, 8)"]),
        (GOOD[0], GOOD.double(), GOOD, ["q must be", "must have the same dtype"]),
    ],
)
def test_broken_arguments_are_all_named(q, k, v, words):
    with pytest.raises(ArgumentError) as caught:
        attention(q, k, v)
    for word in words:
        assert word in str(caught.value)


def test_a_backend_that_declares_it_takes_fewer_key_heads():
    q, k, v = torch.randn(2, 5, 6, 32), *torch.randn(2, 2, 5, 2, 32)
    repeated = [x.repeat_interleave(3, dim=2) for x in (k, v)]
    for name in ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION"):
        o = attention(q, k, v, backend=name)
        torch.testing.assert_close(o, attention(q, *repeated, backend=name), rtol=0, atol=1e-6)
    with pytest.raises(ArgumentError, match="q, k, v must have the same shape"):
        attention(q[:, :, :5], k, v)
    reason = r"2 key heads for 6 query heads \(it takes as many of both\)"
    with pytest.raises(UnsupportedError, match=reason):
        attention(q, k, v, backend="NUMPY_BASIC")
    assert get_backend("NUMPY_BASIC").refusals(q, k, v)
    seqlens = torch.tensor([5, 5], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="does not fit q"):
        get_backend("NAIVE_PYTORCH").decode(q[:, :1, :5], k, v, seqlens)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, "0.5", True, 1j])
def test_scale_must_be_a_finite_number(scale):
    with pytest.raises(ArgumentError, match="softmax_scale must be a finite number"):
        attention(GOOD, GOOD, GOOD, softmax_scale=scale)


@pytest.mark.parametrize("is_causal", ["no", 0, None])
def test_is_causal_must_be_true_or_false(is_causal):
    with pytest.raises(ArgumentError, match="is_causal must be True or False"):
        attention(GOOD, GOOD, GOOD, is_causal=is_causal)


def test_default_scale_is_one_over_root_head_dim():
    expected = attention(GOOD, GOOD, GOOD, softmax_scale=1 / math.sqrt(8))
    assert torch.equal(attention(GOOD, GOOD, GOOD), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.randn(2, 2, 3, 8)}, "decode takes one"),
        ({"seqlens": torch.tensor([1, 2])}, "seqlens must be int32 (2,)"),
        ({"seqlens": torch.tensor([1], dtype=torch.int32)}, "seqlens must be int32 (2,)"),
        ({"v_cache": GOOD[:, :4]}, "differ in shape"),
        ({"q": torch.randn(2, 1, 4, 8)}, "does not fit q"),
        ({"k_cache": GOOD[:1], "v_cache": GOOD[:1]}, "does not fit q"),
        ({"k_cache": GOOD.double()}, "must have the same dtype"),
        ({"v_cache": GOOD.to("meta")}, "must be on the same device"),
        ({"seqlens": torch.ones(2, dtype=torch.int32, device="meta")}, "seqlens must be int32"),
        ({"q": torch.randn(2, 3, 8)}, "q must be (batch"),
        ({"v_cache": GOOD.mT.contiguous().mT}, "the last stride of v_cache must be 1, not 3"),
        ({"q": torch.randn(0, 1, 3, 8)}, "q is empty"),
        ({"seqlens": torch.tensor([0, 5]).int()}, "seqlens must be between 1 and 5, not [0, 5]"),
        ({"seqlens": torch.tensor([1, 6]).int()}, "seqlens must be between 1 and 5, not [1, 6]"),
        ({"seqlens": torch.tensor([-1, 5]).int()}, "seqlens must be between 1 and 5, not [-1, 5]"),
    ],
)
def test_broken_decode_arguments_are_named(change, words):
    arguments = {
        "q": torch.randn(2, 1, 3, 8),
        "k_cache": GOOD,
        "v_cache": GOOD,
        "seqlens": torch.tensor([1, 5], dtype=torch.int32),
    }
    get_backend("NAIVE_PYTORCH").decode(**arguments)
    with pytest.raises(ArgumentError) as caught:
        get_backend("NAIVE_PYTORCH").decode(**(arguments | change))
    assert words in str(caught.value)


def test_unsupported_names_the_backend_and_every_reason():
    q = torch.randn(1, 4, 2, 8).int()
    with pytest.raises(UnsupportedError) as caught:
        get_backend("PYTORCH_SDPA_CUDNN_ATTENTION").attention(q, q, q)
    text = str(caught.value)
    assert "PYTORCH_SDPA_CUDNN_ATTENTION" in text
    assert "dtype int32 (it takes float16, bfloat16)" in text
    assert "device cpu (it takes cuda)" in text
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize("backend", [None, "NAIVE_PYTORCH"])
def test_an_array_is_not_a_tensor(backend):
    with pytest.raises(ArgumentError) as caught:
        attention(GOOD.numpy(), GOOD, GOOD, backend=backend)
    assert str(caught.value) == "q must be a torch.Tensor, not ndarray"
    with pytest.raises(ArgumentError, match=r"^k must be .* not list; v must be .* not NoneType$"):
        attention(GOOD, [1], None, backend=backend)
    with pytest.raises(ArgumentError, match=r"seqlens must be a torch\.Tensor, not list"):
        get_backend("NAIVE_PYTORCH").decode(GOOD[:, :1], GOOD, GOOD, [1, 5])


def test_a_gradient_is_computed_or_refused():
    """PyTorch's backends have a backward pass; other backends must not return a zero gradient."""
    plain = [x.double().requires_grad_() for x in (GOOD, GOOD + 1, GOOD - 1)]
    for name in ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION"):
        gradients = torch.autograd.grad(attention(*plain, backend=name).square().sum(), plain)
        expected = torch.autograd.grad(attention(*plain).square().sum(), plain)
        for got, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, wanted)
    for name in ("NUMPY_BASIC", "CUSTOM_CUDA_VERSION_1", "TRITON_FLASH_ATTENTION"):
        spec = usable(name, "cpu")
        qkv = [torch.randn(1, 5, 3, 32) for _ in range(3)]
        for x in qkv:
            x.requires_grad_()
            with pytest.raises(UnsupportedError, match=f"{name} cannot .*: a gradient .it has no"):
                spec.attention(*qkv)
            with torch.no_grad():
                assert not spec.attention(*qkv).requires_grad
            x.requires_grad_(requires_grad=False)
