"""gpt2-infer predict."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from attention_kernels.inspection.sass import predict
from attention_kernels.inspection.sass.explain import StalledLine, Stalls
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.predict import Prediction
from gpt2_infer.bench.prediction import find_gpu, likely, timed_on
from gpt2_infer.bench.record import KernelCell
from gpt2_infer.cli import main
from tests.gpt2_infer.bench.common import file_of, kernel, kernels
from tests.gpt2_infer.cli.program import ROOT

FOUND = Prediction(
    version="v12",
    gpu="H200 SXM",
    seqlen=1024,
    time_us=90.0,
    needs_us={"issue slots": 30.0, "shared memory": 42.0},
    waiting_us=6.0,
    uneven_us=40.7,
    launch_us=1.3,
    launches=1,
    instructions=1,
    load_wavefronts=2,
    store_wavefronts=3,
)


COMMAND = ["predict", "CUSTOM_CUDA_VERSION_12"]


@pytest.fixture(autouse=True)
def _predicted(monkeypatch):
    monkeypatch.setattr(predict, "predict", lambda *_, **__: FOUND)


def test_the_largest_parts_the_bound_and_the_likely_range_are_shown(capsys, monkeypatch, tmp_path):
    largest = "42.0 shared memory, 40.7 uneven blocks, 30.0 issue slots"
    monkeypatch.chdir(ROOT)
    assert main(COMMAND) == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("1024 "))
    assert re.fullmatch(rf"1024 +90\.0 +\d+\.\d\.\.\d+\.\d  shared memory  {largest}", row)
    assert "kernels without tensor cores that were measured, 8 in 10 took 0." in shown
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(COMMAND) == 0
    out, err = capsys.readouterr()
    assert re.search(rf"^1024 +90\.0  shared memory  {largest}$", out, re.M)  # nothing measured
    assert err.startswith("skipped: results/a.json is not a results file")


def test_a_prediction_is_compared_only_with_timings_of_the_same_card():
    """A card whose name is longer or shorter is another: an H200 NVL, an H20."""
    timing, known = kernels(), {name: key for key, gpu in gpus().items() for name in gpu.devices}
    for name in (*known, *(f"{one} NVL" for one in known), *(one[:-1] for one in known)):
        timing.provenance.gpu.name = name
        found = [key for key in gpus() if timed_on(find_gpu(key), [timing])]
        assert found == ([known[name]] if name in known else [])
    assert all(key.upper().removeprefix("RTX") in name for name, key in known.items())


def test_a_prediction_has_the_range_that_its_class_of_kernels_has_earned():
    """Kernels 0 to 19 take 1.00 to 1.19 times as long as predicted; those on tensor cores twice."""
    plain, tensor = {"issue slots": 1.0}, {"issue slots": 1.0, "tensor cores": 1.0}
    rows, timed, cell = [], [], KernelCell(128)
    for n in range(20):
        for name, needs, factor in ((f"A{n}", plain, 1 + n / 100), (f"T{n}", tensor, 2)):
            rows.append(kernel(name, [10.0], cell=cell, version_digest="1", needs_us=needs))
            timed.append(kernel(name, [10 * factor], cell=cell, version_digest="1"))
    predictions = file_of("prediction", rows, settings={"gpu": "H200 SXM"})
    files = [predictions, timings := file_of("kernel", timed)]
    assert likely(files, plain) is None  # measured on another card
    assert timings.provenance.gpu
    timings.provenance.gpu.name = "NVIDIA H200"
    found = likely(files, plain)
    assert found
    assert found[1:] == pytest.approx((1.011, 1.179, 20))
    assert likely(files, tensor) == ("on", 2.0, 2.0, 20)
    few = file_of("prediction", rows[:10], settings={"gpu": "H200 SXM"})
    elsewhere = file_of("prediction", rows, settings={"gpu": "another"})
    assert likely([few, elsewhere, timings], plain) is None


def test_a_launch_of_any_kernel_is_taken_from_the_options(monkeypatch, capsys):
    given = []

    def record(*_: object, **launch: object) -> Prediction:
        given.append(launch)
        return dataclasses.replace(FOUND, assumed=("FOO is an addition",))

    monkeypatch.setattr(predict, "predict_kernel", record)
    command = ["predict", "any.cubin", "--kernel=k", "--block=128", "--grid", "4,12"]
    assert main([*command, "--args", "ptr", "-1", "2.5"]) == 0
    sizes = {"grid": (4, 12, 1), "block": (128, 1, 1), "shared": 0}
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
