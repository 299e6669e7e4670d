from __future__ import annotations

import pytest
import torch

from attention_kernels import ArgumentError, UnsupportedError, attention, get_backend
from tests.conftest import usable

GOOD = torch.randn(2, 5, 3, 8)
STRIDED = GOOD.mT.contiguous().mT  # its last stride is 3
META = GOOD.to("meta")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": GOOD[0]}, "q must be (batch, seqlen, num_heads, head_dim), not (5, 3, 8)"),
        ({"q": GOOD[0], "k": GOOD.double()}, "must have the same dtype, not float32, float64, fl"),
        ({"k": GOOD[:, :4]}, "same shape, not (2, 5, 3, 8), (2, 4, 3, 8), (2, 5, 3, 8)"),
        ({"v": GOOD[:, :4], "k": STRIDED}, "the last stride of k must be 1, not 3; q, k, v must h"),
        ({"v": META}, "q, k, v must be on the same device, not cpu, cpu, meta"),
        (dict.fromkeys("qkv", GOOD[:, :0]), "q is empty: (2, 0, 3, 8); k is empty"),
        ({"q": GOOD.numpy()}, "q must be a torch.Tensor, not ndarray"),
        ({"k": [1], "v": None}, "k must be a torch.Tensor, not list"),
        ({"softmax_scale": torch.nan}, "softmax_scale must be a finite number, not nan"),
        ({"softmax_scale": "0.5"}, "softmax_scale must be a finite number, not '0.5'"),
        ({"is_causal": 0}, "is_causal must be True or False, not 0"),
    ],
)
@pytest.mark.parametrize("backend", [None, "NAIVE_PYTORCH"])
def test_broken_arguments_are_all_named(change, words, backend):
    with pytest.raises(ArgumentError) as caught:
        attention(**{"q": GOOD, "k": GOOD, "v": GOOD, "backend": backend} | change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.randn(2, 2, 3, 8)}, "must be one token per row and two caches that fit, not"),
        ({"k_cache": GOOD[:1], "v_cache": GOOD[:1]}, "(2, 1, 3, 8), (1, 5, 3, 8), (1, 5, 3, 8)"),
        ({"v_cache": GOOD[:, :4]}, "(2, 1, 3, 8), (2, 5, 3, 8), (2, 4, 3, 8)"),
        ({"q": torch.randn(2, 3, 8)}, "q must be (batch"),
        ({"v_cache": STRIDED}, "the last stride of v_cache must be 1, not 3"),
        ({"seqlens": [1, 5]}, "seqlens must be a torch.Tensor, not list"),
        ({"seqlens": torch.tensor([1]).int()}, "must be int32 (2,) on cpu, not int32 (1,) on cpu"),
        ({"seqlens": torch.tensor([1, 5]).int().to("meta")}, "not int32 (2,) on meta"),
        ({"seqlens": torch.tensor([0, 5]).int()}, "seqlens must be between 1 and 5, not [0, 5]"),
        ({"seqlens": torch.tensor([1, 6]).int()}, "seqlens must be between 1 and 5, not [1, 6]"),
    ],
)
def test_broken_decode_arguments_are_named(change, words):
    arguments = {"q": GOOD[:, :1], "k_cache": GOOD, "v_cache": GOOD}
    arguments["seqlens"] = torch.tensor([1, 5], dtype=torch.int32)
    get_backend("NAIVE_PYTORCH").decode(**arguments)
    with pytest.raises(ArgumentError) as caught:
        get_backend("NAIVE_PYTORCH").decode(**(arguments | change))
    assert words in str(caught.value)


def test_fewer_key_heads_must_divide_the_query_heads_and_suit_the_backend():
    q, k, v = torch.randn(2, 5, 6, 32), *torch.randn(2, 2, 5, 2, 32)
    with pytest.raises(ArgumentError, match="q, k, v must have the same shape"):
        attention(q[:, :, :5], k, v, backend="NAIVE_PYTORCH")
    with pytest.raises(UnsupportedError, match=r"2 key heads for 6 query heads \(it takes as many"):
        attention(q, k, v, backend="NUMPY_BASIC")
    assert get_backend("NUMPY_BASIC").refusals(q, k, v)


def test_a_gradient_is_computed_or_refused():
    """PyTorch's backends have a backward pass; other backends must not return a zero gradient."""
    plain = [x.double().requires_grad_() for x in (GOOD, GOOD + 1, GOOD - 1)]
    expected = torch.autograd.grad(attention(*plain).square().sum(), plain)
    for name in ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH"):
        gradients = torch.autograd.grad(attention(*plain, backend=name).square().sum(), plain)
        torch.testing.assert_close(gradients, expected)
    for name in ("NUMPY_BASIC", "CUSTOM_CUDA_VERSION_1", "TRITON_FLASH_ATTENTION"):
        spec = usable(name, "cpu")
        for at in range(3):
            qkv = [torch.randn(1, 5, 3, 32, requires_grad=at == i) for i in range(3)]
            with pytest.raises(UnsupportedError, match=f"{name} cannot .*: a gradient .it has no"):
                spec.attention(*qkv)
            with torch.no_grad():
                assert not spec.attention(*qkv).requires_grad
