from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attention_kernels.errors import RejectedTimeError
from gpt2_infer.bench.batches import _generate_batch
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import BatchStudy, run
from tests.gpt2_infer.bench.common import by_name


def test_every_batch_size_completes_the_same_rows():
    study = BatchStudy(
        model="demo",
        device="cpu",
        dtypes=["float32"],
        batch_sizes=[2, 4],
        peer_batch_sizes=[4],
        prompts=6,
        new_tokens=3,
    )
    file = run(study)
    rows = by_name(file)
    assert {len(row.samples) for row in rows.values()} == {2}
    assert {row.extra["tokens"] for row in rows.values()} == {18}
    assert {row.extra["same_rows"] for row in rows.values()} == {1}
    for row in rows.values():
        assert "on NVIDIA GPUs only" in file.beside(row, "energy").reason
    for name in ("batch 2", "batch 4"):
        steps = file.beside(rows[name], "generation").samples
        assert all(0 < part < whole for part, whole in zip(steps, rows[name].samples, strict=True))


@pytest.mark.parametrize(
    ("texts", "outcome"),
    [
        ([[5, 6], [7, 8]], 0.5),
        ([[5, 6]], "generate_batch completed 1 of 2 prompts"),
        ([[5], []], "completed 0 of 2 prompts: no room"),
    ],
)
def test_transformers_continuous_batching_is_compared_with_our_texts(texts, outcome):
    done = [SimpleNamespace(generated_tokens=text, error="no room\nat all") for text in texts]
    model = SimpleNamespace(
        device=torch.device("cpu"), generate_batch=lambda **_: dict(enumerate(done))
    )
    row = Row(contender="peer", metric="time", unit="s", extra={"batch": 2})
    prompts, expected = {3: [1], 8: [2]}, {3: [5, 6], 8: [7, 7]}
    if isinstance(outcome, str):
        with pytest.raises(RejectedTimeError, match=outcome):
            _generate_batch(model, prompts, 2, row, expected)
    else:
        assert _generate_batch(model, prompts, 2, row, expected)["time"] > 0
        assert row.extra["same_rows"] == outcome
