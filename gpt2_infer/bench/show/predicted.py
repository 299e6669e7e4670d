"""Predicted times next to measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpt2_infer.bench.record import File, Row, timings_of
from gpt2_infer.bench.show.figures import length

SUMMARY = ("cells", "mean error", "median", "off by over 30 %", "the worst, ratio")
"""The headings of summary()."""


def errors(file: File, timed: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Return predicted over measured time, by backend and length."""
    return {
        (row.contender, length(row)): row.median / found[0].median
        for row in file.rows
        if row.samples and (found := timings_of(row, timed))
    }


def summary(ratios: dict[tuple[str, int], float]) -> list[str]:
    """Summarize how far predictions are from measurements."""
    off = {key: abs(ratio - 1) for key, ratio in ratios.items()}
    name, seqlen = worst = max(off, key=lambda key: off[key])
    mean, median = statistics.mean(off.values()), statistics.median(off.values())
    far = sum(error > 0.3 for error in off.values())
    where = f"`{name}`, N={seqlen}: {ratios[worst]:.2f}"
    return [f"{len(off)}", f"{mean:.1%}", f"{median:.1%}", f"{far}", where]
