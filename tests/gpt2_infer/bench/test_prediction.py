"""Studies of predictions of ladders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from attention_kernels import ladder, list_backends
from attention_kernels.errors import UnsupportedError
from gpt2_infer.bench import prediction
from gpt2_infer.bench.prediction import Predictions, predict_version
from gpt2_infer.bench.record import KernelCell
from gpt2_infer.bench.show import tables
from gpt2_infer.bench.study import PredictionStudy
from tests.gpt2_infer.bench.common import file_of
from tests.gpt2_infer.cli.test_predict import FOUND

NAME = "CUSTOM_CUDA_VERSION_12"


def test_each_version_is_predicted_in_its_own_dtype_or_has_the_reason(monkeypatch):
    list_backends()

    def predict(version, gpu, *, num_heads, **shape):
        if num_heads != 12:
            raise UnsupportedError("A", ["not this"])
        return FOUND

    monkeypatch.setattr(prediction, "predict", predict)
    monkeypatch.setattr(prediction, "ProcessPoolExecutor", ThreadPoolExecutor)
    subject = Predictions(PredictionStudy(family="fa1", seqlens=[64, 128]))
    cells = [(cell.dtype, cell.seqlen) for cell in subject.cells]
    assert cells == [("float16", 64), ("float16", 128), ("float64", 64), ("float64", 128)]
    (found,) = (one.row for one in subject.contenders(subject.cells[2]))
    assert (found.contender, found.samples) == ("FLASH_ATTENTION_1_FP64", [90.0])
    assert found.extra["bound"] == "shared memory"
    version = ladder.versions()[NAME]
    row = predict_version(NAME, version, KernelCell(1024, num_heads=1), gpu="h200")
    assert (row.status, row.samples) == ("refused", [])
    assert "not this" in row.reason
    (table,) = tables.tables("FILE", file_of("prediction", [row], settings={"gpu": "H200 SXM"}))
    assert "not this" in table.notes[NAME]
