"""The judge passes right kernels, however unusual, whatever the seed."""

from __future__ import annotations

import pytest

from attention_kernels.judge import conformance
from attention_kernels.judge.cases import Case
from attention_kernels.judge.conformance import future_leaks, verify
from tests.attention_kernels.judge.right_kernels import RIGHT, run

every_kernel = pytest.mark.parametrize("kernel", RIGHT, ids=lambda kernel: kernel.name)


@pytest.mark.parametrize(
    "seeds", [range(1, 3), pytest.param(range(1000, 1010), marks=pytest.mark.slow)]
)
def test_no_false_alarm(seeds):
    _, outcomes = run(seeds)
    assert len(outcomes) >= 30
    assert not {name: found.alarms for name, found in outcomes.items() if found.alarms}
    assert all(outcome.cases > len(seeds) for outcome in outcomes.values())


@every_kernel
def test_keys_that_a_row_does_not_see_change_nothing(kernel):
    for dtype in kernel.dtypes:
        case = Case(65, 32, dtype=dtype)
        assert future_leaks(kernel.spec(), case, "cpu", 41) is None


@pytest.mark.slow
@every_kernel
def test_the_whole_suite_passes(kernel, monkeypatch):
    monkeypatch.setattr(conformance, "REPEATS", 50)
    report = verify(kernel.spec(), "cpu", seed=0)
    assert report.passed, report.failures[:3]
    assert not report.refusals
