from __future__ import annotations

import pytest

pytest.importorskip("jinja2")

from attention_kernels import ladder, list_backends
from gpt2_infer.bench import environment
from gpt2_infer.bench.report.predicted import prediction
from gpt2_infer.bench.report.source import Kernel
from gpt2_infer.bench.results import Gpu, KernelCell, Predicted, Predictions
from tests.gpt2_infer.bench.common import kernels, provenance

NAME = "CUSTOM_CUDA_VERSION_2"


def test_a_prediction_stands_beside_what_the_same_file_took_on_the_same_kind_of_gpu():
    list_backends()
    version = ladder.versions()[NAME]
    digest = environment.version_digest(version.path.read_text("utf-8"))
    one = Predicted(
        name=NAME,
        cell=KernelCell(1024),
        version_digest=digest,
        time_us=60.0,
        bound="shared memory",
        needs_us={"issue slots": 20.0, "shared memory": 30.0},
        waiting_us=10.0,
        uneven_us=19.0,
        launch_us=1.0,
    )
    predictions = Predictions(
        task="predict-test", provenance=provenance(gpu=None), gpu="H200 SXM", series=[one]
    )

    kernel = Kernel(NAME, version, 64, None)

    def rows(gpu: str, of: str | None) -> list[tuple[str, str]]:
        card = Gpu(
            name=gpu, compute_capability="9.0", multiprocessors=132, memory_bytes=1, cuda="13.0"
        )
        timing = kernels(provenance=provenance(gpu=card))
        for series in timing.series:
            series.version_digest = of
        chart = prediction(kernel, "h200", False, [predictions, timing], makes=False)
        assert not isinstance(chart, str)
        return [(row, us) for row, us, _, _ in chart.rows]

    own = [
        ("shared memory", "30.0"),
        ("issue slots", "20.0"),
        ("latency", "10.0"),
        ("uneven blocks", "19.0"),
        ("launch", "1.0"),
        ("predicted", "60.0"),
    ]
    assert rows("NVIDIA H200", digest) == [*own, ("measured", "50.0")]
    assert rows("NVIDIA H200", None) == own
    assert rows("NVIDIA H100 80GB HBM3", digest) == own
    one.version_digest = "of other code"
    found = prediction(kernel, "h200", False, [predictions], makes=False)
    assert found == "no prediction committed"
