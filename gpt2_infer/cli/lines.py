"""The tables of `gpt2-infer predict --lines`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from attention_kernels.inspection.explain import Explanation, LineStalls
    from attention_kernels.inspection.nsight import Comparison

SHOWN = 10


def to_json(one: Explanation) -> dict[str, Any]:
    """Return the stalls, and what the call would gain without its largest causes."""
    return {
        "reasons": one.reasons,
        "issuing": one.issuing,
        "lines": [*map(dataclasses.asdict, one.lines)],
        "advice": [*map(dataclasses.asdict, one.advice)],
    }


def format_lines(one: Explanation, width: int | None = None) -> str:
    """Format the lines with most stalls as a table, cut to `width` columns if given."""
    found, worst = one.prediction, one.lines[:SHOWN]
    length = f"N={found.seqlen}, " if found.seqlen else ""
    heading = (
        f"{length}{found.time_us:.1f} us: a warp issues in {one.issuing:.0%} of its "
        "cycles and stalls in the others"
    )
    cells: list[tuple[str, ...]] = [("line", "stalls", "main reason", "second reason", "source")]
    cells += [_row(found.version, line) for line in worst]
    table = _table(cells, width)
    legend = "\n\nLine a>b: line a of the kernel calls a function, whose line b stalls."
    has_calls = any(len(line.lines) > 1 for line in worst)
    return f"{heading}\n\n{table}{legend if has_calls else ''}"


def _table(cells: Sequence[tuple[str, ...]], width: int | None, numbers: int = 1) -> str:
    """Format a table. numbers: how many columns after the first hold numbers."""
    align = ["left", *["right"] * numbers, *["left"] * (len(cells[0]) - 1 - numbers)]
    table = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(
        row if width is None or len(row) <= width else f"{row[: width - 3]}..."
        for row in table.splitlines()
    )


def _row(version: str, line: LineStalls) -> tuple[str, ...]:
    reasons = [f"{line.reasons[x] / line.share:.0%} {x}" for x in line.reasons][:2]
    reasons += [""] * (2 - len(reasons))
    place = ">".join(map(str, line.lines)) or "none"
    return f"{version}:{place}", f"{line.share:.1%}", *reasons, line.source


def format_advice(one: Explanation) -> str:
    """Format what the call would gain without its largest causes of stalls, one per line."""
    found = one.prediction
    cells: list[tuple[str, ...]] = [("line", "stalls", "main reason", "time, us", "change")]
    for advice in one.advice:
        place = f"{found.version}:{advice.line}" if advice.line else ""
        share = f"{advice.share:.1%}" if advice.reason else ""
        times = f"{found.time_us:.1f} -> {advice.time_us:.1f}"
        change = f"{advice.change}: {advice.price}" if advice.price else advice.change
        cells.append((place, share, advice.reason, times, change))
    return f"What it would gain, one change at a time:\n\n{_table(cells, None)}"


def format_comparison(version: str, found: Comparison, width: int | None = None) -> str:
    """Format the lines with most measured stalls, and how well they were predicted."""
    cells: list[tuple[str, ...]] = [
        ("line", "measured", "predicted", "measured reason", "predicted reason", "source")
    ]
    for line in found.lines[:SHOWN]:
        shares = f"{line.measured:.1%}", f"{line.predicted:.1%}"
        reasons = line.measured_reason, line.predicted_reason
        cells.append((f"{version}:{line.line}", *shares, *reasons, line.source))
    title = "Stalls in the report, beside the predicted ones"
    return f"{title}:\n\n{_table(cells, width, 2)}\n\n{found}."
