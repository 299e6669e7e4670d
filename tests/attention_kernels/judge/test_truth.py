"""Truth is float64, and each rule of the budgets fails what no other does."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from attention_kernels.judge.inputs import Case
from attention_kernels.judge.truth import Verdict, error_budget, naive_attention, truth
from tests.attention_kernels.judge.honest import HONEST, truncated


def judge(o, q, k, v, *arguments, precision="ieee-fp32"):
    return truth(q, k, v, *arguments).judge(o, precision)


@pytest.mark.parametrize("is_causal", [True, False])
def test_reference_equals_the_definition_written_out(is_causal):
    q, k, v = (torch.randn(2, 5, 2, 3, dtype=torch.float64) for _ in range(3))
    out = truth(q, k, v, 0.7, is_causal).reference
    for b in range(2):
        for h in range(2):
            for i in range(5):
                keys = range(i + 1) if is_causal else range(5)
                weights = [math.exp(0.7 * float(q[b, i, h] @ k[b, j, h])) for j in keys]
                row = sum(w * v[b, j, h] for w, j in zip(weights, keys, strict=True)) / sum(weights)
                assert torch.allclose(out[b, i, h], row, rtol=0, atol=1e-14)


def test_naive_passes_and_what_is_wrong_fails():
    q, k, v = Case(65, 32, batch=2).inputs("cpu")
    good = naive_attention(q, k, v)
    assert judge(good, q, k, v).passed
    nan = good.clone()
    nan[0, 3, 1, 5] = torch.nan
    assert judge(nan, q, k, v).error == math.inf
    for wrong in (
        nan,
        good[:, :-1],
        good.double(),
        good + 1e-5,
        naive_attention(q, k, v, is_causal=False),
    ):
        assert not judge(wrong, q, k, v).passed
    double = [x.double() for x in (q, k, v)]
    assert judge(naive_attention(*double), *double, precision="fp64").passed
    assert not judge(naive_attention(*double) + 1e-12, *double, precision="fp64").passed
    assert not judge(good.double(), *double, precision="fp64").passed  # float32's error


def test_zeros_are_no_evidence_and_an_overflow_of_plain_pytorch_leaves_no_budget():
    q, k, v = Case(9, 32).inputs("cpu")
    verdict = judge(torch.zeros_like(v), q, k, torch.zeros_like(v))
    assert (verdict.error, verdict.budget, verdict.passed) == (0.0, 0.0, False)
    q, k, v = (100 * x for x in Case(9, 32, dtype=torch.float16).inputs("cpu"))
    q[0, 3] = 6e4
    verdict = judge(naive_attention(q, k, v), q, k, v)
    assert not math.isfinite(verdict.budget)
    assert not verdict.passed


@pytest.mark.parametrize(
    ("precision", "factor"),
    [("ieee-fp32", 2), ("fp16", 2), ("3xtf32", 4), ("3xfp16", 4), ("fp64", 4), ("tf32", 2**14)],
)
def test_the_budget_is_a_multiple_of_plain_pytorchs_error_and_four_ulps(precision, factor):
    """TF32 may be as far off as its bits are fewer."""
    eps = torch.finfo(torch.float32).eps
    budget = factor * (1e-6 + 4 * eps * 3.0 / (2 if precision == "tf32" else factor))
    assert error_budget(precision, torch.float32, 1e-6, 3.0) == pytest.approx(budget)
    for rule in truth(*Case(33, 32).inputs("cpu")).rules.values():
        wider = dataclasses.replace(rule, naive_error=1.0)
        assert wider.budgets(precision).max().item() == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize(
    ("seqlen", "scale", "is_causal"), [(31, 8.0, True), (64, 8.0, False), (5, 1.0, True)]
)
def test_no_right_kernel_fails_by_luck(seqlen, scale, is_causal):
    """With plain PyTorch's error as the only measure, each case failed for a few of 1,000 seeds.

    The budgets hold without that error, so they do not depend on it.
    """
    for seed in range(12):
        case = Case(seqlen, 32, scale, is_causal=is_causal, seed=seed)
        q, k, v = case.inputs("cpu")
        right = truth(q, k, v, is_causal=is_causal)
        rules = {
            name: dataclasses.replace(rule, naive_error=0.0) for name, rule in right.rules.items()
        }
        right = dataclasses.replace(right, rules=rules)
        for kernel in HONEST:
            if kernel.precisions.get("float32") == "ieee-fp32":
                o = kernel.attention(q, k, v, 32**-0.5, is_causal)
                verdict = right.judge(o, "ieee-fp32")
                assert verdict.status == "passed", (kernel.name, case, verdict)


def tensor_cores(q, k, v, *, fresh):
    """A few rows of full attention in 3xTF32, with sums of 8 products as tensor cores keep them.

    fresh: a tile of 64 keys has an accumulator of its own, which float32 adds to O. Otherwise O
    stays in one accumulator, truncated 512 times for 4,096 keys.
    """
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    weights = ((q @ k.T) * q.shape[1] ** -0.5).softmax(1).float()
    products = (weights.double()[:, :, None] * v).unflatten(1, (-1, 8)).sum(2)
    o, accumulator = torch.zeros(q.shape), torch.zeros(q.shape).double()
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


def scaled(o, place, by):
    o = o.clone()
    o[place] *= by
    return o


def test_rows_and_columns_decide_where_the_maximum_does_not():
    right = truth(*Case(1024, 32).inputs("cpu"))
    verdict = right.judge(scaled(right.reference, (0, 1000), 1 + 1e-5).float(), "ieee-fp32")
    assert verdict.error <= verdict.budget
    assert verdict.row_error == pytest.approx(1e-5, rel=0.1)
    assert verdict.where.endswith("over the budget are 64 of 65536 elements, in row 1000")
    q, k, v = Case(100, 32, is_causal=False, kind="one large column").inputs("cpu")
    right = truth(q, k, v, is_causal=False)
    out = right.reference.float()
    assert right.judge(out, "ieee-fp32").passed
    verdict = right.judge(scaled(out, (..., 1, 7), 1 + 1e-3), "ieee-fp32")
    assert verdict.error <= verdict.budget
    assert verdict.row_error <= verdict.row_budget
    assert verdict.column_error > 50 * verdict.column_budget
    assert verdict.where.endswith("in head 1, column 7")
    right = truth(*Case(100, 32, kind="halves").inputs("cpu"))  # small rows beside large ones
    verdict = right.judge(scaled(right.reference.float(), (0, 20), 1 + 1e-4), "ieee-fp32")
    assert verdict.where.endswith(" in row 20")


def test_a_row_or_a_column_of_a_few_numbers_is_not_judged():
    """One number that cancels to nothing has an error of any relative size."""
    for seqlen, head_dim, name in ((40, 1, "row_"), (4, 32, "column_")):
        right = truth(*Case(seqlen, head_dim).inputs("cpu"))
        assert right.rules[name].budgets("ieee-fp32").min() == math.inf
        assert not right.judge(right.reference.float() + 1e-4, "ieee-fp32").passed


def test_a_failure_says_where_it_is():
    q, k, v = Case(64, 32, batch=2, num_heads=3).inputs("cpu")
    reference = truth(q, k, v).reference
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
    words = str(judge(wrong, q, k, v))
    assert words.startswith("the output is not finite; nan instead of ")
    assert " at batch 0, row 3, head 1, column 5; " in words
    assert str(judge(good[:, :9], q, k, v)) == (
        "the output is (2, 9, 3, 32) float32, not (2, 64, 3, 32) float32"
    )


@pytest.mark.parametrize("limit", [7 * 65, 65 * 65, 2 * 65 * 65])
def test_large_inputs_are_judged_in_parts(limit, monkeypatch):
    """The parts are some rows of a head, one head, or two heads."""
    q, k, v = Case(65, 32, batch=2, num_heads=3).inputs("cpu")
    wrong = naive_attention(q, k, v)
    wrong[1, 64, 2] += 1e-3
    whole = judge(wrong, q, k, v)
    monkeypatch.setattr("attention_kernels.judge.truth.LARGEST_SCORES", limit)
    parts = judge(wrong, q, k, v)
    assert parts.where.endswith("32 of 12480 elements, in batch 1, row 64, head 2")
    for rule in ("", "row_", "column_"):
        error, budget = f"{rule}error", f"{rule}budget"
        assert getattr(parts, error) == pytest.approx(getattr(whole, error), rel=1e-9)
        # Batched products may round differently.
        assert getattr(parts, budget) == pytest.approx(getattr(whole, budget), rel=0.2)
    last_row = truth(q[:, -1:], k, v).reference
    torch.testing.assert_close(last_row, truth(q, k, v).reference[:, -1:])
    for place in ((0, 0, 0, 0), (1, 64, 2, 31)):  # in the first part and in the last
        assert judge(scaled(wrong, place, torch.nan), q, k, v).error == math.inf


@pytest.mark.parametrize(
    ("error", "budget", "row_error", "nearness", "status"),
    [
        (1.0, 2.0, 0.0, 0.5, "passed"),
        (1.0, 2.0, 0.9, 0.9, "borderline"),
        (4.0, 2.0, 0.0, 2.0, "failed"),
        (1.0, 2.0, 3.0, 3.0, "failed"),
        (0.0, 0.0, 0.0, math.inf, "failed"),
        (1.0, math.nan, 0.0, math.inf, "failed"),
        (math.nan, 1.0, 0.0, math.inf, "failed"),
    ],
)
def test_how_near_an_error_is_to_its_budget(error, budget, row_error, nearness, status):
    verdict = Verdict(error, budget, 0.0, row_error=row_error, row_budget=1.0)
    assert (verdict.nearness, verdict.status) == (nearness, status)
