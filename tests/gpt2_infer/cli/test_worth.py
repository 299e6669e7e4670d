"""gpt2-infer worth."""

from __future__ import annotations

import json
import re

import pytest

from attention_kernels.judge.suite import Failure
from gpt2_infer.bench import worth
from tests.conftest import needs_compiler
from tests.gpt2_infer.cli.program import run
from tests.gpt2_infer.cli.test_json import report_of

FIELDS = ["passed", "verdict", "results"]


def test_a_kernel_that_fails_is_reported_and_not_timed(capsys, monkeypatch):
    found = report_of(failures=[Failure("seqlen 1", "bad")])
    monkeypatch.setattr("attention_kernels.judge.suite.verify", found)
    monkeypatch.setattr(worth, "answer", pytest.fail)
    status, out, _ = run(capsys, "worth", "NAIVE_PYTORCH", "--device", "cpu")
    assert (status, out.endswith("FAILED\n")) == (1, True)
    assert "  FAILED: seqlen 1\n          bad\n" in out
    status, out, _ = run(capsys, "worth", "NAIVE_PYTORCH", "--device", "cpu", "--json")
    value = json.loads(out)
    assert (status, [*value], value["results"]) == (1, FIELDS, None)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["NOTHING_AT_ALL"], "unknown attention backend 'NOTHING_AT_ALL'"),
        (["NAIVE_PYTORCH", "--max-tokens", "3"], "max_tokens 3 must exceed the prompt's 10 tokens"),
        (["NAIVE_PYTORCH", "--gpu", "abacus"], "no GPU named abacus, only h200"),
        (["NAIVE_PYTORCH", "--out", "/no/where.html"], "there is no folder /no"),
        (["NAIVE_PYTORCH", "--entry", "f(q)"], "--entry says how to call one file"),
        (["DECODE_SPLIT_KV_VERSION_1"], "it has a decode kernel only"),
        (["WMMA_FLASH_ATTENTION_2_VERSION_9"], "dtype float32 (it takes float16)"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(words, error, capsys, monkeypatch):
    monkeypatch.setattr("attention_kernels.judge.suite.verify", pytest.fail)
    status, out, err = run(capsys, "worth", *words, "--device", "cpu")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert error in err


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
def test_a_kernel_that_runs_here_is_timed_in_every_mode(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("attention_kernels.judge.suite.verify", report_of())
    page = tmp_path / "page.html"
    words = ["worth", "PYTORCH_SDPA_MATH", "--device", "cpu", "--quick", "--max-tokens", "12"]
    status, out, _ = run(capsys, *words, "--out", str(page), "--json")
    value = json.loads(out)
    assert (status, [*value], value["passed"]) == (0, FIELDS, True)
    rows = value["results"]["rows"]
    names = ["NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION"]
    assert [row["contender"] for row in rows if row["metric"] == "time"] == names
    texts = [row for row in rows if row["metric"] == "generation"]
    for mode in worth.MODES:
        some = [row for row in texts if row["cell"]["mode"] == mode]
        assert [row["contender"] for row in some] == [*names, "FREE_ATTENTION"]
        assert all(len(row["samples"]) == 2 for row in some)
        assert some[1]["extra"]["diverges"] in ("equal", "tie")
        assert some[1]["extra"]["logits_difference"] < 1e-3
    assert page.read_text("utf-8").count("data:image/svg+xml;base64,") == 2


@pytest.mark.slow
@needs_compiler
def test_an_emulated_kernel_is_predicted(capsys):
    name = "CUSTOM_CUDA_VERSION_12"
    status, out, _ = run(capsys, "worth", name, "--device", "cpu", "--quick")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"{name} on cpu, emulated: ")
    assert re.search(rf"^alone +{name} +(p [\d,.]+ us|-)$", out, re.MULTILINE)
    assert re.search(rf"^recompute +{name} .* equal +\d", out, re.MULTILINE)
    assert re.search(rf"^kv-cache +{name} +-$", out, re.MULTILINE)
