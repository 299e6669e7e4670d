"""Studies of predictions of ladders."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from attention_kernels import ladder, list_backends
from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.sass.stalls import StalledInstruction, StalledLine, Stalls
from gpt2_infer.bench import prediction
from gpt2_infer.bench.prediction import Predictions, predict_version, stalls_of
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.show import tables
from gpt2_infer.bench.study import PredictionStudy
from tests.gpt2_infer.bench.common import file_of
from tests.gpt2_infer.cli.test_predict import FOUND

NAME = "CUSTOM_CUDA_VERSION_12"


@pytest.fixture
def version():
    list_backends()
    return ladder.versions()[NAME]


def test_each_version_is_predicted_in_its_own_dtype():
    subject = Predictions(PredictionStudy(family="fa1", seqlens=[64, 128]))
    assert [(cell.dtype, cell.seqlen) for cell in subject.cells] == [
        ("float16", 64),
        ("float16", 128),
        ("float64", 64),
        ("float64", 128),
    ]


def test_stalls_are_recorded_with_a_prediction(monkeypatch, version):
    line = StalledLine(
        7, 0.8, {"wait": 1.0}, [3], {5: 0.5}, [StalledInstruction(0, 16, "BRA", 0.7, "wait")], 1
    )
    found = Stalls("H200 SXM", 90.0, 0.25, {"wait": 1.0}, ["a"], [line])
    explained = dataclasses.replace(FOUND, stalls=found)
    monkeypatch.setattr(prediction, "predict", lambda *_, lines: [explained] if lines else [])
    (row,) = predict_version(NAME, version, [KernelCell(1024)], gpu="h200", lines=True)
    row = msgspec.json.decode(msgspec.json.encode(row), type=Row)
    assert (row.samples, row.extra["bound"]) == ([90.0], "shared memory")
    assert stalls_of(row) == found


def test_a_version_that_cannot_be_predicted_has_the_reason(monkeypatch, version):
    def refuse(*_, **__):
        raise UnsupportedError("A", ["not this"])

    monkeypatch.setattr(prediction, "predict", refuse)
    (row,) = predict_version(NAME, version, [KernelCell(1024)], gpu="h200")
    assert (row.status, row.samples, stalls_of(row)) == ("refused", [], None)
    assert "not this" in row.reason
    (table,) = tables.tables("FILE", file_of("prediction", [row], settings={"gpu": "H200 SXM"}))
    assert "not this" in table.notes[NAME]
