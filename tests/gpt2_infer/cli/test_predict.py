"""gpt2-infer predict."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from attention_kernels.inspection.sass import predict
from attention_kernels.inspection.sass.binary import Request
from attention_kernels.inspection.sass.timing import Prediction
from gpt2_infer.bench.prediction import find_gpu, likely, prediction_row, timed_on
from gpt2_infer.bench.record import Gpu, KernelCell
from gpt2_infer.bench.show.predicted import errors, summary
from gpt2_infer.cli import main
from tests.gpt2_infer.bench.common import file_of, kernel, kernels

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


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "predict", lambda *_, **__: [FOUND])


@pytest.mark.usefixtures("predicted")
def test_predict_shows_the_largest_parts_and_the_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kernels().write(tmp_path / "r.json")
    command = ["predict", "CUSTOM_CUDA_VERSION_12", "--results", str(tmp_path)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "H200 SXM" in shown
    heads, cells = (re.split("  +", line.strip()) for line in shown.splitlines()[2:4])
    assert heads == [
        "N",
        "predicted",
        "bound",
        "largest parts",
    ]  # there are no results to compare with
    largest = "42.0 shared memory, 40.7 uneven blocks, 30.0 issue slots"
    assert cells == ["1024", "90.0", "shared memory", largest]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["bound"] == "shared memory"


@pytest.mark.usefixtures("predicted")
def test_other_files_among_the_results_are_named_and_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "CUSTOM_CUDA_VERSION_12"]) == 0
    out, err = capsys.readouterr()
    assert "measured" not in out
    assert err.startswith("skipped: results/a.json is not a results file")


RTX = "NVIDIA GeForce RTX"
CARDS = {  # the name of the card that is predicted for, and names of others
    "h200": ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"],
    "h100": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"],
    "a100": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB"],
    "t4": ["Tesla T4", "NVIDIA T400"],
    "rtx4090": [f"{RTX} 4090", f"{RTX} 4090 D", f"{RTX} 4090 Laptop GPU", f"{RTX} 3060"],
}


@pytest.mark.parametrize("key", CARDS)
def test_a_prediction_is_compared_only_with_timings_of_the_same_card(key: str) -> None:
    for name in CARDS[key]:
        timing = kernels()
        timing.provenance.gpu = Gpu(
            name=name, compute_capability="9.0", multiprocessors=1, memory_bytes=1, cuda="13.0"
        )
        assert bool(timed_on(find_gpu(key), [timing])) == (name == CARDS[key][0])


def test_a_prediction_is_compared_only_with_the_same_version_file() -> None:
    cell = KernelCell(128)
    results = file_of("prediction", [prediction_row("A", cell, "1", samples=[20.0])])
    row = kernel("A", [10.0], cell=cell, version_digest="1")
    assert summary(errors(results, [row])) == ["1", "100.0%", "100.0%", "1", "`A`, N=128: 2.00"]
    assert errors(results, [kernel("A", [10.0], cell=cell, version_digest="2")]) == {}


def test_a_prediction_has_the_range_that_its_class_of_kernels_has_earned() -> None:
    """Kernels 0 to 19 take 1.00 to 1.19 times as long as predicted; those on tensor cores twice."""
    needs: dict[str, float] = {"issue slots": 1.0}
    rows, timed = [], []
    for n in range(20):
        for name, more, factor in ((f"A{n}", {}, 1 + n / 100), (f"T{n}", {"tensor cores": 1.0}, 2)):
            cell = KernelCell(128)
            rows.append(prediction_row(name, cell, "1", samples=[10.0], needs_us=needs | more))
            timed.append(kernel(name, [10 * factor], cell=cell, version_digest="1"))
    predictions = file_of("prediction", rows, settings={"gpu": "H200 SXM"})
    timings = file_of("kernel", timed)
    found = [
        likely([predictions, timings], on_tensor_cores=on_tensor_cores)
        for on_tensor_cores in (False, True)
    ]
    assert found == [None, None]  # measured on another card
    assert timings.provenance.gpu
    timings.provenance.gpu.name = "NVIDIA H200"
    plain = likely([predictions, timings], on_tensor_cores=False)
    assert plain == pytest.approx((1.011, 1.179, 20))
    assert likely([predictions, timings], on_tensor_cores=True) == pytest.approx((2.0, 2.0, 20))
    few = file_of("prediction", rows[:10], settings={"gpu": "H200 SXM"})
    assert likely([few, timings], on_tensor_cores=False) is None
    lacking = file_of("prediction", [prediction_row("A1", KernelCell(128), "1", samples=[10.0])])
    lacking.study["gpu"] = "H200 SXM"
    elsewhere = file_of("prediction", rows, settings={"gpu": "another"})
    assert likely([lacking, elsewhere, timings], on_tensor_cores=False) is None


@pytest.mark.usefixtures("predicted")
def test_the_range_of_the_committed_results_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(__file__).parents[3] / "results"
    assert main(["predict", "CUSTOM_CUDA_VERSION_12", "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^1024 +90\.0 +\d+\.\d\.\.\d+\.\d ", shown, re.M)
    assert max(map(len, shown.splitlines()[2:4])) <= 120
    assert re.search(
        r"kernels without tensor cores that were measured, 8 in 10 took 0\.\d+ to", shown
    )


def test_a_launch_of_any_kernel_is_taken_from_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    def record(request: Request, *_: object, **__: object) -> Prediction:
        found.append(request)
        return FOUND

    monkeypatch.setattr(predict, "predict_kernel", record)
    command = ["predict", "any.so", "--json", "--kernel=k", "--block=128"]
    assert main([*command, "--grid", "4,12", "--args", "ptr", "-1", "2.5"]) == 0
    assert main([*command, "--grid=1", "--shared=0"]) == 0
    first, second = found
    assert (first.grid, first.block) == ((4, 12, 1), (128, 1, 1))
    assert (first.dynamic_smem, first.arguments) == (None, ("ptr", "-1", "2.5"))
    assert second.dynamic_smem == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--grid=1"], "--grid is of a launch: it needs --kernel"),
        (["--kernel=k", "--grid=1"], "--kernel needs --block"),
        (
            ["--kernel=k", "--grid=1", "--block=1", "--head-dim=64"],
            "--head-dim is of an attention call: give it or --kernel",
        ),
    ],
)
def test_options_of_a_launch_and_of_a_call_exclude_each_other(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "any.so", *options]) == 2
    assert words in capsys.readouterr().err


def test_what_was_assumed_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = dataclasses.replace(FOUND, assumed=("FOO is an addition",))
    monkeypatch.setattr(predict, "predict_kernel", lambda *_, **__: found)
    monkeypatch.chdir(tmp_path)  # without results
    command = ["predict", "any.so", "--kernel=k", "--grid=3", "--block=64"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "k of any.so on H200 SXM: 3x1x1 blocks of 64x1x1 threads" in shown
    assert "assumed: FOO is an addition" in shown
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["assumed"] == ["FOO is an addition"]


def test_a_dtype_that_a_version_does_not_take_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["predict", "CUSTOM_CUDA_VERSION_12", "--dtype", "float16"]) == 2
    assert "dtype float16 (it takes float32)" in capsys.readouterr().err
