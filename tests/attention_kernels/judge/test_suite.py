"""verify() passes what is right and tells what is wrong, by name and with its worst case."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
import torch

from attention_kernels import (
    BackendSpec,
    UnavailableBackendError,
    UnsupportedError,
    get_backend,
)
from attention_kernels.contract import Kernels
from attention_kernels.judge import suite
from attention_kernels.judge.suite import (
    Case,
    DecodeCase,
    describe_error,
    future_leaks,
    run_case,
    verify,
)
from attention_kernels.judge.truth import naive_attention
from attention_kernels.judge.worker import Runner
from tests.attention_kernels.backends.common import fixed_cases


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


@pytest.mark.parametrize("seed", [9, 14, 24])
def test_no_right_backend_fails_on_an_unlucky_seed(seed):
    """With plain PyTorch's error of one draw for a measure, each of these seeds failed one."""
    for name in ("PYTORCH_SDPA_MATH", "NUMPY_BASIC"):
        for case in fixed_cases((32, 64), lengths=(31, 64), seed=seed):
            assert run_case(get_backend(name), case, "cpu").passed, (name, case)


def test_the_wrong_key_head_is_found():
    """A head of k and v serves neighbouring heads of q, not every second one."""

    def repeats(repeat):
        def attention(q, k, v, softmax_scale, is_causal):
            group = q.shape[2] // k.shape[2]
            return naive_attention(q, repeat(k, group), repeat(v, group), softmax_scale, is_causal)

        return spec_of(attention, supports_gqa=True)

    case = Case(9, 32, num_heads=2, group=2)
    assert run_case(repeats(lambda x, group: x.repeat_interleave(group, 2)), case, "cpu").passed
    assert not run_case(repeats(lambda x, group: x.repeat(1, 1, group, 1)), case, "cpu").passed


def off_by_one(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    return torch.cat([o[:, :1], o[:, :-1]], 1)


def reads_the_future(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    return o + 1e-7 * v.mean(1, keepdim=True)


def hides_too_little(q, k, v, softmax_scale, is_causal):
    """A mask of -46 instead of an infinity: e^-46 of a value remains."""
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    return o + 1e-20 * v.mean(1, keepdim=True)


def sometimes_nan(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    if q.shape[1] == 33:
        o[0, 32] = torch.nan
    return o


def unwritten(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    o[:, 31::32, 1] = torch.nan
    return o


def races(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    o[0, 7] += 1e-9 * torch.rand(())  # within every budget
    return o


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (
            unwritten,
            "the output is not finite: 96 of 6400 elements, in 3 of 100 rows (31, 63, 95), head 1",
        ),
        (races, "two runs on the same input differ: a race, or a read of uninitialized memory: "),
        (
            reads_the_future,
            "keys and values from 41 on change earlier rows: 2624 of 2624 elements",
        ),
        (hides_too_little, "keys and values from 41 on change earlier rows: "),
    ],
)
def test_a_leak_of_the_future_is_told_from_what_is_not_the_same_twice(kernel, words):
    torch.manual_seed(0)
    found = future_leaks(spec_of(kernel), Case(100, 32), "cpu", 41)
    assert found is not None
    assert found.startswith(words)
    assert future_leaks(spec_of(naive_attention), Case(100, 32), "cpu", 41) is None


def test_a_decode_that_is_wrong_says_where():
    def decode(q, k_cache, v_cache, seqlens, softmax_scale):
        o = right(q, k_cache, v_cache, seqlens, softmax_scale)
        o[1, 0, 1, 3] += 1
        return o

    right = get_backend("NAIVE_PYTORCH").load().decode
    spec = dataclasses.replace(
        spec_of(naive_attention), loader=lambda: Kernels(naive_attention, decode)
    )
    verdict = run_case(spec, DecodeCase(32), "cpu")
    assert not verdict.passed
    assert "at batch 1, row 0, head 1, column 3; over the budget are 1 of 192" in verdict.where
    (failure,) = verify(spec, "cpu", seed=0, max_failures=1).failures
    assert failure.what.startswith("decode, head_dim 32")


def test_the_suite_stops_after_its_first_failures():
    report = verify(spec_of(off_by_one), "cpu", seed=0)
    assert (report.stopped, len(report.failures)) == (True, 20)
    assert 20 <= report.checks < report.total
    assert len(verify(spec_of(off_by_one), "cpu", seed=0, max_failures=1).failures) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (RuntimeError("attention_kernels::v07: cudaErrorX: x: why"), "cudaErrorX: x: why"),
        (
            RuntimeError(
                "attention_kernels::file_c0588637_v25: cudaErrorLaunchFailure: unspecified launch "
                "failure: divergence: here"
            ),
            "divergence: here",
        ),
        (
            RuntimeError(
                "attention_kernels::v25: cudaErrorLaunchFailure: unspecified launch failure"
            ),
            "cudaErrorLaunchFailure: unspecified launch failure",
        ),
        (UnavailableBackendError("A", "no"), "attention backend A is not available here: no"),
    ],
)
def test_an_error_is_told_from_its_cause_on(error, words):
    assert describe_error(error) == words


def test_a_backend_that_is_gone_when_it_is_called_has_failed():
    def vanishes(q, k, v, softmax_scale, is_causal):
        raise UnavailableBackendError("TEST_VERIFY", "gone")

    (failure,) = verify(spec_of(vanishes), "cpu", seed=0, max_failures=1).failures
    assert failure.why.endswith("gone")


def test_the_worst_case_is_the_farthest_over_its_budget(monkeypatch):
    shorten(monkeypatch, lambda cases: [case for case in cases if case.seqlen in (32, 33)])
    case, verdict = verify(spec_of(sometimes_nan), "cpu", seed=0, max_failures=3).worst
    assert (case.seqlen, verdict.error) == (33, math.inf)


def test_a_backend_that_takes_nothing_has_not_passed():
    def refuse(q, k, v, softmax_scale, is_causal):
        raise UnsupportedError("TEST_VERIFY", ["no"])

    report = verify(spec_of(refuse), "cpu", seed=0)
    assert not report.passed
    kinds = [re.sub(r"\d+", "#", text.partition(",")[0]) for text in report.refusals]
    # Two checks of leaks, cases of two lengths, repeated calls, and calls with 1, 2 and 5 threads.
    assert kinds == [*["seqlen #"] * 4, "# calls: no", "# thread", *["# threads"] * 2]
    assert report.failures == []
    with pytest.raises(UnavailableBackendError):
        verify(spec_of(refuse, device_types=("cuda",)), "cpu", seed=0)


def test_one_length_that_is_refused_hides_no_other(monkeypatch):
    """As cuDNN does with one query."""

    def refuse_one(q, k, v, softmax_scale, is_causal):
        if q.shape[1] == 1:
            raise UnsupportedError("TEST_VERIFY", ["one query"])
        return naive_attention(q, k, v, softmax_scale, is_causal) * (q.shape[1] != 33)

    shorten(monkeypatch, lambda cases: [case for case in cases if case.seqlen in (1, 33)])
    report = verify(spec_of(refuse_one), "cpu", seed=0, max_failures=1)
    assert [text.split(",")[0] for text in report.refusals] == ["seqlen 1"]
    assert "seqlen 33" in str(report.failures[0])


def test_what_is_prepared_while_the_backend_works_changes_no_verdict(monkeypatch):
    """And a case that was prepared is not sent if a similar one is refused meanwhile."""
    calls = []

    def refuse_some(q, k, v, softmax_scale, is_causal):
        calls.append(q.shape)
        if q.shape[3] == 64:
            raise UnsupportedError("TEST_VERIFY", ["head_dim 64"])
        return naive_attention(q, k, v, softmax_scale, is_causal) * (q.shape[1] < 66)

    def found():
        calls.clear()
        report = verify(spec_of(refuse_some, head_dims=(32, 64)), "cpu", seed=0, max_failures=3)
        return report.failures, report.refusals, len(calls)

    at_once = found()
    answers = itertools.cycle([False] * 4 + [True])
    monkeypatch.setattr(Runner, "has_answered", lambda _: next(answers))
    assert found() == at_once


def test_a_kernel_that_does_not_end_is_waited_for_once():
    calls = []

    def endless(q, k, v, softmax_scale, is_causal):
        calls.append(q.shape)
        raise RuntimeError("attention_kernels::x: cudaErrorLaunchTimeout: the launch timed out")

    report = verify(spec_of(endless), "cpu", seed=0)
    assert len(calls) == 1
    assert report.stopped
    assert [failure.why for failure in report.failures] == [
        "cudaErrorLaunchTimeout: the launch timed out"
    ]


@pytest.mark.parametrize("slack", [0.0, 0.5, 4.5, math.inf, math.nan])
def test_how_much_more_error_a_backend_may_ask_for(slack):
    with pytest.raises(ValueError, match="error_slack must be between 1 and 4, not"):
        spec_of(naive_attention, error_slack=slack)


def test_progress_is_told_in_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(suite, "PROGRESS_S", 0.0)
    shorten(monkeypatch, lambda cases: cases[:3])
    verify(spec_of(naive_attention), "cpu", seed=0, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"TEST_VERIFY: 1 of \d+ checks", lines[0])
