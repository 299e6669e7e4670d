from __future__ import annotations

import re

import pytest

pytest.importorskip("jinja2")

from attention_kernels import ladder, list_backends
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import prediction_row
from gpt2_infer.bench.record import KernelCell, Shape
from gpt2_infer.bench.show.page import Picture, _chart, _predicted
from gpt2_infer.bench.show.page.source import Kernel
from tests.gpt2_infer.bench.common import file_of, kernels

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
    picture = _chart(row, "h200", files)
    assert isinstance(picture, Picture)
    own = ["30.0", "20.0", "10.0", "19.0", "1.0", "60.0"]
    assert re.findall(r">(\d\d?\.\d)<", picture.svg.decode()) == [*own, "50.0"]
    row.extra["version_digest"] = "of other code"
    assert _predicted(kernel, "h200", Shape(seqlen=128), files, makes=False) is None
