"""gpt2-infer predict --lines."""

from __future__ import annotations

import json

import pytest

from attention_kernels.inspection import explain
from attention_kernels.inspection.advice import Advice
from attention_kernels.inspection.explain import Explanation, InstructionStalls, LineStalls
from gpt2_infer.cli import main
from tests.gpt2_infer.cli.test_predict import FOUND

LOAD = InstructionStalls("kernel", 32, "LDS R1, [R2]", (158, 66), 0.31, {"short scoreboard": 0.31})
REASONS = {"short scoreboard": 0.31, "wait": 0.1}
LINES = [LineStalls(158, (158, 66), "x += y;", 0.41, REASONS, {140: 0.31}, [LOAD])]
LINES += [LineStalls(n, (n,), f"line {n}", 0.01, {"wait": 0.01}, {}, []) for n in range(1, 12)]
PRICE = "at most 128 registers per thread, not 200"
ADVICE = [
    Advice("conflicts", 158, 0.31, "short scoreboard", "without bank conflicts", "", 71.0),
    Advice("blocks", 0, 0.0, "", "with 4 blocks per multiprocessor", PRICE, 85.25),
]
EXPLAINED = Explanation(FOUND, REASONS, 0.25, LINES, ADVICE)
COMMAND = ["predict", "CUSTOM_CUDA_VERSION_12", "--lines"]


@pytest.fixture(autouse=True)
def _explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "explain", lambda *_: EXPLAINED)


def shown(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """Return the output, and its lines with single spaces."""
    assert main(COMMAND) == 0
    text = capsys.readouterr().out
    return text, [" ".join(line.split()) for line in text.splitlines()]


def test_the_worst_ten_lines_are_shown_with_their_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, found = shown(capsys)
    assert "N=1024, 90.0 us: a warp issues in 25% of its cycles" in text
    worst = found[: found.index("What it would gain, one change at a time:")]
    rows = [line for line in worst if line.startswith("v12:")]
    assert len(rows) == 10
    assert rows[0] == "v12:158>66 41.0% 76% short scoreboard 24% wait x += y;"
    assert "Line a>b: line a of the kernel calls a function, whose line b stalls." in found


def test_what_it_would_gain_is_shown_with_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = shown(capsys)
    assert found[-2:] == [
        "v12:158 31.0% short scoreboard 90.0 -> 71.0 without bank conflicts",
        f"90.0 -> 85.2 with 4 blocks per multiprocessor: {PRICE}",
    ]


def test_json_has_every_line_and_instruction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["time_us"], found["bound"], found["issuing"]) == (90.0, "shared memory", 0.25)
    assert len(found["lines"]) == len(LINES)
    assert found["lines"][0]["instructions"][0]["instruction"] == "LDS R1, [R2]"
    assert [one["time_us"] for one in found["advice"]] == [71.0, 85.25]
