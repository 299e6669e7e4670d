"""verify() tells what is wrong, by name and with its worst case; cheats.py has what it catches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attention_kernels import BackendSpec, UnavailableBackendError, UnsupportedError
from attention_kernels.contract import Kernels
from attention_kernels.judge import suite
from attention_kernels.judge.suite import Case, describe_error, future_leaks, verify
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


def races(*inputs):
    o = right(*inputs)
    o[0, 7] += 1e-9 * torch.rand(())  # within every budget
    return o


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (unwritten, "the output is not finite: 96 of 6400 elements, in 3 of 100 rows (31, 63, 95)"),
        (races, "two runs on the same input differ: a race, or a read of uninitialized memory: "),
        (right, "None"),
    ],
)
def test_a_leak_of_the_future_is_told_from_what_is_not_the_same_twice(kernel, words):
    torch.manual_seed(0)
    assert str(future_leaks(spec_of(kernel), Case(100, 32), "cpu", 41)).startswith(words)


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
    _, spec = raises(UnavailableBackendError("TEST_VERIFY", "gone"))
    (failure,) = verify(spec, "cpu", seed=0, max_failures=1).failures
    assert failure.why.endswith("gone")
    with pytest.raises(UnavailableBackendError):
        verify(spec_of(right, device_types=("cuda",)), "cpu", seed=0)


def test_a_refusal_is_listed_once_for_each_reason(monkeypatch):
    def refuse(q, k, v, softmax_scale, is_causal):
        if q.shape[1] in (1, 33):
            raise UnsupportedError("TEST_VERIFY", ["odd" if q.shape[1] == 33 else "one query"])
        return right(q, k, v, softmax_scale, is_causal)

    shorten(monkeypatch, lambda cases: [case for case in cases if case.seqlen in (1, 2, 33)])
    report = verify(spec_of(refuse), "cpu", seed=0)
    assert report.passed
    assert {text.rpartition(": ")[2] for text in report.refusals} == {"odd", "one query"}
    of_cases = [text for text in report.refusals if text.startswith("seqlen")]
    assert len(of_cases) == 2
    assert report.checks < report.total


def test_an_error_is_told_from_its_cause_on():
    op, launch = "attention_kernels::file_c0_v25", "unspecified launch failure"
    for text, words in (
        ("first\nsecond", "RuntimeError: first"),
        (f"{op}: cudaErrorX: x: why", "cudaErrorX: x: why"),
        (f"{op}: cudaErrorLaunchFailure: {launch}: divergence: here", "divergence: here"),
    ):
        assert describe_error(RuntimeError(text)) == words


def test_the_worst_case_is_the_farthest_over_its_budget(monkeypatch):
    def sometimes_nan(q, k, v, softmax_scale, is_causal):
        o = right(q, k, v, softmax_scale, is_causal)
        return o * torch.nan if q.shape[1] == 33 else o

    shorten(monkeypatch, lambda cases: [case for case in cases if case.seqlen in (32, 33)])
    case, verdict = verify(spec_of(sometimes_nan), "cpu", seed=0, max_failures=3).worst
    assert (case.seqlen, verdict.error) == (33, math.inf)


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
    answers = itertools.cycle([False] * 4 + [True])
    monkeypatch.setattr(Runner, "has_answered", lambda _: next(answers))
    assert found() == at_once
