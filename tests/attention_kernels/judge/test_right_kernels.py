"""The judge passes right kernels, however unusual, whatever the seed."""

from __future__ import annotations

import os

import pytest
import torch

from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import future_leaks, run_case
from attention_kernels.judge.truth import judge
from tests.attention_kernels.judge.false_alarms import run
from tests.attention_kernels.judge.right_kernels import RIGHT

SEEDS = int(os.environ.get("RIGHT_KERNEL_SEEDS", "1"))
every_kernel = pytest.mark.parametrize("kernel", RIGHT, ids=lambda kernel: kernel.name)


def spec_of(name):
    (spec,) = (kernel.spec() for kernel in RIGHT if kernel.name.upper() == name)
    return spec


def test_no_false_alarm():
    _, outcomes = run(range(1, 1 + SEEDS))
    assert not {name: found.alarms for name, found in outcomes.items() if found.alarms}
    assert all(outcome.cases > SEEDS for outcome in outcomes.values())


@every_kernel
def test_keys_that_a_row_does_not_see_change_nothing(kernel):
    for dtype in kernel.dtypes:
        case = Case(65, 32, dtype=dtype)
        assert future_leaks(kernel.spec(), case, "cpu", 41) is None


@pytest.mark.parametrize("name", ["KEYS_IN_RANDOM_ORDER", "EVERY_EIGHTH_KEY_PER_LANE"])
def test_one_number_that_cancels_is_not_judged_by_luck(name):
    """Plain PyTorch's error is small here by luck, and so are the scores and the output."""
    lengths = (18, 13, 10, 2, 12, 2, 17, 3)
    case = DecodeCase(1, torch.float32, 615, lengths, 49, 1, scale=0.02, softmax_scale=-0.5)
    verdict = run_case(spec_of(name), case, "cpu")
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("kind", "softmax_scale"), [("offset", None), ("offset", 0.3), ("offset", 0.6), ("normal", 0.6)]
)
@pytest.mark.parametrize("name", ["ONE_KEY_AT_A_TIME", "TRANSPOSED"])
def test_a_long_row_may_be_summed_key_by_key(name, kind, softmax_scale):
    """Small weights are lost one by one, and the largest of many drifts is five times the usual."""
    q, k, v = Case(2048, 64, kind=kind, seed=5).inputs("cpu")
    q, scale = q[:, -128:], softmax_scale or 64**-0.5
    o = spec_of(name).load().attention(q, k, v, scale, False)
    verdict = judge(o, q, k, v, scale, False)
    assert verdict.status == "passed", verdict
