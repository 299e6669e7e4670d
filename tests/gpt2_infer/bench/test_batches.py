from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpt2_infer.bench.batches import _generate_batch
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import BatchStudy, RejectedError, run
from tests.gpt2_infer.bench.common import by_name


def test_every_batch_size_completes_the_same_rows():
    study = BatchStudy(
        model="demo",
        device="cpu",
        dtypes=["float32"],
        batch_sizes=[1, 4],
        peer_batch_sizes=[4],
        prompts=6,
        new_tokens=3,
    )
    file = run(study)
    rows = by_name(file)
    assert {len(row.samples) for row in rows.values()} == {2}
    assert 4 + 1.5 <= rows["batch 4"].extra["mean_length"] <= 60 + 1.5
    assert {row.extra["tokens"] for row in rows.values()} == {18}
    assert rows["batch 4"].extra["same_rows"] == 1
    assert rows["transformers, padded, 4"].extra["same_rows"] == 1
    for row in rows.values():
        assert "on NVIDIA GPUs only" in file.beside(row, "energy").reason
    for name in ("batch 1", "batch 4"):
        steps = file.beside(rows[name], "generation").samples
        assert all(0 < part < whole for part, whole in zip(steps, rows[name].samples, strict=True))


def fake(*tokens: list[int], error: str | None = None) -> SimpleNamespace:
    """A model whose generate_batch() gives these tokens."""
    found = [SimpleNamespace(generated_tokens=each, error=error) for each in tokens]
    return SimpleNamespace(
        device=torch.device("cpu"),
        generate_batch=lambda **_: {f"req_{i}": one for i, one in enumerate(found)},
    )


def test_transformers_continuous_batching_is_compared_with_our_texts():
    row = Row(contender="peer", metric="time", unit="s", extra={"batch": 2})
    prompts, expected = {3: [1], 8: [2]}, {3: [5, 6], 8: [7, 7]}
    sample = _generate_batch(fake([5, 6], [7, 8]), prompts, 2, row, expected)
    assert sample["time"] > 0
    assert row.extra["same_rows"] == 0.5


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (fake([5, 6]), "generate_batch completed 1 of 2 prompts"),
        (fake([5], [], error="no room\nat all"), "completed 0 of 2 prompts: no room"),
        (SimpleNamespace(device=torch.device("cpu")), "cannot run here: .*'generate_batch'"),
    ],
)
def test_transformers_continuous_batching_may_fail(model, reason):
    row = Row(contender="peer", metric="time", unit="s", extra={"batch": 2})
    with pytest.raises(RejectedError, match=reason):
        _generate_batch(model, {3: [1], 8: [2]}, 2, row, {})


@pytest.mark.slow
def test_transformers_continuous_batching_is_timed():
    study = BatchStudy(
        model="demo",
        device="cpu",
        dtypes=["float32"],
        batch_sizes=[4],
        generate_batch_sizes=[4],
        prompts=6,
        new_tokens=3,
    )
    ours, peer = by_name(run(study)).values()
    assert peer.extra == ours.extra | {"program": "transformers"}
    assert len(peer.samples) == 2
