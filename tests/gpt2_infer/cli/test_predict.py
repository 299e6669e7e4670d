"""gpt2-infer predict."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from attention_kernels.inspection.sass import predict
from attention_kernels.inspection.sass.explain import StalledLine, Stalls
from attention_kernels.inspection.sass.predict import Prediction
from gpt2_infer.cli import main

NEEDS = {"issue slots": 30.0, "shared memory": 42.0}
FOUND = Prediction("v12", "H200 SXM", 1024, 90.0, NEEDS, 6.0, 40.7, 1.3, 1, 1, 2, 3)


COMMAND = ["predict", "CUSTOM_CUDA_VERSION_12"]


@pytest.fixture(autouse=True)
def _predicted(monkeypatch):
    monkeypatch.setattr(predict, "predict", lambda *_, **__: FOUND)


def test_the_largest_parts_and_the_bound_are_shown(capsys):
    assert main(COMMAND) == 0
    largest = "42.0 shared memory, 40.7 uneven blocks, 30.0 issue slots"
    assert re.search(rf"^1024 +90\.0  shared memory  {largest}$", capsys.readouterr().out, re.M)


def test_a_launch_of_any_kernel_is_taken_from_the_options(monkeypatch, capsys):
    given = []

    def record(*_: object, **launch: object) -> Prediction:
        given.append(launch)
        return dataclasses.replace(FOUND, assumed=("FOO is an addition",))

    monkeypatch.setattr(predict, "predict_kernel", record)
    command = ["predict", "any.cubin", "--kernel=k", "--block=128", "--grid", "4,12"]
    command += ["--cluster", "2"]
    assert main([*command, "--args", "ptr", "-1", "2.5"]) == 0
    sizes = {"grid": (4, 12, 1), "block": (128, 1, 1), "cluster": (2, 1, 1), "shared": 0}
    assert given == [{"kernel": "k", **sizes, "args": ("ptr", "-1", "2.5"), "lines": False}]
    shown = capsys.readouterr().out
    assert "k of any.cubin on H200 SXM: 4x12x1 blocks of 128x1x1 threads" in shown
    assert "assumed: FOO is an addition" in shown


def test_lines_shows_the_worst_ten_lines_and_json_all(monkeypatch, capsys):
    reasons = {"short scoreboard": 0.76, "wait": 0.24}
    lines = [StalledLine(158, 0.41, reasons, [66], {140: 0.31}, "x += y;")]
    lines += [StalledLine(n, 0.01, {"wait": 1.0}, [], {}, f"line {n}") for n in range(12)]
    stalls = Stalls("H200 SXM", 90.0, 0.25, reasons, lines)
    found = dataclasses.replace(FOUND, stalls=stalls)
    monkeypatch.setattr(predict, "predict", lambda *_, lines, **__: found if lines else FOUND)
    assert main([*COMMAND, "--lines"]) == 0
    text = capsys.readouterr().out
    assert "N=1024, 90.0 us: a warp issues in 25% of its cycles" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("v12:")]
    assert len(rows) == 10
    assert " ".join(rows[0]) == "v12:158>66 41.0% 76% short scoreboard 24% wait 140 x += y;"
    assert main([*COMMAND, "--lines", "--json"]) == 0
    (value,) = json.loads(capsys.readouterr().out)
    assert (value["time_us"], value["issuing"], len(value["lines"])) == (90.0, 0.25, len(lines))
