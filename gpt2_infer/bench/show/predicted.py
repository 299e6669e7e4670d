"""Predicted times next to measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show.figures import length


def timings_of(prediction: Row, timed: Iterable[Row]) -> list[Row]:
    """Return the measurements of the same backend, and version file, in the same cell."""
    return [
        row
        for row in timed
        if row.samples
        and (row.contender, row.cell) == (prediction.contender, prediction.cell)
        and row.extra.get("version_digest") == prediction.extra.get("version_digest")
    ]


def accuracy(file: File, timed: Sequence[Row]) -> str:
    """Summarize how far predictions are from measurements."""
    ratios = {
        (row.contender, length(row)): row.median / found[0].median
        for row in file.rows
        if row.samples and (found := timings_of(row, timed))
    }
    if not ratios:
        return "None of it has been measured yet."
    errors = {key: abs(ratio - 1) for key, ratio in ratios.items()}
    name, seqlen = worst = max(errors, key=lambda key: errors[key])
    far = sum(error > 0.3 for error in errors.values())
    mean, median = statistics.mean(errors.values()), statistics.median(errors.values())
    return (
        f"The mean error of the {len(ratios)} cells that were measured is {mean:.1%}, the median "
        f"{median:.1%}; {far or 'none'} {'is' if far < 2 else 'are'} off by more than 30 %. The "
        f"worst is `{name}` at N={seqlen}: {ratios[worst]:.2f} times the measured time."
    )
