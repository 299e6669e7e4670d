"""Studies of predictions: of ladders, and of the fused step as a whole."""

from __future__ import annotations

import pytest

from gpt2_infer.bench.prediction import Predictions
from gpt2_infer.bench.record import DecodeCell, Row
from gpt2_infer.bench.show import inspected
from gpt2_infer.bench.show.pivot import pivot
from gpt2_infer.bench.step_prediction import StepPredictions
from gpt2_infer.bench.study import PredictionStudy, StepPredictionStudy
from gpt2_infer.errors import RequestError
from tests.attention_kernels.inspection.test_predict import needs_cuda_programs
from tests.gpt2_infer.bench.common import file_of


def test_each_version_is_predicted_in_its_own_dtype(monkeypatch):
    subject = Predictions(PredictionStudy(family="fa1", seqlens=[64, 128]))
    assert [(cell.dtype, cell.seqlen) for cell in subject.cells] == [
        ("float16", 64),
        ("float16", 128),
        ("float64", 64),
        ("float64", 128),
    ]
    rows = [
        Row(contender=name, cell={"seqlen": 64, "dtype": dtype}, metric="m", unit="us")
        for name, dtype in (("a", "float16"), ("b", "float64"))
    ]
    monkeypatch.setattr("msgspec.to_builtins", lambda cell: {"seqlen": 64, "dtype": cell.dtype})
    monkeypatch.setattr(Predictions, "_rows", rows)
    assert [one.row.contender for one in subject.contenders(subject.cells[2])] == ["b"]


def test_a_predicted_step_is_shown_next_to_the_measured_one():
    cell = {"model": "gpt2", "dtype": "float32", "batch": 1, "new_tokens": 500}
    predicted = Row(
        contender="fused",
        cell=cell,
        metric="predicted time",
        unit="us",
        samples=[180.0],
        extra={"kernels": 63, "work_us": 80.0, "launch_us": 70.0, "reading_us": 30.0},
    )
    measured = Row(contender="fused", cell=cell, metric="time", unit="s", samples=[0.1])
    file = file_of("step-prediction", [predicted], settings={"gpu": "H200 SXM"})
    (table,) = pivot("file", file, inspected.step_predictions([measured]))
    assert table.rows == [
        ("gpt2", "float32", "1", "fused", "63", "180.0", "200.0", "0.90", "80.0", "70.0", "30.0")
    ]


def test_a_gpu_without_early_launches_is_refused():
    with pytest.raises(RequestError, match="A100 SXM has no early launches"):
        StepPredictions(StepPredictionStudy(gpu="a100"))


@pytest.mark.slow
@needs_cuda_programs
def test_the_kernels_of_a_step_read_all_weights_and_the_cache():
    study = StepPredictionStudy(models=["distilgpt2"], dtypes=["bfloat16"], batch_sizes=[2])
    subject = StepPredictions(study)
    assert subject.cells == [DecodeCell("distilgpt2", "bfloat16", 2, 8, 504)]
    ((found,),) = [[one.row for one in subject.contenders(cell)] for cell in subject.cells]
    assert found.extra["kernels"] == 3 + 6 * 5
    with pytest.raises(RequestError, match="blocks wait for one another"):
        [*subject.contenders(DecodeCell("distilgpt2", "bfloat16", 1, 8, 504))]
    layer = sum(link["asking_us"] > 0.5 for link in found.extra["links"].values())
    assert layer >= 4
    assert found.samples[0] > found.extra["work_us"] + found.extra["launch_us"]
