"""--json of every command is one JSON value on standard output."""

from __future__ import annotations

import json
import math

import pytest

from attention_kernels import ladder
from attention_kernels.inspection import accesses, resources
from attention_kernels.inspection.sass import predict
from attention_kernels.judge.conformance import Failure, Report
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.reference import Verdict
from gpt2_infer.cli import COMMANDS
from tests.gpt2_infer.bench.common import file_of, kernel, kernels
from tests.gpt2_infer.cli.program import ROOT, run
from tests.gpt2_infer.cli.test_predict import FOUND

MODEL = ["--model", "demo", "--device", "cpu"]
ACCESS = accesses.Access(
    (3,), "sK[j]", "shared", "load", 4, 1, 2, 1, 2, 0, 0, accesses.MemoryRequest(0, 0, 2, "sK", ())
)
RESOURCES = resources.Resources(
    "v01", "90", "float32", "kernel", 64, 128, 32, 0, 0, 0, 0, 4, 64, 64, "warps"
)
FINDINGS = {
    *(
        "name",
        "device",
        "emulated",
        "sanitized",
        "quick",
        "few_shapes",
        "pattern",
        "seed",
        "passed",
        "total",
        "checks",
        "cases",
        "calls",
        "has_attention",
    ),
    *("stopped", "killed", "error_slack", "budget_rule", "failures", "refusals", "worst"),
    *("nvcc", "timing"),
}
COMMAND = {  # the words, and the names of the fields
    "accesses": (["CUSTOM_CUDA_VERSION_1"], {*vars(ACCESS)}),
    "backends": (
        [],
        {
            *("name", "family", "summary", "precisions", "head_dims", "devices"),
            *("emulated_on", "choices", "prebuilt", "predecessor", "unavailable"),
        },
    ),
    "batch": (
        ["examples/prompts.jsonl", *MODEL, "--max-new-tokens", "1"],
        {"rows", "errors", "files", "out"},
    ),
    "cache": ([], {"folder", "entries", "freed_bytes"}),
    "compare": (
        [
            *("--task", "kernel", "--device", "cpu", "--seqlens", "8", "--heads", "1"),
            *("--rounds", "2", "--backends", "naive-pytorch", "--out", "OUT"),
        ],
        {"task", "study", "provenance", "rows"},
    ),
    "diverge": (
        ["naive-pytorch", "pytorch-sdpa-math", *MODEL, "--max-new-tokens", "1"],
        {
            *("verdict", "device", "dtype", "mode", "prompt_tokens", "new_tokens", "step"),
            *("position", "a", "b", "untried", "seqlen", "logits_difference"),
        },
    ),
    "export": (
        ["CUSTOM_CUDA_VERSION_1", "--as", "hub", "--out", "OUT"],
        {"out", "name", "files", "verdict", "predicted"},
    ),
    "generate": ([*MODEL, "--max-new-tokens", "1"], {"report", "results"}),
    "kernels": (["CUSTOM_CUDA_VERSION_1"], {*vars(RESOURCES)}),
    "perplexity": (
        [*MODEL, "--max-tokens", "8"],
        {"model", "dtype", "products", "input", "bytes", "window", "stride", "scores"},
    ),
    "predict": (["CUSTOM_CUDA_VERSION_12"], {*vars(FOUND), "bound", "likely_us"} - {"stalls"}),
    "report": (["RESULTS", "--out", "OUT"], {"out", "bytes", "failed"}),
    "verify": (["NAIVE_PYTORCH", "--device", "cpu", "--no-timing"], {"passed", "backends"}),
}


def parsed(text):
    """Parse strictly: NaN and Infinity are no JSON."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def quick(monkeypatch):
    """Replace what takes long by what it could have found."""
    monkeypatch.setattr(accesses, "count_accesses", lambda *_, **__: [ACCESS])
    monkeypatch.setattr(predict, "predict", lambda *_, **__: [FOUND])
    monkeypatch.setattr(resources, "resource_table", lambda *_, **__: [RESOURCES])
    monkeypatch.setattr(resources, "compile_summary", lambda *_: "64 registers, no spills")
    monkeypatch.setattr("attention_kernels.judge.conformance.verify", report_of())


def report_of(**found):
    def verify(what, device, **_):
        spec = ladder.resolve(what)
        return Report(spec, device or "cpu", seed=7, total=2, checks=2, cases=1, **found)

    return verify


def test_every_command_has_json():
    assert {*COMMAND} == {*COMMANDS} - {"mcp"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", COMMAND)
def test_json_has_the_documented_fields(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words, fields = COMMAND[command]
    if command == "report":
        pytest.importorskip("jinja2")
        pytest.importorskip("pygments")
        kernels().write(tmp_path / "results.json")
    places = {"OUT": str(tmp_path / "out"), "RESULTS": str(tmp_path / "results.json")}
    words = [places.get(word, word) for word in words]
    if command == "batch":
        words += ["--out", str(tmp_path / "texts")]
    status, out, _ = run(capsys, command, *words, "--json")
    assert status == 0
    value = parsed(out)
    assert {*(value[0] if isinstance(value, list) else value)} == fields


def test_verify_tells_a_program_what_failed(capsys, monkeypatch):
    case = Case(8, 32)
    found = {
        "failures": [Failure(str(case), "the output is not finite")],
        "refusals": ["seqlen 1, head_dim 8, float32: head_dim 8"],
        "worst": (case, Verdict(math.inf, 1e-6, 1e-7)),
    }
    monkeypatch.setattr("attention_kernels.judge.conformance.verify", report_of(**found))
    status, out, _ = run(capsys, "verify", "NAIVE_PYTORCH", "--device", "cpu", "--json")
    assert status == 1
    value = parsed(out)
    (backend,) = value["backends"]
    assert {*backend} == FINDINGS
    assert value["passed"] is backend["passed"] is False
    why = "the output is not finite"
    assert backend["failures"] == [{"stage": "suite", "what": str(case), "why": why}]
    assert backend["refusals"] == found["refusals"]
    assert backend["worst"]["case"] == str(case)
    assert backend["worst"]["status"] == "failed"
    error = {"rule": "error", "error": None, "budget": 1e-6, "naive_error": 1e-7}
    assert backend["worst"]["errors"] == [error]
    assert backend["timing"] == []


def test_verify_tells_a_program_the_times(capsys, monkeypatch):
    mine = "PYTORCH_SDPA_MATH"
    verify = report_of(has_attention=True)
    monkeypatch.setattr("attention_kernels.judge.conformance.verify", verify)
    rejected = kernel(mine, [], status="failed", reason="the clocks disagree")
    for row, status, times in (
        (kernel(mine, [4.0, 2.0, 3.0]), 0, (3.0, 2.0, 4.0)),
        (rejected, 1, (None, None, None)),
    ):
        file = file_of("kernel", [kernel("NAIVE_PYTORCH", [9.0]), row])
        monkeypatch.setattr("gpt2_infer.bench.study.run", lambda _, file=file: file)
        found, out, _ = run(capsys, "verify", mine, "--device", "cpu", "--json")
        value = parsed(out)
        assert (found, value["passed"]) == (status, not status)
        naive, timing = value["backends"][0]["timing"]
        assert (naive["backend"], naive["median_us"]) == ("NAIVE_PYTORCH", 9.0)
        assert (timing["backend"], timing["status"]) == (mine, row.status)
        assert tuple(timing[name] for name in ("median_us", "min_us", "max_us")) == times
        whys = [failure["why"] for failure in value["backends"][0]["failures"]]
        assert whys == ([row.reason] if status else [])


def test_without_a_verdict_there_is_no_json(capsys):
    status, out, err = run(capsys, "verify", "nothing", "--json")
    assert (status, out) == (2, "")
    assert "unknown attention backend 'nothing'" in err
