from __future__ import annotations

import pytest

pytest.importorskip("jinja2")

from attention_kernels import ladder, list_backends
from gpt2_infer.bench import environment, report
from gpt2_infer.bench.prediction import prediction_row
from gpt2_infer.bench.record import KernelCell, Row, Shape
from gpt2_infer.bench.report import _predicted
from gpt2_infer.bench.show.page import Bars, bars
from gpt2_infer.bench.show.page.source import Kernel
from tests.gpt2_infer.bench.common import file_of, kernels, stalls

NAME = "CUSTOM_CUDA_VERSION_2"


def test_a_prediction_is_drawn_with_the_time_of_the_same_file():
    list_backends()
    version = ladder.versions()[NAME]
    digest = environment.version_digest(version.path.read_text("utf-8"))
    row = prediction_row(
        NAME,
        KernelCell(1024),
        digest,
        samples=[60.0],
        bound="shared memory",
        needs_us={"issue slots": 20.0, "shared memory": 30.0},
        waiting_us=10.0,
        uneven_us=19.0,
        launch_us=1.0,
    )
    predictions = file_of("prediction", [row], settings={"gpu": "H200 SXM"})
    timing = kernels()
    timing.provenance.gpu.name = "NVIDIA H200"
    for one in timing.of("time"):
        one.extra["version_digest"] = digest
    kernel, files = Kernel(NAME, version, 64, None), [predictions, timing]
    found = _predicted(kernel, "h200", Shape(seqlen=128), files, makes=False)
    assert found is row
    shown = bars(row, "h200", files)
    assert isinstance(shown, Bars)
    assert [bar.us for bar in shown.bars] == [30.0, 20.0, 10.0, 19.0, 1.0, 60.0, 50.0]
    assert shown.bars[-1].note == "kernel-test; predicted 1.20 times"
    row.extra["version_digest"] = "of other code"
    assert _predicted(kernel, "h200", Shape(seqlen=128), files, makes=False) is None


def test_a_version_without_stalls_in_the_results_is_explained(monkeypatch):
    list_backends()
    version = ladder.versions()[NAME]
    digest = environment.version_digest(version.source)
    cell = KernelCell(1024, head_dim=32)
    predicted = prediction_row(NAME, cell, digest, samples=[60.0])
    explained = prediction_row(NAME, cell, digest, samples=[61.0], stalls={})
    monkeypatch.setattr(report, "predict_version", lambda *_, **__: explained)
    predictions = file_of("prediction", [predicted], settings={"gpu": "H200 SXM"})
    kernel, shape = Kernel(NAME, version, 32, None), Shape(seqlen=128)
    assert _predicted(kernel, "h200", shape, [predictions], makes=True) is explained
    recorded = stalls({NAME: (digest, [(1, 1.0)])})
    files = [recorded, predictions]
    assert _predicted(kernel, "h200", shape, files, makes=True) is recorded.rows[0]
    agreement = Row(contender=NAME, cell=recorded.rows[0].cell, metric="worst", unit="1")
    time_only = prediction_row(NAME, cell, digest, samples=[60.0])
    other = prediction_row("TRITON_FLASH_ATTENTION", cell, "", samples=[60.0], needs_us={})
    # Rows that are no prediction, have no parts of the time, or are of no version file.
    recorded.rows += [agreement, time_only, other]
    assert _predicted(kernel, "h200", shape, files, makes=True) is recorded.rows[0]
