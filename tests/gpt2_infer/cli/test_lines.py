"""gpt2-infer predict --lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from attention_kernels.inspection import explain
from attention_kernels.inspection.advice import Advice
from attention_kernels.inspection.explain import (
    Explanation,
    InstructionStalls,
    KernelCode,
    LineStalls,
)
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
CODE = [KernelCode("kernel", ["LDS", "FADD", "BRA", "NOP"], [158, 158, 3, 0])]
TEXT = ["", *(f"line {n};" for n in range(1, 200))]
EXPLAINED = Explanation(FOUND, REASONS, 0.25, LINES, lambda: ADVICE, CODE, TEXT)
COMMAND = ["predict", "CUSTOM_CUDA_VERSION_12", "--lines"]


# As ncu exports it: another kernel, then this one, whose last instructions are only padding.
REPORT = """==WARNING== a message
"Kernel Name","other(int)"
"Address","Source","Warp Stall Sampling (All Samples)","stall_wait","stall_selected"
"0x7f0000","      EXIT","3","3",""
"Kernel Name","kernel(float)"
"Address","Source","All","stall_short_sb","stall_wait","stall_selected","stall_wait (Not Issued)"
"0x7f0100","      LDS.128 R4, [R1+0x10]","1,210","1,000","200","10","900"
"0x7f0110","@!P0  FADD R1, R2, R3","400","","300","100","300"
"0x7f0120","@!UP0 BRA `(.L_x_1)","500","","500","","500"
"""


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


def test_the_lines_are_shown_before_the_changes_are_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def advise() -> list[Advice]:
        assert "v12:158>66" in capsys.readouterr().out
        return ADVICE

    slow = dataclasses.replace(EXPLAINED, advise=advise)
    monkeypatch.setattr(explain, "explain", lambda *_: slow)
    assert main(COMMAND) == 0
    assert "-> 71.0  without bank conflicts" in capsys.readouterr().out


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


def test_measured_stalls_are_shown_beside_the_predicted_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.csv"
    path.write_text(REPORT)
    assert main([*COMMAND, "--profile", str(path)]) == 0
    found = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    first = found.index("line measured predicted measured reason predicted reason source")
    assert found[first + 1 : first + 3] == [
        "v12:158 75.0% 41.0% short scoreboard short scoreboard line 158;",
        "v12:3 25.0% 1.0% wait wait line 3;",
    ]
    end = "; 2 of the 2 worst lines found; the main reason agrees in 2 of the worst 2."
    assert found[-1].endswith(end)
    assert main([*COMMAND, "--profile", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["profile"]["lines"][0]["measured"] == 0.75
    assert 0 < row["profile"]["rank_correlation"] <= 1


def test_a_kernel_without_its_source_is_compared_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.csv"
    path.write_text(REPORT)
    unread = dataclasses.replace(EXPLAINED, text=["", ""])
    monkeypatch.setattr(explain, "explain", lambda *_: unread)
    assert main([*COMMAND, "--profile", str(path)]) == 0
    found = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "v12:158 75.0% 41.0% short scoreboard short scoreboard" in found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("LDS.128", "LDG.128"), "no kernel in the report has the machine code of kernel"),
        (("stall_", "other_"), "no samples of warp stalls"),
        (("Address", "Place"), "is not the CSV that `ncu"),
    ],
)
def test_a_report_of_something_else_is_refused(
    change: tuple[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.csv"
    path.write_text(REPORT.replace(*change))
    assert main([*COMMAND, "--profile", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_profile_is_of_one_length_and_has_to_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--profile", "/nonexistent"]) == 2
    assert "/nonexistent: No such file" in capsys.readouterr().err
    assert main([*COMMAND, "--profile", "/nonexistent", "--seqlen", "64", "128"]) == 2
    assert "one --seqlen" in capsys.readouterr().err
