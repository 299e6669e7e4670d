"""What the clock forgives; test_cheats.py has the kernels that it catches."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from attention_kernels.judge.clock import Clock, Numbers, RejectedTimeError
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.worker import Timing


@pytest.mark.parametrize(("checks_s", "passes"), [(1.5e-3, True), (0.0, False)])
def test_the_time_of_factors_and_checksum_counts_for_nobody(checks_s, passes, monkeypatch):
    """As measured on an H200, with 1 GB of inputs and outputs and a kernel of 1.85 ms."""
    clock = Clock(SimpleNamespace(device="cuda"), Numbers(Case(64, 32), 5))
    inside = {"once": 1.85e-3, "often": 1.85e-3}
    outside = {"once_outside": 4.45e-3, "often_outside": 1.86e-3}
    clock._timings = [Timing(0, 0, [], **inside, **outside, passes=11)] * 5
    monkeypatch.setattr(Numbers, "checks_s", lambda *_: checks_s)
    with contextlib.nullcontext() if passes else pytest.raises(RejectedTimeError, match="clocks"):
        clock.check()
