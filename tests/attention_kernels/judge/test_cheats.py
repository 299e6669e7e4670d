"""verify() fails every cheat of the table, with the right reason."""

from __future__ import annotations

import re

import pytest
import torch

from attention_kernels.judge import suite
from attention_kernels.judge.suite import verify
from tests.attention_kernels.judge import decode_cheats, state_cheats  # noqa: F401 - add their rows
from tests.attention_kernels.judge.cheats import CHEATS


@pytest.mark.parametrize(
    "cheat",
    [pytest.param(cheat, id=cheat.name, marks=[pytest.mark.slow] * cheat.slow) for cheat in CHEATS],
)
def test_a_cheat_fails(cheat, request, monkeypatch):
    precision = torch.get_float32_matmul_precision()
    request.addfinalizer(lambda: torch.set_float32_matmul_precision(precision))
    if "call" not in cheat.reported:  # one of the cases catches it
        monkeypatch.setattr(suite, "REPEATS", 50)
    whole = suite.cases_for
    monkeypatch.setattr(suite, "cases_for", lambda *a, **o: [*filter(cheat.wrong, whole(*a, **o))])
    report = verify(cheat.spec(), "cpu", seed=0, max_failures=1)
    assert not report.passed
    assert re.search(cheat.reported, str(report.failures[0])), report.failures[0]
