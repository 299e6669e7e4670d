"""Backends that cheat, each in its own way: verify() must fail every one.

To add a row, write the cheat as a function and decorate it with what verify() must report:

    @attention("error")                  a kernel: (q, k, v, softmax_scale, is_causal) -> o
    @decode("lengths")                   a decode kernel
    @made("a later call changed")        a function that makes a kernel, for one that keeps state

The table runs with seed 0 and stops at the first failure. Where catching a cheat depends on luck,
`missed` is the probability that another seed misses it. A cheat that is wrong only in large or rare
cases says in which, so that the test runs no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from attention_kernels import BackendSpec, UnsupportedError, get_backend
from attention_kernels.contract import Kernels, per_query_head
from attention_kernels.judge.truth import naive_attention


@dataclasses.dataclass(frozen=True)
class Cheat:
    name: str
    make: Callable[[], Kernels]
    reported: str
    """A regular expression found in the first failure."""
    missed: float
    wrong: Callable[[Any], bool]
    """Whether it is wrong in a case."""
    fields: dict[str, Any]
    slow: bool

    def spec(self) -> BackendSpec:
        defaults = {"precisions": {"float32": "ieee-fp32"}, "head_dims": (32,)}
        return BackendSpec(
            name=self.name.upper(),
            family="cheats",
            summary="A backend that cheats.",
            loader=self.make,
            **(defaults | self.fields),
        )


CHEATS: list[Cheat] = []


def anywhere(_: Any) -> bool:
    return True


def made(reported: str, *, missed=0.0, wrong=anywhere, slow: bool = False, **fields: Any):
    def add(make):
        def kernels():
            kernel = make()
            return kernel if isinstance(kernel, Kernels) else Kernels(kernel)

        CHEATS.append(Cheat(make.__name__, kernels, reported, missed, wrong, fields, slow))
        return make

    return add


def attention(reported: str, **options: Any):
    def add(kernel):
        made(reported, **options)(_named(kernel, Kernels(kernel)))
        return kernel

    return add


def decode(reported: str, **fields: Any):
    def add(kernel):
        made(reported, **fields)(_named(kernel, Kernels(naive_attention, kernel)))
        return kernel

    return add


def _named(kernel: Callable[..., Any], kernels: Kernels) -> Callable[[], Kernels]:
    def make():
        return kernels

    make.__name__ = kernel.__name__
    return make


right = naive_attention


def right_decode(*arguments):
    return get_backend("NAIVE_PYTORCH").load().decode(*arguments)


def upside_down(o):
    return o.flip(2).contiguous()


# Inputs and outputs


@attention("it changed its input v")
def zeroes_v_and_returns_zeros(q, k, v, scale, causal):
    v.zero_()
    return torch.zeros(q.shape)


@attention("it changed its input k: .* elements")
def rounds_k_in_place(q, k, v, scale, causal):
    k.copy_(k.half())
    return right(q, k, v, scale, causal)


@attention("it changed its input q")
def scales_q_in_place_and_back(q, k, v, scale, causal):
    q *= scale
    o = right(q, k, v, 1.0, causal)
    q /= scale
    return o


@attention("it changed its input k")  # which lies before it in the same memory
def writes_beside_v(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    if v.storage_offset():
        v.as_strided((1,), (1,), v.storage_offset() - 1).zero_()
    return o


@attention("it changed its input q|the memory of an input")
def writes_o_into_q(q, k, v, scale, causal):
    q.copy_(right(q, k, v, scale, causal))
    return q.contiguous()


@attention("the memory of (its|an) input")
def returns_v_itself(q, k, v, scale, causal):
    return v if q.shape[1] == 1 else right(q, k, v, scale, causal)


@attention("strides|contiguous")
def is_not_contiguous(q, k, v, scale, causal):
    return right(q, k, v, scale, causal).transpose(1, 2).contiguous().transpose(1, 2)


@attention("float64")
def returns_another_dtype(q, k, v, scale, causal):
    return right(q, k, v, scale, causal).double()


@attention("batch 3 is too much")
def raises_for_a_batch(q, k, v, scale, causal):
    if q.shape[0] == 3:
        raise RuntimeError("batch 3 is too much")
    return right(q, k, v, scale, causal)


# Masks, lengths and tiles


@attention("change earlier rows")
def sees_one_key_too_many(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return torch.cat([o[:, 1:], o[:, -1:]], 1)


@attention("error")
def sees_one_key_too_few(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return torch.cat([o[:, :1], o[:, :-1]], 1)


@attention("change earlier rows")
def leaks_future_values(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o + 1e-7 * v.mean(1, keepdim=True)


@attention("change earlier rows")
def leaks_future_keys(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o + 1e-7 * k.mean(1, keepdim=True)


@attention("full")
def is_always_causal(q, k, v, scale, causal):
    return right(q, k, v, scale, True)


@attention("causal")
def is_never_causal(q, k, v, scale, causal):
    return right(q, k, v, scale, False)


@attention("seqlen (17|49|81)")
def drops_the_last_key_of_some_lengths(q, k, v, scale, causal):
    n = q.shape[1]
    o = right(q, k, v, scale, causal)
    if n % 32 == 17 and not causal:
        o = right(q[:, :-1], k[:, :-1], v[:, :-1], scale, False)
        o = torch.cat([o, o[:, -1:]], 1)
    return o


@attention("seqlen (1|49|97)")
def is_wrong_for_a_remainder_of_48(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o * 1.001 if q.shape[1] % 48 == 1 and q.shape[1] > 1 else o


@attention("seqlen [1-4][0-9]{3}", wrong=lambda c: c.seqlen > 1024, slow=True)
def is_wrong_above_1024(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    o[:, 1024:] += 1e-3
    return o


@attention("full", slow=True)
def is_wrong_in_full_attention_above_200(q, k, v, scale, causal):
    if not causal and q.shape[1] > 200:
        return right(q, k[:, :200].contiguous(), v[:, :200].contiguous(), scale, False)
    return right(q, k, v, scale, causal)


@attention(r"batch ([2-9]|\d\d)", wrong=lambda c: c.batch > 1 and c.seqlen > 900, slow=True)
def is_wrong_for_long_batches(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    if q.shape[0] > 1 and q.shape[1] > 900:
        o[-1, -1] *= 1.01
    return o


@attention("seqlen", wrong=lambda c: c.seqlen > 512 and c.seqlen % 64, slow=True)
def skips_a_last_tile_that_is_not_full(q, k, v, scale, causal):
    n = q.shape[1]
    o = right(q, k, v, scale, causal)
    if n > 512 and n % 64:
        o[:, n // 64 * 64 :] = o[:, n // 64 * 64 - 1 : n // 64 * 64]
    return o


@attention("by row", wrong=lambda c: c.seqlen > 300, slow=True)
def drifts_with_the_length(q, k, v, scale, causal):
    """As a sum that truncates does."""
    n = q.shape[1]
    rows = torch.arange(1, n + 1)[:, None, None] if causal else n
    return right(q, k, v, scale, causal) * (1 - 8e-9 * rows)


# Layouts


@attention("layout")
def takes_k_to_lie_as_q(q, k, v, scale, causal):
    if k.storage_offset() + sum(a * (n - 1) for a, n in zip(q.stride(), q.shape, strict=True)) < (
        k.untyped_storage().nbytes() // 4
    ):
        k = k.as_strided(q.shape, q.stride(), k.storage_offset())
    return right(q, k, v, scale, causal)


@attention("layout")
def takes_all_to_be_fused(q, k, v, scale, causal):
    _, n, heads, dim = q.shape
    stride = (3 * n * heads * dim, 3 * heads * dim, dim, 1)
    if v.untyped_storage().nbytes() // 4 >= 3 * q.numel():
        q, k, v = (x.as_strided(x.shape, stride, x.storage_offset() % 7680) for x in (q, k, v))
    elif not v.is_contiguous():
        v = v.transpose(1, 2).reshape(v.shape)
    return right(q, k, v, scale, causal)


@attention("layout")
def ignores_the_storage_offset(q, k, v, scale, causal):
    if q.stride(2) != q.shape[3]:
        q = q.as_strided(q.shape, q.stride(), 0)
    return right(q, k, v, scale, causal)


@attention("layout")
def is_wrong_for_heads_before_positions(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return upside_down(o) if q.stride(2) > q.stride(1) and q.shape[2] > 1 else o


@attention("layout")
def reads_past_the_rows(q, k, v, scale, causal):
    past = v.as_strided((1,), (1,), v.storage_offset() - 1) if v.storage_offset() else v.flatten()
    return right(q, k, v, scale, causal) + 0 * past[0]


@attention("layout")
def takes_v_to_lie_behind_k(q, k, v, scale, causal):
    _, _, heads, dim = k.shape
    if k.stride(1) == 3 * heads * dim:
        v = k.as_strided(v.shape, k.stride(), k.storage_offset() + heads * dim)
    return right(q, k, v, scale, causal)


@attention("one (head|row).* layout")
def is_wrong_for_a_stride_of_0(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return (
        o * 1.001 if any(s == 0 and n > 1 for n, s in zip(k.shape, k.stride(), strict=True)) else o
    )


@attention("k is q layout")
def takes_q_and_k_to_be_two_tensors(q, k, v, scale, causal):
    return right(q, k, v, scale, causal) * (1 if q.data_ptr() != k.data_ptr() else 1.001)


# Shapes and scales


@attention(r"[48] queries", supports_gqa=True)
def is_wrong_for_four_and_eight_queries_per_key_head(q, k, v, scale, causal):
    o = right(q, *per_query_head(q, k, v), scale, causal)
    return o * 1.001 if q.shape[2] // k.shape[2] in (4, 8) else o


@attention("softmax_scale")
def ignores_the_scale(q, k, v, scale, causal):
    return right(q, k, v, None, causal)


@attention(r"softmax_scale ([1-9]|0\.[5-9])")
def clamps_the_scale(q, k, v, scale, causal):
    return right(q, k, v, min(scale, 0.5), causal)


@attention("head_dim 128", head_dims=(64, 128), wrong=lambda c: c.head_dim == 128)
def looks_at_64_columns_of_k(q, k, v, scale, causal):
    return (
        right(q[..., :64], k[..., :64], v, scale, causal)
        if q.shape[3] == 128
        else right(q, k, v, scale, causal)
    )


@attention("softmax_scale 0.0")
def takes_a_scale_of_zero_for_none(q, k, v, scale, causal):
    return right(q, k, v, scale or None, causal)


@attention("softmax_scale -")
def takes_the_scale_to_be_positive(q, k, v, scale, causal):
    return right(q, k, v, abs(scale), causal)


@attention(r"(3[3-9]|[4-6]\d) heads", wrong=lambda c: c.num_heads > 32)
def is_wrong_above_32_heads(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return upside_down(o) if q.shape[2] > 32 else o


@attention("12 heads")
def reverses_twelve_heads(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return upside_down(o) if q.shape[2] == 12 else o


@attention("heads", slow=True)
def writes_16_heads_at_most(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    o[:, :, 16:] = o[:, :, :1]
    return o


@attention("batch")
def copies_the_first_of_a_batch(q, k, v, scale, causal):
    return right(q[:1], k[:1], v[:1], scale, causal).repeat(q.shape[0], 1, 1, 1)


@attention("in batches 4 to|in batch 4")
def is_wrong_from_the_fifth_of_a_batch(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    o[4:] = o[:1]
    return o


@attention("seqlen (4[0-9]|5[0-9])")
def refuses_two_lengths_and_is_wrong_at_others(q, k, v, scale, causal):
    if q.shape[1] in (5, 6):
        raise UnsupportedError("IT", ["5 or 6 tokens"])
    return right(q, k, v, scale, causal) * (1.001 if 40 <= q.shape[1] < 60 else 1)


# Numbers


@attention(r"scale (0\.[2-8]|[2-6])", missed=1e-6)
def is_wrong_between_the_usual_scales(q, k, v, scale, causal):
    size = q.std() if q.numel() > 99 else 1
    return right(q, k, v, scale, causal) * (1.001 if 0.3 < size < 0.7 or 2 < size < 6 else 1)


@attention("error")
def works_in_bfloat16(q, k, v, scale, causal):
    return right(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale, causal).float()


@attention("error")
def rounds_the_weights_to_half(q, k, v, scale, causal):
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    weights = scores.softmax(3).half().float()
    return torch.einsum("bhij,bjhd->bihd", weights, v).contiguous()


@attention("error")
def works_in_tf32(q, k, v, scale, causal):
    q, k, v = ((x.contiguous().view(torch.int32) & -8192).view(torch.float32) for x in (q, k, v))
    return right(q, k, v, scale, causal)


@attention("not finite")
def forgets_the_maximum(q, k, v, scale, causal):
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).exp()
    weights = weights.tril() if causal else weights
    o = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(3, keepdim=True), v)
    return o.contiguous()


@attention("error")
def clamps_the_scores(q, k, v, scale, causal):
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).clamp(-60, 60)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(3), v).contiguous()


@attention("error")
def adds_to_the_row_sum(q, k, v, scale, causal):
    return right(q, k, v, scale, causal) / (1 + 3e-6)


def weighted(q, k, v, scale, causal, change):
    """Attention with weights that `change` makes from the scores, less their largest."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    weights = change(scores - scores.amax(3, keepdim=True))
    o = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(3, keepdim=True), v)
    return o.contiguous()


@attention("error")
def skips_keys_of_low_scores(q, k, v, scale, causal):
    return weighted(q, k, v, scale, causal, lambda x: x.exp() * (x > -10))


@attention("error")
def has_a_rough_exponential(q, k, v, scale, causal):
    return weighted(q, k, v, scale, causal, lambda x: (1 + x / 4096).clamp(min=0) ** 4096)


@attention("error")
def sees_the_last_64_keys_only(q, k, v, scale, causal):
    return weighted(q, k, v, scale, causal, lambda x: x.exp().triu(-63) if causal else x.exp())


@attention(r"scale 0\.0\d")
def takes_small_scores_to_be_equal(q, k, v, scale, causal):
    return right(q * 0 if q.abs().max() < 0.2 else q, k, v, scale, causal)


@attention("tiny")
def flushes_small_values(q, k, v, scale, causal):
    return right(q, k, v.where(v.abs() > 1e-20, 0), scale, causal)


@attention("equal", slow=True)
def takes_the_first_of_equal_scores(q, k, v, scale, causal):
    if q.shape[1] > 1 and (k == k[:, :1]).all():
        return v[:, :1].expand(v.shape).contiguous()
    return right(q, k, v, scale, causal)


# Memory and NaN


@attention("not finite|two runs|error")
def leaves_rows_unwritten(q, k, v, scale, causal):
    o = torch.empty(q.shape)
    full = right(q, k, v, scale, causal)
    o[:, : q.shape[1] // 32 * 32] = full[:, : q.shape[1] // 32 * 32]
    return o


@attention("not finite")
def writes_nan_into_the_last_of_a_tile(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    o[:, 31::32, -1] = torch.nan
    return o


@attention("not finite", wrong=lambda c: c.seqlen == 119, slow=True)
def is_nan_at_one_length(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o * torch.nan if q.shape[1] == 119 else o


@attention("zero rows")
def takes_a_key_of_zeros_for_padding(q, k, v, scale, causal):
    return right(q, k, v, scale, causal) * (0 if (k == 0).all(3).any() else 1)


@attention("tiny scores")
def takes_tiny_q_for_nothing(q, k, v, scale, causal):
    return right(q, k, v, scale, causal) * (0 if q.abs().max() < 1e-6 else 1)
