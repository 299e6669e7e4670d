"""Studies of predictions of ladders."""

from __future__ import annotations

from gpt2_infer.bench.prediction import Predictions
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import PredictionStudy


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
