"""Lines with their measured and their predicted stalls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpt2_infer.bench.show.pivot import Table


def lines_table(title: str, lines: Iterable[Mapping[str, Any]]) -> Table:
    """Return the measured and the predicted stalls of lines, given the fields of ComparedLine."""
    return Table(
        title,
        ["line", "measured", "predicted", "measured reason", "predicted reason", "source"],
        [
            (
                str(line["line"]),
                f"{line['measured']:.1%}",
                f"{line['predicted']:.1%}",
                line["measured_reason"],
                line["predicted_reason"],
                f"`{line['source']}`" if line["source"] else "",
            )
            for line in lines
        ],
    )
