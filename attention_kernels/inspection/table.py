"""Text tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate


def table(
    columns: Mapping[str, str], rows: Iterable[Sequence[object]], width: int | None = None
) -> str:
    """Format rows under the names of the columns, each of which is "left" or "right" aligned.

    width: shorten longer lines to this many characters, if given.
    """
    cells: list[Sequence[object]] = [[*columns], *rows]
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=[*columns.values()])
    if width is None:
        return text
    lines = text.splitlines()
    return "\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in lines)
