"""The computed tables of cards that were not measured."""

from __future__ import annotations

from gpt2_infer.bench.record import Row
from gpt2_infer.bench.show import cards


def test_a_step_takes_as_long_as_its_weights_and_its_kernels():
    row = Row(contender="fused", metric="time", unit="s", extra={"weight_bytes": 247_000_000})
    row.cell["dtype"] = "bfloat16"
    table = cards.expected([row])
    assert "141 + 139 = 280" in table
    assert "266 + 101 = 366" in table


def test_every_block_fits_on_every_card():
    cells = [line.split("|")[4:-1] for line in cards.blocks().splitlines()[2:]]
    assert len(cells) == 2 * len(cards.CARDS)
    assert all(int(cell.split(", ")[1]) >= 1 for line in cells for cell in line)
