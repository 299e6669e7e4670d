"""The tables of `gpt2-infer predict --lines`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from attention_kernels.inspection.advice import Advice
    from attention_kernels.inspection.explain import Explanation, LineStalls

SHOWN = 10


def to_json(one: Explanation) -> dict[str, Any]:
    """Return every field but the prediction."""
    return {key: value for key, value in dataclasses.asdict(one).items() if key != "prediction"}


def format_lines(one: Explanation, width: int | None = None) -> str:
    """Format the lines with most stalls as a table, cut to `width` columns if given."""
    found = one.prediction
    cells: list[tuple[str, ...]] = [("line", "stalls", "main reason", "second reason", "source")]
    worst = one.lines[:SHOWN]
    cells += [_row(found.version, line) for line in worst]
    align = ("left", "right", "left", "left", "left")
    table = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    rows = [
        row if width is None or len(row) <= width else f"{row[: width - 3]}..."
        for row in table.splitlines()
    ]
    text = (
        f"N={found.seqlen}, {found.time_us:.1f} us: a warp issues in {one.issuing:.0%} of its "
        "cycles and stalls in the others. Share of the stalls by source line:\n"
    )
    legend = "\nLine a>b: line a of the kernel calls a function, whose line b stalls."
    has_calls = any(len(line.lines) > 1 for line in worst)
    return "\n".join([text, *rows, *([legend] if has_calls else [])])


def _row(version: str, line: LineStalls) -> tuple[str, ...]:
    reasons = [_reason(line, reason) for reason in line.reasons][:2]
    reasons += [""] * (2 - len(reasons))
    place = ">".join(map(str, line.lines)) or "none"
    return f"{version}:{place}", f"{line.share:.1%}", *reasons, line.source


def _reason(line: LineStalls, reason: str) -> str:
    return f"{line.reasons[reason] / line.share:.0%} {reason}"


def format_advice(one: Explanation) -> str:
    """Format what the call would gain without its largest causes of stalls, one per line."""
    text = ["What it would gain, one change at a time:", ""]
    return "\n".join(text + [_advice(one, advice) for advice in one.advice])


def _advice(one: Explanation, advice: Advice) -> str:
    before, after = one.prediction.time_us, advice.time_us
    times = f"{before:.1f} -> {after:.1f} us"
    where = f"{one.prediction.version}:{advice.line}, " if advice.line else ""
    stalls = f"{advice.share:.0%} {advice.reason}, " if advice.reason else ""
    price = f" ({advice.price})" if advice.price else ""
    return f"{times}: {where}{stalls}{advice.change}{price}"
