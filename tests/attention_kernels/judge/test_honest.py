"""The judge passes honest kernels, however unusual, whatever the seed.

HONEST_KERNEL_SEEDS=1000 looks for false alarms in the cases of as many seeds.
"""

from __future__ import annotations

import functools
import itertools
import os
import random

import pytest
import torch

from attention_kernels.contract import dtype_name
from attention_kernels.judge import cases, suite
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import leaks, run_case, run_check
from attention_kernels.judge.truth import truth
from tests.attention_kernels.judge.honest import HONEST, LARGEST_TF32_SCALE

SEEDS = int(os.environ.get("HONEST_KERNEL_SEEDS", "1"))
DTYPES = (*[torch.float32] * 3, torch.float16, torch.bfloat16, torch.float64)


def cases_of(seed):
    """Yield the suite's fixed cases of a seed, and a sample of the others, if they are small."""
    for dtype in dict.fromkeys(DTYPES):
        fixed = cases.hard_cases(cases.ANY_HEAD_DIM, dtype, seed, is_emulated=True)
        if dtype != torch.float32:
            fixed = [case for case in fixed if case.kind not in cases.EXTREMES]
        yield from (case for case in fixed if case.work <= 2e6)
    draw = random.Random(f"honest kernels {seed}")
    options = {"is_emulated": True, "is_aligned": True}
    for op, count in (("attention", 14), ("decode", 3)):
        drawn = cases.ordered_cases(op, cases.ANY_HEAD_DIM, DTYPES, seed, **options)
        small = [c for c, _ in drawn if c.work <= (1e7 if op == "attention" else 2e6)]
        yield from draw.sample([case for case in small if case.scale < 1e3], count)


def test_no_false_alarm(monkeypatch):
    alarms, tried = [], set()
    for case in itertools.chain.from_iterable(map(cases_of, range(1, 1 + SEEDS))):
        inputs = case.inputs("cpu")
        monkeypatch.setattr(suite, "truth", functools.cache(truth))  # one for all kernels
        for kernel in HONEST:
            precision = kernel.precisions.get(dtype_name(case.dtype))
            if precision is None or (precision == "tf32" and case.scale > LARGEST_TF32_SCALE):
                continue
            scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
            if isinstance(case, Case):
                o = kernel.attention(*inputs, scale, case.is_causal)
            else:
                o = kernel.decode(*inputs, scale)
            verdict = suite._judge(kernel.runner, suite._truth(case, inputs), o)
            tried.add(kernel.name)
            if not verdict.passed:
                alarms.append(f"{kernel.name}: {case}: {verdict}")
    assert not alarms
    assert tried == {kernel.name for kernel in HONEST}


@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_keys_that_a_row_does_not_see_change_nothing(kernel):
    for dtype in kernel.dtypes:
        case = Case(65, 32, dtype=dtype)
        assert run_check(kernel.runner, leaks(kernel.runner, case, [41])) is None


def kernels(*names):
    return pytest.mark.parametrize("kernel", [k for k in HONEST if k.name in names])


@kernels("keys_in_random_order", "every_eighth_key_per_lane")
def test_one_number_that_cancels_is_not_judged_by_luck(kernel):
    """Plain PyTorch's error is small here by luck, and so are the scores and the output."""
    lengths = (18, 13, 10, 2, 12, 2, 17, 3)
    case = DecodeCase(1, torch.float32, 615, lengths, 49, 1, scale=0.02, softmax_scale=-0.5)
    verdict = run_case(kernel.spec(), case, "cpu")
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("kind", "softmax_scale"), [("offset", None), ("offset", 0.3), ("offset", 0.6), ("normal", 0.6)]
)
@kernels("one_key_at_a_time", "transposed")
def test_a_long_row_may_be_summed_key_by_key(kernel, kind, softmax_scale):
    """Small weights are lost one by one, and the largest of many drifts is five times the usual."""
    q, k, v = Case(2048, 64, kind=kind, seed=5).inputs("cpu")
    q, scale = q[:, -128:], softmax_scale or 64**-0.5
    o = kernel.attention(q, k, v, scale, False)
    verdict = truth(q, k, v, scale, False).judge(o, "ieee-fp32")
    assert verdict.status == "passed", verdict
