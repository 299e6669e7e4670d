"""What to expect of the fused step on other cards: computed, not measured."""

from __future__ import annotations

import itertools

from gpt2_infer.bench.record import File
from gpt2_infer.bench.show.figures import reading_us, step_us
from gpt2_infer.bench.show.pivot import markdown

KERNELS = 63  # of a step of GPT-2 small: five per layer, and three
# Estimates of the read bandwidth in GB/s: 86 to 92 % of the data sheet's, the H200's share.
CARDS = {"A100 80GB": 1_750, "RTX 3090": 860, "RTX 4090": 930, "RTX 5090": 1_650}


def expected(file: File, contender: str) -> str:
    """Return the table of computed times; file: a contender's measured times at batch 1."""
    lines: list[list[str]] = []
    for (card, gbps), row in itertools.product(CARDS.items(), file.of("time")):
        if row.contender != contender:
            continue
        reading = int(row.extra["weight_bytes"]) / gbps / 1e3
        kernels = step_us(row) - reading_us(row, file)
        total = reading + kernels
        cells = [card, str(row.cell["dtype"]), f"{gbps / 1e3:.2f}", f"{kernels / KERNELS:.1f}"]
        cells += [f"{reading:.0f} + {kernels:.0f} = {total:.0f}", f"{1e6 / total:,.0f}"]
        lines.append(cells)
    head = ["GPU", "dtype", "TB/s", "us per kernel", "us per step", "tokens/s"]
    return markdown(head, lines)
