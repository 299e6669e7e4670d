from __future__ import annotations

import pytest

pytest.importorskip("jinja2")

from gpt2_infer.bench.prediction import prediction_row
from gpt2_infer.bench.record import KernelCell
from gpt2_infer.bench.show.page import bars


def test_a_prediction_is_drawn_with_its_parts():
    row = prediction_row(
        "CUSTOM_CUDA_VERSION_2",
        KernelCell(1024),
        "digest",
        samples=[60.0],
        bound="shared memory",
        needs_us={"issue slots": 20.0, "shared memory": 30.0},
        waiting_us=10.0,
        uneven_us=19.0,
        launch_us=1.0,
    )
    assert [bar.us for bar in bars(row, "h200").bars] == [30.0, 20.0, 10.0, 19.0, 1.0, 60.0]
    row.samples, row.reason = [], "not this"
    assert bars(row, "h200") == "not this"
