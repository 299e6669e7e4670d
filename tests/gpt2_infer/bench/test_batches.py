from __future__ import annotations

from gpt2_infer.bench.study import BatchStudy, run


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
    rows = {row.contender: row for row in run(study).rows}
    assert {len(row.samples) for row in rows.values()} == {2}
    assert {row.extra["tokens"] for row in rows.values()} == {18}
    assert rows["batch 4"].extra["same_rows"] == 1
    assert rows["transformers, padded, 4"].extra["same_rows"] == 1
