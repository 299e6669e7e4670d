from __future__ import annotations

import math

import pytest
import torch

from attention_kernels import reference
from attention_kernels.conformance import Case
from attention_kernels.reference import (
    Verdict,
    error_budget,
    judge,
    naive_attention,
    naive_error,
    reference_attention,
)


@pytest.mark.parametrize("is_causal", [True, False])
def test_reference_equals_the_definition_written_out(is_causal):
    q, k, v = (torch.randn(2, 5, 2, 3, dtype=torch.float64) for _ in range(3))
    out = reference_attention(q, k, v, 0.7, is_causal)
    for b in range(2):
        for h in range(2):
            for i in range(5):
                keys = range(i + 1) if is_causal else range(5)
                weights = [math.exp(0.7 * float(q[b, i, h] @ k[b, j, h])) for j in keys]
                row = sum(w * v[b, j, h] for w, j in zip(weights, keys, strict=True)) / sum(weights)
                assert torch.allclose(out[b, i, h], row, rtol=0, atol=1e-14)


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
    ("precision", "factor"), [("ieee-fp32", 2), ("fp16", 2), ("3xtf32", 8), ("fp64", 4)]
)
def test_the_budget_is_a_multiple_of_plain_pytorchs_error_and_four_ulps(precision, factor):
    eps = torch.finfo(torch.float32).eps
    assert error_budget(precision, torch.float32, 1e-6, 3.0) == factor * 1e-6 + 4 * eps * 3.0
    q, k, v = Case(33, 32).inputs("cpu")
    largest = reference_attention(q, k, v).abs().max().item()
    found = judge(naive_attention(q, k, v), q, k, v, precision=precision)
    assert found.budget == error_budget(precision, q.dtype, naive_error(q, k, v), largest)


def test_double_precision_is_not_held_to_the_error_of_float32():
    q, k, v = Case(65, 32, dtype=torch.float64).inputs("cpu")
    good = naive_attention(q, k, v)
    assert judge(good, q, k, v, precision="fp64").passed
    assert not judge(good + 1e-12, q, k, v, precision="fp64").passed
    in_float32 = naive_attention(q.float(), k.float(), v.float()).double()
    assert not judge(in_float32, q, k, v, precision="fp64").passed


def test_an_off_by_one_mask_is_caught():
    q, k, v = Case(33, 32).inputs("cpu")
    shifted = torch.cat([v[:, :1], naive_attention(q, k, v)[:, :-1]], 1)
    assert not judge(shifted, q, k, v).passed


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
    assert str(verdict).endswith(f"budget {verdict.budget:.2e}; {verdict.where}")
    wrong[0, 3, 1, 5] = torch.nan  # worse than any number, an infinity too
    wrong[0, 0, 0, 0] = torch.inf
    where = judge(wrong, q, k, v).where
    assert where.startswith("nan instead of ")
    assert " at batch 0, row 3, head 1, column 5; " in where
    everywhere = judge(good + 1, q, k, v).where
    assert everywhere.endswith("; over the budget are 12288 of 12288 elements")
    assert judge(good[:, :9], q, k, v).where == (
        "it is (2, 9, 3, 32) torch.float32, not (2, 64, 3, 32) torch.float32"
    )


@pytest.mark.parametrize("limit", [1, 7 * 65, 65 * 65, 2 * 65 * 65])
def test_large_inputs_are_judged_in_parts(limit, monkeypatch):
    """Of a head's rows, of one head, of two."""
    scores = []
    original = reference.naive_attention

    def noted(q, k, *others, **options):
        scores.append(q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1])
        return original(q, k, *others, **options)

    monkeypatch.setattr(reference, "naive_attention", noted)
    q, k, v = Case(65, 32, batch=2, num_heads=3).inputs("cpu")
    wrong = naive_attention(q, k, v)
    wrong[1, 64, 2] += 1e-3
    whole = judge(wrong, q, k, v)
    monkeypatch.setattr("attention_kernels.reference.LARGEST_SCORES", limit)
    scores.clear()
    parts = judge(wrong, q, k, v)
    assert max(scores) <= max(limit, 65)
    assert parts.error == pytest.approx(whole.error, rel=1e-9)
    assert parts.where.endswith("32 of 12480 elements, in batch 1, row 64, head 2")
    assert parts.budget == pytest.approx(whole.budget, rel=0.2)  # batched products may round apart
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


def test_nan_never_passes():
    assert not Verdict(math.nan, math.inf, 0.0).passed


@pytest.mark.parametrize(
    ("error", "budget", "nearness"),
    [
        (1.0, 2.0, 0.5),
        (4.0, 2.0, 2.0),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.nan, 1.0, math.inf),
    ],
)
def test_what_has_no_budget_is_farthest_over_it(error, budget, nearness):
    assert Verdict(error, budget, 0.0).nearness == nearness
