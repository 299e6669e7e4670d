from __future__ import annotations

import dataclasses
import functools
import math
import re

import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.truth import (
    Verdict,
    error_budget,
    judge,
    naive_attention,
    reference_attention,
    truth,
)


@pytest.mark.parametrize("is_causal", [True, False])
def test_truth_equals_the_definition_written_out(is_causal):
    q, k, v = (torch.randn(2, 5, 2, 3, dtype=torch.float64) for _ in range(3))
    out = reference_attention(q, k, v, 0.7, is_causal)
    for b in range(2):
        for h in range(2):
            for i in range(5):
                keys = range(i + 1) if is_causal else range(5)
                weights = [math.exp(0.7 * float(q[b, i, h] @ k[b, j, h])) for j in keys]
                row = sum(w * v[b, j, h] for w, j in zip(weights, keys, strict=True)) / sum(weights)
                assert torch.allclose(out[b, i, h], row, rtol=0, atol=1e-14)


def test_a_verdict_says_in_words_what_is_not_finite_and_leaves_out_what_is_not_judged():
    q, k, v = Case(5, 32, num_heads=1).inputs("cpu")
    o = naive_attention(q, k, v)
    o[0, 3, 0, 7] = 1.5
    pair = r"[\d.e+-]+, budget [\d.e+-]+"
    said = str(judge(o, q, k, v))  # five rows are too few to judge a column by
    assert re.fullmatch(rf"error {pair}; by row {pair}; 1\.5 instead of .*", said)
    o[0, 3, 0, 7] = math.nan
    place = "batch 0, row 3, head 0, column 7"
    assert re.fullmatch(
        f"the output is not finite; nan instead of [^ ]+ at {place}; over the budget .*",
        str(judge(o, q, k, v)),
    )
    nothing = str(Verdict(1.0, math.inf, math.inf))
    assert nothing == "there is no budget, because plain PyTorch's output is not finite"


def test_judge_passes_naive_and_fails_what_is_wrong():
    q, k, v = Case(65, 32, batch=2).inputs("cpu")
    good = naive_attention(q, k, v)
    assert judge(good, q, k, v).passed
    nan = good.clone()
    nan[0, 3, 1, 5] = torch.nan
    assert judge(nan, q, k, v).error == math.inf
    assert not judge(nan, q, k, v).passed
    assert not judge(good[:, :-1], q, k, v).passed
    assert not judge(good.double(), q, k, v).passed
    assert not judge(naive_attention(q, k, v, is_causal=False), q, k, v).passed
    assert not judge(good + 1e-5, q, k, v).passed


@pytest.mark.parametrize(
    ("precision", "factor"),
    [("ieee-fp32", 2), ("fp16", 2), ("3xtf32", 4), ("3xfp16", 4), ("fp64", 4)],
)
def test_the_budget_is_a_multiple_of_plain_pytorchs_error_and_four_ulps(precision, factor):
    eps = torch.finfo(torch.float32).eps
    assert error_budget(precision, torch.float32, 1e-6, 3.0) == factor * 1e-6 + 4 * eps * 3.0
    q, k, v = Case(33, 32).inputs("cpu")
    right = truth(q, k, v)
    assert dataclasses.replace(right, naive_error=1.0).budget(precision) == pytest.approx(
        factor, rel=1e-3
    )
    for relative in (right.rows, right.columns):
        wider = dataclasses.replace(relative, naive_error=1.0)
        largest = wider.budgets(precision, torch.float32).max().item()
        assert largest == pytest.approx(factor, rel=1e-3)


def test_tf32_may_be_as_far_off_as_its_bits_are_fewer():
    right = truth(*Case(33, 32).inputs("cpu"))
    for relative in (right.rows, right.columns):
        plain, coarse = (
            relative.budgets(name, torch.float32) - relative.sums for name in ("ieee-fp32", "tf32")
        )
        assert torch.allclose(coarse, 2**13 * plain)
    assert right.budget("tf32") > 2**12 * right.budget("ieee-fp32")


def luckless(right):
    """The truth without plain PyTorch's error, which may be small by luck."""
    rows, columns = (dataclasses.replace(x, naive_error=0.0) for x in (right.rows, right.columns))
    return dataclasses.replace(right, naive_error=0.0, rows=rows, columns=columns)


def sums_one_by_one(q, k, v, softmax_scale, is_causal):
    """float32 attention of a thread per row: every sum in order, each step rounded."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.zeros(*q.shape[:3], k.shape[2])
    for column in range(q.shape[3]):
        scores += q[..., column, None] * k[..., None, :, column]
    scores *= softmax_scale
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    weights = (scores - scores.amax(3, keepdim=True) - 0.69267).exp()
    o, row_sum = torch.zeros_like(q), torch.zeros(*q.shape[:3], 1)
    for key in range(k.shape[2]):
        o += weights[..., key, None] * v[:, :, None, key]
        row_sum += weights[..., key, None]
    return (o / row_sum).transpose(1, 2).contiguous()


def in_tiles(q, k, v, softmax_scale, is_causal, divide=False, tile=64):
    """An online softmax in float32; divide: O is divided in every tile, as in versions 1 to 4."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    row_max = torch.full((*q.shape[:3], 1), -torch.inf)
    row_sum, o = torch.zeros_like(row_max), torch.zeros_like(q)
    position = torch.arange(k.shape[2])
    for n in range(0, k.shape[2], tile):
        scores = (q @ k[:, :, n : n + tile].mT) * softmax_scale
        if is_causal:
            hidden = position[n : n + tile] > position[:, None]
            scores.masked_fill_(hidden, -torch.inf)
        before, row_max = row_max, torch.maximum(row_max, scores.amax(3, keepdim=True))
        alpha, weights = (before - row_max).exp(), (scores - row_max).exp()
        old_sum, row_sum = row_sum, alpha * row_sum + weights.sum(3, keepdim=True)
        product = weights @ v[:, :, n : n + tile]
        o = (old_sum * alpha * o + product) / row_sum if divide else alpha * o + product
    return (o if divide else o / row_sum).transpose(1, 2).contiguous()


RIGHT = {
    "one by one": sums_one_by_one,
    "tiles": in_tiles,
    "divided in every tile": functools.partial(in_tiles, divide=True),
} | {
    name: get_backend(name).load().attention
    for name in ("PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION", "NUMPY_BASIC")
}


@pytest.mark.parametrize(
    ("seqlen", "scale", "is_causal"), [(31, 8.0, True), (64, 8.0, False), (5, 1.0, True)]
)
def test_no_right_kernel_fails_by_luck(seqlen, scale, is_causal):
    """Of 1,000 seeds each of these failed a few when plain PyTorch's error alone was the measure.

    Without it the budgets hold, so they do not depend on it.
    """
    for seed in range(12):
        case = Case(seqlen, 32, scale, is_causal=is_causal, seed=seed)
        q, k, v = case.inputs("cpu")
        right = luckless(truth(q, k, v, is_causal=is_causal))
        for name, kernel in RIGHT.items():
            verdict = right.judge(kernel(q, k, v, 32**-0.5, is_causal), "ieee-fp32")
            assert verdict.status == "passed", (name, case, verdict)


def tensor_cores(q, k, v, *, fresh):
    """A few rows of full attention in 3xTF32, with sums of 8 products as tensor cores keep them.

    fresh: a tile of 64 keys has an accumulator of its own, which float32 adds to O. Otherwise O
    stays in one accumulator, truncated 512 times for 4,096 keys.
    """
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    weights = ((q @ k.T) * q.shape[1] ** -0.5).softmax(1).float()
    products = (weights.double()[:, :, None] * v).unflatten(1, (-1, 8)).sum(2)

    def truncated(x):
        bits = x.to(torch.float32)
        too_large = bits.double().abs() > x.abs()
        return torch.where(too_large, torch.nextafter(bits, torch.zeros(())), bits).double()

    o = torch.zeros(q.shape)
    accumulator = torch.zeros(q.shape).double()
    for step in range(products.shape[1]):
        accumulator = truncated(accumulator + products[:, step])
        if fresh and step % 8 == 7:
            o += accumulator.float()
            accumulator.zero_()
    return (o if fresh else accumulator.float())[None, :, None]


@pytest.mark.parametrize("mean", [0.0, 2.5])
def test_an_error_that_grows_with_the_length_fails(mean):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4096, 1, 64, generator=generator)
    q, v = q[:, :16], v + mean
    right = truth(q, k, v, is_causal=False)
    for precision in ("3xtf32", "ieee-fp32"):
        assert right.judge(tensor_cores(q, k, v, fresh=True), precision).status == "passed"
        assert not right.judge(tensor_cores(q, k, v, fresh=False), precision).passed
    assert right.judge(in_tiles(q, k, v, 64**-0.5, False, divide=True), "ieee-fp32").passed


def test_weights_that_are_rounded_to_16_bits_pass():
    """As on tensor cores: P is rounded before it multiplies V, but not in the row's sum.

    Here it is relative to a maximum that is 0.69267 too large, which puts the largest P in the
    middle between two numbers of float16.
    """
    q, k, v = Case(20, 64, scale=8.0, dtype=torch.float16, seed=17).inputs("cpu")
    scores = 4 * (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1))
    scores.masked_fill_(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    weights = (scores - scores.amax(3, keepdim=True) - 0.69267).exp()
    o = weights.half().float() @ v.float().transpose(1, 2) / weights.sum(3, keepdim=True)
    verdict = judge(o.half().transpose(1, 2), q, k, v, 4.0, precision="fp16")
    assert verdict.passed, verdict


def test_the_rows_decide_where_the_maximum_does_not():
    q, k, v = Case(1024, 32).inputs("cpu")
    right = truth(q, k, v)
    out = right.reference.clone()
    out[0, 1000] *= 1 + 1e-5
    verdict = right.judge(out.float(), "ieee-fp32")
    assert verdict.error <= verdict.budget
    assert verdict.row_error == pytest.approx(1e-5, rel=0.1)
    assert not verdict.passed
    assert verdict.where.endswith("over the budget are 64 of 65536 elements, in row 1000")


def test_a_large_column_hides_no_error_of_the_others():
    q, k, v = Case(100, 32, is_causal=False, kind="one large column").inputs("cpu")
    right = truth(q, k, v, is_causal=False)
    out = right.reference.float()
    assert right.judge(out, "ieee-fp32").passed
    out[:, :, 1, 7] *= 1 + 1e-3
    verdict = right.judge(out, "ieee-fp32")
    assert verdict.error <= verdict.budget
    assert verdict.row_error <= verdict.row_budget
    assert verdict.column_error > 50 * verdict.column_budget
    assert not verdict.passed
    assert verdict.where.endswith("in head 1, column 7")


def test_a_row_or_a_column_of_a_few_numbers_is_not_judged():
    """One number that cancels to nothing has an error of any relative size."""
    for seqlen, head_dim, relative in ((40, 1, "rows"), (4, 32, "columns")):
        right = truth(*Case(seqlen, head_dim).inputs("cpu"))
        assert getattr(right, relative).budgets("ieee-fp32", torch.float32).min() == math.inf
        assert not right.judge(right.reference.float() + 1e-4, "ieee-fp32").passed


def test_small_rows_beside_large_ones_are_judged():
    q, k, v = Case(100, 32, kind="halves").inputs("cpu")
    right = truth(q, k, v)
    out = right.reference.float()
    out[0, 20] *= 1 + 1e-4
    verdict = right.judge(out, "ieee-fp32")
    assert verdict.where.endswith(" in row 20")


def test_double_precision_is_not_held_to_the_error_of_float32():
    q, k, v = Case(65, 32, dtype=torch.float64).inputs("cpu")
    good = naive_attention(q, k, v)
    assert judge(good, q, k, v, precision="fp64").passed
    assert not judge(good + 1e-12, q, k, v, precision="fp64").passed
    in_float32 = naive_attention(q.float(), k.float(), v.float()).double()
    assert not judge(in_float32, q, k, v, precision="fp64").passed


def test_a_failure_says_where_it_is():
    q, k, v = Case(64, 32, batch=2, num_heads=3).inputs("cpu")
    reference = reference_attention(q, k, v)
    good = reference.float()
    assert judge(good, q, k, v).where == ""
    wrong = good.clone()
    wrong[1, 40:, 2, 1::2] += 1
    wrong[1, 50, 2, 7] = 9
    verdict = judge(wrong, q, k, v)
    worst = f"9 instead of {reference[1, 50, 2, 7].item():.6g} at batch 1, row 50, head 2, column 7"
    over = (
        "384 of 12288 elements, in batch 1, rows 40 to 63, head 2, 16 of 32 columns (1, 3, 5, ...)"
    )
    assert verdict.where == f"{worst}; over the budget are {over}"
    assert str(verdict).endswith(f"budget {verdict.column_budget:.2e}; {verdict.where}")
    wrong[0, 3, 1, 5] = torch.nan  # worse than any number, an infinity too
    wrong[0, 0, 0, 0] = torch.inf
    where = judge(wrong, q, k, v).where
    assert where.startswith("nan instead of ")
    assert " at batch 0, row 3, head 1, column 5; " in where
    everywhere = judge(good + 1, q, k, v).where
    assert everywhere.endswith("; over the budget are 12288 of 12288 elements")
    assert str(judge(good[:, :9], q, k, v)) == (
        "the output is (2, 9, 3, 32) float32, not (2, 64, 3, 32) float32"
    )


@pytest.mark.parametrize("limit", [1, 7 * 65, 65 * 65, 2 * 65 * 65])
def test_large_inputs_are_judged_in_parts(limit, monkeypatch):
    """Of a head's rows, of one head, of two."""
    q, k, v = Case(65, 32, batch=2, num_heads=3).inputs("cpu")
    wrong = naive_attention(q, k, v)
    wrong[1, 64, 2] += 1e-3
    whole = judge(wrong, q, k, v)
    monkeypatch.setattr("attention_kernels.judge.truth.LARGEST_SCORES", limit)
    parts = judge(wrong, q, k, v)
    assert parts.error == pytest.approx(whole.error, rel=1e-9)
    assert parts.row_error == pytest.approx(whole.row_error, rel=1e-9)
    assert parts.column_error == pytest.approx(whole.column_error, rel=1e-9)
    assert parts.where.endswith("32 of 12480 elements, in batch 1, row 64, head 2")
    # Batched products may round differently.
    assert parts.budget == pytest.approx(whole.budget, rel=0.2)
    assert parts.row_budget == pytest.approx(whole.row_budget, rel=0.2)
    assert parts.column_budget == pytest.approx(whole.column_budget, rel=0.2)
    last_row = truth(q[:, -1:], k, v).reference
    torch.testing.assert_close(last_row, truth(q, k, v).reference[:, -1:])
    for place in ((0, 0, 0, 0), (1, 64, 2, 31)):  # in the first part and in the last
        nan = wrong.clone()
        nan[place] = torch.nan
        assert judge(nan, q, k, v).error == math.inf


def test_the_relative_error_is_of_what_is_not_next_to_zero():
    q, k, v = Case(9, 32).inputs("cpu")
    v[:, :, :, 0] = 1e-6
    v[:, :, :, 1] = 2.0
    out = reference_attention(q, k, v).float()
    out[0, 3, 0, 0] += 1e-4  # a hundred times its value, which is below RELATIVE_FROM
    out[0, 5, 1, 1] += 0.5
    assert judge(out, q, k, v).relative_error == pytest.approx(0.25, rel=1e-4)


def test_an_overflow_of_plain_pytorch_leaves_no_budget():
    q, k, v = (100 * x for x in Case(9, 32, dtype=torch.float16).inputs("cpu"))
    q[0, 3] = 6e4
    assert not math.isfinite(judge(naive_attention(q, k, v), q, k, v).budget)


def test_zeros_are_no_evidence():
    q, k, v = Case(9, 32).inputs("cpu")
    verdict = judge(torch.zeros_like(v), q, k, torch.zeros_like(v))
    assert (verdict.error, verdict.budget, verdict.passed) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("error", "budget", "row_error", "nearness", "status"),
    [
        (1.0, 2.0, 0.0, 0.5, "passed"),
        (1.0, 2.0, 0.9, 0.9, "borderline"),
        (4.0, 2.0, 0.0, 2.0, "failed"),
        (1.0, 2.0, 3.0, 3.0, "failed"),
        (0.0, 0.0, 0.0, math.inf, "failed"),
        (1.0, 0.0, 0.0, math.inf, "failed"),
        (1.0, math.nan, 0.0, math.inf, "failed"),
        (math.nan, 1.0, 0.0, math.inf, "failed"),
    ],
)
def test_how_near_an_error_is_to_its_budget(error, budget, row_error, nearness, status):
    verdict = Verdict(error, budget, 0.0, row_error=row_error, row_budget=1.0)
    assert (verdict.nearness, verdict.status) == (nearness, status)
