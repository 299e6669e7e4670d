"""Honest kernels with unusual algorithms: the judge must pass every one, whatever the seed.

To add one, write it as a function of

    q, k, v: (batch, num_heads, seqlen, head_dim); k and v may have more rows than q
    scale: softmax_scale
    hidden: (rows of q, rows of k), True where the mask hides a key

that returns o in the shape of q, and decorate it with its precision class for each dtype that it
takes. The docstring says what is unusual and why the result is right. Not all that is equal on
paper is right: o = v_0 + P (v - v_0) rounds numbers of the size of v_0, however small o is, and
exp(score - logsumexp) rounds numbers of the size of the scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_kernels import BackendSpec
from attention_kernels.contract import Kernels
from attention_kernels.judge.worker import Runner
from attention_kernels.precision import PLAIN_PRECISIONS

LOG2_E = 1.4426950408889634
# A row_max to start from: finite, so that -inf - row_max is -inf, and far below any score.
LOWEST = -1e30
# At scale 1e4 the scores are 1e8 and TF32's error in them 3e4, but the best two may be nearer. In
# 4 % of those cases a right TF32 kernel picks another key than float64 and fails.
LARGEST_TF32_SCALE = 8.0

HeadsFirst = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class HonestKernel:
    """A kernel of this table, with its precision class for each dtype."""

    kernel: HeadsFirst
    precisions: dict[str, str]
    supports_gqa: bool = False

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.precisions]

    def spec(self) -> BackendSpec:
        return BackendSpec(
            name=self.name.upper(),
            family="honest",
            summary=(self.kernel.__doc__ or "").splitlines()[0],
            loader=lambda: Kernels(self.attention, self.decode),
            precisions=self.precisions,
            supports_gqa=self.supports_gqa,
        )

    @functools.cached_property
    def runner(self) -> Runner:
        return Runner(self.spec(), "cpu")

    def attention(self, q, k, v, softmax_scale, is_causal):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        o = self.kernel(*heads_first, softmax_scale, hidden & is_causal)
        return o.transpose(1, 2).contiguous()

    def decode(self, q, k_cache, v_cache, seqlens, softmax_scale):
        rows = [
            self.attention(q[i, None], k[None, :n], v[None, :n], softmax_scale, False)
            for i, (k, v, n) in enumerate(zip(k_cache, v_cache, seqlens.tolist(), strict=True))
        ]
        return torch.cat(rows)


HONEST: list[HonestKernel] = []


def honest(*dtypes: str, **precisions: str):
    """Add a kernel; dtypes: those of a plain precision class."""

    def add(kernel: HeadsFirst) -> HeadsFirst:
        plain = {dtype: PLAIN_PRECISIONS[dtype] for dtype in dtypes}
        HONEST.append(HonestKernel(kernel, plain | precisions))
        return kernel

    return add


def masked_scores(q, k, scale, hidden):
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf)


def tiles(length, size):
    return [slice(start, start + size) for start in range(0, length, size)]


def largest(scores):
    return scores.amax(3, keepdim=True).clamp(min=LOWEST)


def partial(scores, v):
    """row_max, row_sum and the sum of weighted values over some of the keys."""
    row_max = largest(scores)
    weights = (scores - row_max).exp()
    return row_max, weights.sum(3, keepdim=True), weights @ v


def partials(q, k, v, scale, hidden, parts):
    """One partial result for each part of the keys: slices or index tensors.

    A kernel computes all scores by the same code. BLAS does not: it sums the products of a single
    key in another order, which is five units in the last place for 64 equal products.
    """
    scores = masked_scores(q, k, scale, hidden)
    return [partial(scores[..., part], v[:, :, part]) for part in parts]


def merge(one, other):
    """An online softmax's step: the partial result over the keys of both."""
    row_max = torch.maximum(one[0], other[0])
    a, b = (one[0] - row_max).exp(), (other[0] - row_max).exp()
    return row_max, a * one[1] + b * other[1], a * one[2] + b * other[2]


def divided(part):
    _, row_sum, o = part
    return o / row_sum


def with_ones(v):
    """V with a column of ones, whose weighted sum is row_sum."""
    return F.pad(v, (0, 1), value=1.0)


def by_last_column(o):
    return o[..., :-1] / o[..., -1:]


def stable_weights(q, k, scale, hidden):
    """Unnormalized weights: exp(score - row_max)."""
    scores = masked_scores(q, k, scale, hidden)
    return (scores - largest(scores)).exp()


# The order of the work


@honest("float32", "float16", "bfloat16")
def one_thread_per_row(q, k, v, scale, hidden):
    """Adds the products of a score in order, and takes a row_max that is 0.69267 too large.

    The largest weight then lies in the middle between two numbers of float16.
    """
    scores = torch.zeros(*q.shape[:3], k.shape[2])
    for column in range(q.shape[3]):
        scores += q[..., column, None].float() * k[..., None, :, column].float()
    scores = (scores * scale).masked_fill(hidden, -torch.inf)
    weights = (scores - largest(scores) - 0.69267).exp()
    o = weights.to(v.dtype).float() @ v.float()
    return (o / weights.sum(3, keepdim=True)).to(q.dtype)


@honest("float32")
def one_key_at_a_time(q, k, v, scale, hidden):
    """Rescales after every key; each of the n roundings is to nearest, so they drift by sqrt(n)."""
    parts = tiles(k.shape[2], 1)
    return divided(functools.reduce(merge, partials(q, k, v, scale, hidden, parts)))


def in_order(order, q, k, v, scale, hidden):
    weights = stable_weights(q, k[:, :, order], scale, hidden[:, order])
    return weights @ v[:, :, order] / weights.sum(3, keepdim=True)


@honest("float32")
def keys_in_random_order(q, k, v, scale, hidden):
    """Permutes keys, values and mask alike, which leaves the sums over keys the same."""
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(0))
    return in_order(order, q, k, v, scale, hidden)


@honest("float32")
def keys_in_an_order_that_varies(q, k, v, scale, hidden):
    """Each call has an order of its own, as blocks that add atomically do: two runs may differ."""
    return in_order(torch.randperm(k.shape[2]), q, k, v, scale, hidden)


@honest("float32", "float64")
def splits_combined_at_the_end(q, k, v, scale, hidden):
    """Each tile keeps its own row_max until the end, as in flash decoding; then all are scaled."""
    parts = partials(q, k, v, scale, hidden, tiles(k.shape[2], 16))
    row_max, row_sum, o = (torch.stack(x) for x in zip(*parts, strict=True))
    factors = (row_max - row_max.amax(0)).exp()
    return (factors * o).sum(0) / (factors * row_sum).sum(0)


@honest("float32")
def every_eighth_key_per_lane(q, k, v, scale, hidden):
    """Eight lanes take every eighth key and are merged by butterflies; 1/row_sum is multiplied.

    The reciprocal costs half an ulp more than a division.
    """
    parts = [torch.arange(lane, k.shape[2], 8) for lane in range(min(8, k.shape[2]))]
    lanes = partials(q, k, v, scale, hidden, parts)
    while len(lanes) > 1:
        half = (len(lanes) + 1) // 2
        pairs = zip(lanes, lanes[half:], strict=False)
        lanes = [merge(one, other) for one, other in pairs] + lanes[len(lanes) - half : half]
    _, row_sum, o = lanes[0]
    return o * (1 / row_sum)


@honest("float32")
def transposed(q, k, v, scale, hidden):
    """Computes K Q^T and V^T P^T, the transposed products of the same numbers."""
    scores = (k @ q.mT * scale).masked_fill(hidden.T, -torch.inf)
    return (v.mT @ scores.softmax(2)).mT


@honest("float32", "float64")
def row_sum_by_a_column_of_ones(q, k, v, scale, hidden):
    """V has a column of ones, so one product yields O and row_sum, rounded alike."""
    return by_last_column(stable_weights(q, k, scale, hidden) @ with_ones(v))


# The sums


@honest("float32", "float64")
def moves_between_averages(q, k, v, scale, hidden):
    """Keeps a normalized O and moves it towards each tile's average by the tile's share.

    The weight is share = tile_sum / (row_sum + tile_sum), and o + share (average - o) is their sum.
    """
    row_max, row_sum, o = None, None, None
    for part in partials(q, k, v, scale, hidden, tiles(k.shape[2], 32)):
        if o is None:
            row_max, row_sum, o = part[0], part[1], divided(part)
            continue
        total = merge((row_max, row_sum, 0.0), part)
        tile_sum = part[1] * (part[0] - total[0]).exp()
        average = part[2] / part[1].clamp(min=torch.finfo(q.dtype).tiny)  # 0 / 0 if all is hidden
        o = o + (average - o) * (tile_sum / total[1])
        row_max, row_sum = total[:2]
    return o


# The softmax


@honest("float32", "float64")
def base_two_with_a_scaled_query(q, k, v, scale, hidden):
    """Multiplies q by scale log2(e) first: the rounding of a score's terms is within its own."""
    scores = masked_scores(q * (scale * LOG2_E), k, 1.0, hidden)
    weights = (scores - largest(scores)).exp2()
    return weights @ v / weights.sum(3, keepdim=True)


@honest("float32")
def base_two_with_a_fused_multiply_add(q, k, v, scale, hidden):
    """exp2(fma(score, c, -row_max c)): what row_max c loses, every key of the row loses alike."""
    scores, factor = q @ k.mT, torch.tensor(scale * LOG2_E)
    row_max = largest((scores * factor).masked_fill(hidden, -torch.inf))
    fused = (scores.double() * factor.double() - row_max.double()).float()
    weights = fused.exp2().masked_fill(hidden, 0.0)
    return weights @ v / weights.sum(3, keepdim=True)


@honest("float32", "float64")
def rescales_by_powers_of_two(q, k, v, scale, hidden):
    """Works in base 2 with row_max rounded up to an integer, so that rescaling is exact."""
    total, everything = None, masked_scores(q, k, scale, hidden) * LOG2_E
    for part in tiles(k.shape[2], 32):
        scores = everything[..., part]
        tile_max = largest(scores).ceil()
        if total is None:
            row_max, total = tile_max, 0.0
        row_max, before = torch.maximum(row_max, tile_max), row_max
        weights = (scores - row_max).exp2()
        total = total * (before - row_max).exp2() + weights @ with_ones(v[:, :, part])
    return by_last_column(total)


@honest("float32", "float16", "bfloat16")
def rescales_when_a_warp_must(q, k, v, scale, hidden):
    """Sixteen rows rescale together, once one exceeds its old row_max by 8: weights reach e^8.

    The quotient is the same whatever number stands for row_max. 16-bit dtypes round the weights,
    and e^8 = 2981 is within their range. Where the mask hides a key of the tile, each row decides
    for itself: otherwise keys that it does not see would change its rounding.
    """
    rows, o = q.shape[2], torch.zeros(q.shape)
    row_max, row_sum = torch.full_like(o[..., :1], LOWEST), torch.zeros_like(o[..., :1])

    def any_of_warp(x):
        warps = F.pad(x.float(), (0, 0, 0, -rows % 16)).unflatten(-2, (-1, 16))
        found = warps.amax(-2, keepdim=True).expand_as(warps).flatten(-3, -2)
        return found[..., :rows, :] > 0

    everything = masked_scores(q.float(), k.float(), scale, hidden)
    for part in tiles(k.shape[2], 16):
        scores = everything[..., part]
        tile_max = largest(scores)
        due = tile_max > row_max + 8
        is_masked = any_of_warp(hidden[:, part].any(1, keepdim=True))
        due = torch.where(is_masked, due, any_of_warp(due))
        before, row_max = row_max, torch.where(due, torch.maximum(row_max, tile_max), row_max)
        alpha, weights = (before - row_max).exp(), (scores - row_max).exp()
        row_sum = alpha * row_sum + weights.sum(3, keepdim=True)
        o = alpha * o + weights.to(v.dtype).float() @ v[:, :, part].float()
    return (o / row_sum).to(q.dtype)


def polynomial_exp(x):
    """exp(x) = 2^n exp(r) with |r| <= log(2)/2, and exp(r) a polynomial of degree 7."""
    x = x.clamp(min=-110.0)  # 2^-158, which is 0 in float32
    n = (x * LOG2_E).round()
    r = (x - n * 0.693359375) - n * -2.12194440e-4  # log(2) in two parts, as Cody and Waite do
    power = torch.full_like(r, 1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        power = power * r + 1 / factorial
    return torch.ldexp(power, n)


@honest("float32")
def polynomial_exponential(q, k, v, scale, hidden):
    """Computes exp as a polynomial, as FlashAttention 4 does in part: good to two ulps."""
    scores = masked_scores(q, k, scale, hidden)
    weights = polynomial_exp(scores - largest(scores))
    return weights @ v / weights.sum(3, keepdim=True)


@honest("float32")
def subtracts_the_logarithm_of_the_sum(q, k, v, scale, hidden):
    """Divides nothing: weights are exp((score - row_max) - log(row_sum)).

    log(row_sum) is at most log n, so its rounding changes the result by a few ulps.
    """
    scores = masked_scores(q, k, scale, hidden)
    scores = scores - largest(scores)
    return (scores - scores.exp().sum(3, keepdim=True).log()).exp() @ v


# Products on tensor cores


def terms(x, count, rounded):
    """Split x into `count` terms, each the rounded rest."""
    found = []
    for _ in range(count):
        found.append(rounded(x))
        x = x - found[-1]
    return found


def product(a, b):
    """The sum of the products of terms, without the smallest, in float32."""
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < len(a)]
    return sum(a[i] @ b[j] for i, j in sorted(pairs, key=sum, reverse=True))


def to_tf32(x):
    """Round to nearest, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def to_bf16(x):
    return x.bfloat16().float()


def by_terms(q, k, v, scale, hidden, count, rounded):
    split = functools.partial(terms, count=count, rounded=rounded)
    scores = (product(split(q), split(k.mT)) * scale).masked_fill(hidden, -torch.inf)
    weights = (scores - largest(scores)).exp()
    return product(split(weights), split(v)) / weights.sum(3, keepdim=True)


@honest(float32="3xtf32")
def three_terms_of_bf16(q, k, v, scale, hidden):
    """bf16x3: three terms of 8 bits hold float32's 24; the three products left out are 2^-24."""
    return by_terms(q, k, v, scale, hidden, 3, to_bf16)


@honest(float32="3xtf32")
def two_terms_of_tf32(q, k, v, scale, hidden):
    """3xTF32: two terms of 11 bits, and without the product of the small terms."""
    return by_terms(q, k, v, scale, hidden, 2, to_tf32)


@honest(float32="tf32")
def one_term_of_tf32(q, k, v, scale, hidden):
    """Plain TF32, which is right in its own class only."""
    return by_terms(q, k, v, scale, hidden, 1, to_tf32)


@honest(float32="3xfp16")
def two_terms_of_fp16(q, k, v, scale, hidden):
    """fp16x3 for the scores, with every row scaled by a power of two to 2^14.

    float16 then holds two terms of 11 bits. Values may span more exponents than it has, so P V is
    computed in two terms of TF32.
    """

    def scaled(x):
        exponent = torch.frexp(x.abs().amax(3, keepdim=True))[1]
        return terms(torch.ldexp(x, 14 - exponent), 2, lambda x: x.half().float()), exponent - 14

    (q, q_exponents), (k, k_exponents) = scaled(q), scaled(k)
    scores = torch.ldexp(product(q, [x.mT for x in k]), q_exponents + k_exponents.mT)
    scores = (scores * scale).masked_fill(hidden, -torch.inf)
    weights = (scores - largest(scores)).exp()
    return product(terms(weights, 2, to_tf32), terms(v, 2, to_tf32)) / weights.sum(3, keepdim=True)


def truncated(x):
    """Round float64 towards zero to float32, as a tensor core does with its sums."""
    bits = x.float()
    too_large = bits.double().abs() > x.abs()
    return torch.where(too_large, torch.nextafter(bits, torch.zeros(())), bits).double()


@honest(float32="3xtf32")
def truncates_within_a_tile(q, k, v, scale, hidden):
    """Truncates after eight products, as tensor cores do, but rounds the sum of a tile to nearest.

    Each tile of 32 keys has an accumulator of its own, so truncations do not add up over the row.
    """

    def sums(a, b):
        total = torch.zeros(())
        for tile in tiles(a.shape[3], 32):
            accumulator = 0.0
            for x in tiles(a.shape[3], 8)[tile.start // 8 : tile.stop // 8]:
                accumulator = truncated(accumulator + a[..., x].double() @ b[:, :, x].double())
            total = total + accumulator.float()
        return total

    scores = (sums(q, k.mT) * scale).masked_fill(hidden, -torch.inf)
    weights = (scores - largest(scores)).exp()
    return sums(weights, v) / weights.sum(3, keepdim=True)


# 16-bit inputs, with sums in float32


@honest("float16", "bfloat16")
def rounds_the_weights_of_the_sum_too(q, k, v, scale, hidden):
    """Adds up the rounded weights, so that the weights of a row add up to 1."""
    weights = stable_weights(q.float(), k.float(), scale, hidden).to(v.dtype).float()
    return (weights @ v.float() / weights.sum(3, keepdim=True)).to(q.dtype)
