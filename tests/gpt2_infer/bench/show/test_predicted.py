from __future__ import annotations

import re

import pytest

pytest.importorskip("jinja2")

from attention_kernels import ladder, list_backends
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import prediction_row
from gpt2_infer.bench.record import Gpu, KernelCell, Shape
from gpt2_infer.bench.show.page import Picture, _prediction
from gpt2_infer.bench.show.page.source import Kernel
from tests.gpt2_infer.bench.common import file_of, kernels, provenance

NAME = "CUSTOM_CUDA_VERSION_2"


def test_a_prediction_stands_beside_what_the_same_file_took_on_the_same_kind_of_gpu():
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
    kernel, shape = Kernel(NAME, version, 64, None), Shape(seqlen=128)

    def figures(gpu: str, of: str | None) -> list[str]:
        card = Gpu(
            name=gpu, compute_capability="9.0", multiprocessors=132, memory_bytes=1, cuda="13.0"
        )
        timing = kernels(provenance=provenance(gpu=card))
        for one in timing.of("time"):
            one.extra["version_digest"] = of
        picture = _prediction(kernel, "h200", shape, [predictions, timing], makes=False)
        assert isinstance(picture, Picture)
        return re.findall(r">(\d\d?\.\d)<", picture.svg.decode())

    own = ["30.0", "20.0", "10.0", "19.0", "1.0", "60.0"]
    assert figures("NVIDIA H200", digest) == [*own, "50.0"]
    assert figures("NVIDIA H200", None) == own
    assert figures("NVIDIA H100 80GB HBM3", digest) == own
    row.extra["version_digest"] = "of other code"
    found = _prediction(kernel, "h200", shape, [predictions], makes=False)
    assert found == "no prediction committed"
