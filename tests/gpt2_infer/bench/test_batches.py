from __future__ import annotations

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
    assert rows["transformers, padded, 4"].extra["same_rows"] == 1
    for name in ("batch 2", "batch 4"):
        steps = file.beside(rows[name], "generation").samples
        assert all(0 < part < whole for part, whole in zip(steps, rows[name].samples, strict=True))
