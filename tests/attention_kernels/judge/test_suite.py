"""verify() tells what is wrong, by name and with its worst case; cheats.py has what it catches."""

from __future__ import annotations

import pytest
import torch

from attention_kernels import BackendSpec, UnavailableBackendError, UnsupportedError
from attention_kernels.contract import Kernels
from attention_kernels.judge import suite
from attention_kernels.judge.suite import Case, leaks, run_check, verify
from attention_kernels.judge.truth import naive_attention as right
from attention_kernels.judge.worker import Runner


def spec_of(kernel, **fields) -> BackendSpec:
    defaults = {"precisions": {"float32": "ieee-fp32"}, "head_dims": (32,)}
    return BackendSpec(
        name="TEST_VERIFY",
        family="test",
        summary="A backend of a test.",
        loader=lambda: Kernels(kernel),
        **(defaults | fields),
    )


def shorten(monkeypatch, choose):
    """Replace the suite by `choose` of its cases, with few repetitions of one call."""
    whole = suite.cases_for
    monkeypatch.setattr(suite, "cases_for", lambda *args, **named: choose(whole(*args, **named)))
    monkeypatch.setattr(suite, "REPEATS", 10)


def unwritten(*inputs):
    o = right(*inputs)
    o[:, 31::32, 1] = torch.nan
    return o


def varies(*inputs):
    o = right(*inputs)
    o[0, 7] += 1e-9 * torch.rand(())  # within every budget
    return o


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (unwritten, "the output is not finite: 32 of 2624 elements, in row 31"),
        (lambda *x: right(*x[:4], False), "keys and values from 41 on change earlier rows: "),
        (varies, "None"),
        (right, "None"),
    ],
)
def test_a_leak_of_the_future_is_told_from_what_is_not_the_same_twice(kernel, words):
    runner = Runner(spec_of(kernel), "cpu")
    assert str(run_check(runner, leaks(runner, Case(100, 32), [41]))).startswith(words)


def raises(error):
    calls = []

    def kernel(*inputs):
        calls.append(inputs)
        raise error

    return calls, spec_of(kernel)


def test_the_suite_stops_after_its_first_failures_or_when_nothing_else_can_come():
    report = verify(spec_of(lambda *inputs: right(*inputs) * 1.1), "cpu", seed=0)
    assert (report.stopped, len(report.failures)) == (True, 20)
    assert 20 <= report.checks < report.total
    endless = "attention_kernels::x: cudaErrorLaunchTimeout: the launch timed out"
    calls, spec = raises(RuntimeError(endless))
    report = verify(spec, "cpu", seed=0)
    assert (len(calls), report.stopped) == (1, True)
    assert report.failures[0].why == "cudaErrorLaunchTimeout: the launch timed out"


def test_a_backend_that_takes_nothing_or_is_gone_has_not_passed(monkeypatch):
    shorten(monkeypatch, lambda cases: cases[:40])
    monkeypatch.setattr(suite, "MOST_REFUSALS", 20)
    calls, spec = raises(UnsupportedError("TEST_VERIFY", ["no"]))
    report = verify(spec, "cpu", seed=0)
    assert not report.passed
    assert report.failures == []
    assert report.stopped
    assert len(calls) <= 40
    assert {text.rpartition(": ")[2] for text in report.refusals} == {"no"}
    assert len(report.refusals) < len(calls)  # the same reason once for all cases
    _, spec = raises(UnavailableBackendError("TEST_VERIFY", "gone"))
    (failure,) = verify(spec, "cpu", seed=0, max_failures=1).failures
    assert failure.why.endswith("gone")
    with pytest.raises(UnavailableBackendError):
        verify(spec_of(right, device_types=("cuda",)), "cpu", seed=0)


def test_what_is_prepared_while_the_backend_works_changes_no_verdict(monkeypatch):
    calls = []

    def refuse_some(q, k, v, softmax_scale, is_causal):
        calls.append(q.shape)
        if q.shape[3] == 64:
            raise UnsupportedError("TEST_VERIFY", ["head_dim 64"])
        return right(q, k, v, softmax_scale, is_causal) * (q.shape[1] < 40)

    def found():
        calls.clear()
        report = verify(spec_of(refuse_some, head_dims=(32, 64)), "cpu", seed=0, max_failures=3)
        return report.failures, report.refusals, len(calls)

    shorten(monkeypatch, lambda cases: cases[:60])
    at_once = found()
    monkeypatch.setattr(suite, "MOST_AHEAD", 1)
    assert found() == at_once
