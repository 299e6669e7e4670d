"""The table of `gpt2-infer predict --lines`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from attention_kernels.inspection.sass.stalls import StalledLine, Stalls
    from attention_kernels.inspection.sass.timing import Prediction

SHOWN = 10


def format_lines(one: Prediction, stalls: Stalls, width: int | None = None) -> str:
    """Format the lines with most stalls as a table, cut to `width` columns if given."""
    length = f"N={one.seqlen}, " if one.seqlen else ""
    heading = (
        f"{length}{one.time_us:.1f} us: a warp issues in {stalls.issuing:.0%} of its "
        "cycles and stalls in the others"
    )
    worst = stalls.lines[:SHOWN]
    cells: list[tuple[str, ...]] = [
        ("line", "stalls", "main reason", "second reason", "waits for", "source")
    ]
    cells += [_row(one.version, line) for line in worst]
    align = ["left", "right", "left", "left", "right", "left"]
    table = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    rows = [
        row if width is None or len(row) <= width else f"{row[: width - 3]}..."
        for row in table.splitlines()
    ]
    if any(line.through for line in worst):
        rows += ["", "Line a>b: line a of the kernel calls a function, whose line b stalls."]
    return "\n".join([heading, "", *rows])


def _row(version: str, line: StalledLine) -> tuple[str, ...]:
    first, second, *_ = [f"{share:.0%} {why}" for why, share in line.reasons.items()] + ["", ""]
    place = ">".join(map(str, (line.line, *line.through))) if line.line else "none"
    awaited = next((f"{at}" for at in line.waits_for if at), "")
    return f"{version}:{place}", f"{line.share:.1%}", first, second, awaited, line.source
