"""gpt2-infer predict --lines."""

from __future__ import annotations

import dataclasses
import json

import pytest

from attention_kernels.inspection.sass import predict
from attention_kernels.inspection.sass.stalls import StalledInstruction, StalledLine, Stalls
from gpt2_infer.cli import main
from tests.gpt2_infer.cli.test_predict import FOUND

LOAD = StalledInstruction(0, 32, "LDS R1, [R2]", 0.31, "short scoreboard")
REASONS = {"short scoreboard": 0.76, "wait": 0.24}
LINES = [StalledLine(158, 0.41, REASONS, [66], {140: 0.31}, [LOAD], 0, "x += y;")]
LINES += [StalledLine(n, 0.01, {"wait": 1.0}, [], {}, [], 1, f"line {n}") for n in range(12)]
STALLS = Stalls("H200 SXM", 90.0, 0.25, REASONS, ["kernel"], LINES)
COMMAND = ["predict", "CUSTOM_CUDA_VERSION_12", "--lines"]


@pytest.fixture(autouse=True)
def _explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [dataclasses.replace(FOUND, stalls=STALLS)]
    monkeypatch.setattr(predict, "predict", lambda *_, lines: found if lines else [])


def test_the_worst_ten_lines_are_shown_with_their_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(COMMAND) == 0
    text = capsys.readouterr().out
    found = [" ".join(line.split()) for line in text.splitlines()]
    assert "N=1024, 90.0 us: a warp issues in 25% of its cycles" in text
    rows = [line for line in found if line.startswith("v12:")]
    assert len(rows) == 10
    assert rows[:2] == [
        "v12:158>66 41.0% 76% short scoreboard 24% wait 140 x += y;",
        "v12:none 1.0% 100% wait line 0",
    ]
    assert "Line a>b: line a of the kernel calls a function, whose line b stalls." in found


def test_json_has_every_line_and_instruction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["time_us"], found["bound"], found["issuing"]) == (90.0, "shared memory", 0.25)
    assert len(found["lines"]) == len(LINES)
    assert found["lines"][0]["instructions"] == [[0, 32, "LDS R1, [R2]", 0.31, "short scoreboard"]]
