"""The computed tables of cards that were not measured."""

from __future__ import annotations

from pathlib import Path

from gpt2_infer.bench import record
from gpt2_infer.bench.show import cards

RESULTS = Path(__file__).parents[4] / "results"


def test_a_step_takes_as_long_as_its_weights_and_its_kernels():
    path = max(RESULTS.glob("*_decode-sm80.json"))
    found = record.read(path)
    (row,) = (
        row
        for row in found.of("time")
        if row.contender == "fused, sm_80" and row.cell["dtype"] == "bfloat16"
    )
    row.samples, found.provenance.limits["read_gbps"] = [504 * 200e-6], 4000
    row.extra["weight_bytes"] = 200_000_000  # 50 us of 200
    table = cards.expected(found, "fused, sm_80")
    assert "114 + 150 = 264" in table  # at 1.75 TB/s
    assert "215 + 150 = 365" in table  # at 0.93 TB/s


def test_every_block_fits_on_every_card():
    cells = [line.split("|")[4:-1] for line in cards.blocks().splitlines()[2:]]
    assert len(cells) == 2 * len(cards.CARDS)
    assert all(int(cell.split(", ")[1]) >= 1 for line in cells for cell in line)
