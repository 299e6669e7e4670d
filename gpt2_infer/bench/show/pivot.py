"""Tables of rows: the columns are data, and one pivot fills them."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tabulate import tabulate

from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show.figures import (
    TIE,
    WITHIN_SPREAD,
    Value,
    figure,
    group_by,
    length,
    main_rows,
)

_NUMBER = re.compile(r"[\d~]|failed|refused|emulated")


@dataclass(frozen=True)
class Table:
    """A table of texts; str() returns Markdown."""

    title: str
    head: list[str]
    rows: Sequence[tuple[str, ...]]
    notes: Mapping[str, str] = field(default_factory=dict)
    """Notes below the table, by contender."""

    @property
    def has_ties(self) -> bool:
        """Whether some figure is omitted because it is within the spread."""
        return any(WITHIN_SPREAD in row for row in self.rows)

    def __str__(self) -> str:
        text = f"{self.title}:\n\n{markdown(self.head, self.rows)}"
        if self.has_ties:
            text += f"\n`{WITHIN_SPREAD}`: {TIE}.\n"
        return text + "".join(f"\n`{name}`: {note}\n" for name, note in self.notes.items())


@dataclass(frozen=True)
class Entry:
    """The data behind one line of a table."""

    file: File
    block: Sequence[Row]
    """All rows of the table."""
    rows: Sequence[Row]
    """The rows of this line."""
    row: Row | None
    """The row behind the current table cell, if it was measured."""

    @property
    def same_cell(self) -> list[Row]:
        """The rows of all contenders in the cell of `row`."""
        return [row for row in self.block if self.row and row.cell == self.row.cell]

    def value(self, metric: str) -> float | None:
        """Return this line's value of a metric; None if it was not measured."""
        return next((r.samples[0] for r in self.rows if r.metric == metric and r.samples), None)

    @property
    def first(self) -> Row:
        """The first row of the line."""
        return self.rows[0]


Getter: TypeAlias = Callable[[Entry], Value]
"""Returns the value that a column shows in a line."""


@dataclass(frozen=True)
class Column:
    """A column, or, with `over`, one column per value of `over` in the table."""

    head: str
    """The heading, with {at} for the value of `over` or the layout's length, and {baseline}."""
    value: Getter
    form: str = "{}"
    """The format of a number."""
    over: Callable[[Row], Any] | None = None


@dataclass(frozen=True)
class Layout:
    """The table layout for one kind of study."""

    title: Callable[[str, File, Sequence[Row]], str]
    """The title of a table, from the file's name, the file and the rows of the table."""
    columns: Sequence[Column]
    rows: Callable[[File], Iterable[Row]] = main_rows
    """The rows of a file that the tables show."""
    block: Callable[[Row], Hashable] = lambda _: None
    """The key of a table: one table per value."""
    line: Callable[[Row], Hashable] = lambda row: (row.contender, *sorted(row.cell.items()))
    """The key of a line: one line per value."""
    at: Callable[[Sequence[Row]], int] | None = None
    """The length shown in columns without `over`."""
    keeps: Callable[[Entry], bool] = lambda _: True
    """Whether a line is shown."""
    remark: Callable[[Row], str] = lambda _: ""
    """A note on a contender whose row has samples."""


def pivot(name: str, file: File, layout: Layout) -> list[Table]:
    """Return the tables of a file, without columns that are entirely blank."""
    found = []
    for block in group_by(layout.rows(file), layout.block).values():
        at = layout.at(block) if layout.at else None
        lines = [
            Entry(file, block, mine, next((r for r in mine if at is None or length(r) == at), None))
            for mine in group_by(block, layout.line).values()
        ]
        lines = [line for line in lines if layout.keeps(line)]
        columns: dict[str, list[str]] = {}
        for column in layout.columns:
            values = [at] if column.over is None else dict.fromkeys(map(column.over, block))
            for value in sorted(values) if column.over is length else values:
                head = column.head.format(at=value, baseline=file.study.get("baseline"))
                cells = (column.value(_about(line, column, value)) for line in lines)
                texts = [figure(cell, column.form) for cell in cells]
                if any(texts):
                    columns[head] = texts
        title = layout.title(name, file, block)
        rows = [*zip(*columns.values(), strict=True)]
        notes = {row.contender: f"{row.status}: {row.reason}" for row in block if not row.samples}
        notes |= {row.contender: note for row in block if (note := layout.remark(row))}
        found.append(Table(title, [*columns], rows, notes))
    return found


def _about(line: Entry, column: Column, value: Any) -> Entry:
    if column.over is None:
        return line
    return replace(line, row=next((r for r in line.rows if column.over(r) == value), None))


def are_numbers(column: Iterable[str]) -> bool:
    """Return whether a column holds only numbers or blanks, to be right-aligned."""
    return all(map(_NUMBER.match, filter(None, column)))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of texts; columns of numbers are right-aligned."""
    align = ["right" if are_numbers(column) else "left" for column in zip(*rows, strict=True)]
    rows = [[_without_bars(cell) for cell in row] for row in rows]
    return tabulate(rows, head, "pipe", disable_numparse=True, colalign=align) + "\n"


def _without_bars(cell: str) -> str:
    """Write code with a `|`, which would end the cell, as HTML."""
    if "|" not in cell:
        return cell
    code = re.sub("`(.*?)`", lambda found: f"<code>{html.escape(found[1])}</code>", cell)
    return code.replace("|", "&#124;")
