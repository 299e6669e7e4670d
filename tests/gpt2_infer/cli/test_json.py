"""--json of every command is one JSON value on standard output, with the documented fields."""

from __future__ import annotations

import json
import math
import re

import pytest

from attention_kernels import ladder
from attention_kernels.inspection import accesses, resources
from attention_kernels.inspection.sass import predict
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.suite import Failure, Report
from attention_kernels.judge.truth import Verdict
from gpt2_infer.cli import COMMANDS
from tests.conftest import ROOT
from tests.gpt2_infer.cli.program import run
from tests.gpt2_infer.cli.test_predict import FOUND

MODEL = ["--model", "demo", "--device", "cpu"]
ACCESS = accesses.Access(
    (3,), "sK[j]", "shared", "load", 4, 1, 2, 1, 2, 0, 0, accesses.MemoryRequest(0, 0, 2, "sK", ())
)
ELSEWHERE = ("compare", "kernels", "mcp", "predict", "timeline", "worth")  # tested elsewhere
COMMAND = {
    "accesses": ["CUSTOM_CUDA_VERSION_1"],
    "backends": [],
    "batch": ["examples/prompts.jsonl", *MODEL, "--max-new-tokens", "1", "--out", "OUT"],
    "diverge": ["naive-pytorch", "pytorch-sdpa-math", *MODEL, "--max-new-tokens", "1"],
    "export": ["CUSTOM_CUDA_VERSION_1", "--out", "OUT"],
    "generate": [*MODEL, "--max-new-tokens", "1"],
    "perplexity": [*MODEL, "--max-tokens", "8"],
    "report": ["CUSTOM_CUDA_VERSION_1", "--gpu", "none", "--out", "OUT"],
    "verify": ["NAIVE_PYTORCH", "--device", "cpu", "--no-timing"],
}


def parsed(text):
    """Parse strictly: NaN and Infinity are no JSON."""
    return json.loads(text, parse_constant=pytest.fail)


def report_of(**found):
    def verify(what, device, **_):
        spec = ladder.resolve(what)
        return Report(spec, device or "cpu", seed=7, total=2, checks=2, cases=1, **found)

    return verify


@pytest.fixture
def quick(monkeypatch):
    """Replace what takes long by what it could have found."""
    monkeypatch.setattr(accesses, "count_accesses", lambda *_, **__: [ACCESS])
    monkeypatch.setattr(predict, "predict", lambda *_, **__: FOUND)
    monkeypatch.setattr(resources, "compile_summary", lambda *_: "64 registers, no spills")
    monkeypatch.setattr("attention_kernels.judge.suite.verify", report_of())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ELSEWHERE])
def test_json_has_the_documented_fields(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if command == "report":
        pytest.importorskip("jinja2")
        pytest.importorskip("pygments")
        monkeypatch.setattr("gpt2_infer.bench.counting.count_accesses", lambda *_, **__: [ACCESS])
    words = [str(tmp_path / "out") if word == "OUT" else word for word in COMMAND[command]]
    status, out, _ = run(capsys, command, *words, "--json")
    assert status == 0
    value = parsed(out)
    fields = {*(value[0] if isinstance(value, list) else value)}
    text = (ROOT / "docs" / "cli.md").read_text().partition("\n## JSON\n")[2]
    _, verdict = text.split("### A verdict")
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", text, re.MULTILINE)
    assert fields <= {*re.findall(r"`(\w+)`", verdict if command == "verify" else row)}


def test_verify_tells_a_program_what_failed(capsys, monkeypatch):
    case, why = Case(8, 32), "the output is not finite"
    worst = case, Verdict(math.inf, 1e-6, 1e-7)
    found = {"failures": [Failure(str(case), why)], "refusals": ["head_dim 8"], "worst": worst}
    monkeypatch.setattr("attention_kernels.judge.suite.verify", report_of(**found))
    status, out, _ = run(capsys, "verify", "NAIVE_PYTORCH", "--device", "cpu", "--json")
    assert status == 1
    value = parsed(out)
    assert value["passed"] is False
    assert value["failures"] == [{"stage": "suite", "what": str(case), "why": why}]
    assert value["refusals"] == found["refusals"]
    error = {"rule": "error", "error": None, "budget": 1e-6, "naive_error": 1e-7}
    assert value["worst"] == {"case": str(case), "status": "failed", "errors": [error]}
