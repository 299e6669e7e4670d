"""Tables of rows: the columns are data, and one pivot fills them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tabulate import tabulate

from attention_kernels.inspection.table import table
from gpt2_infer.bench.record import File, ResultsError, Row
from gpt2_infer.bench.show import figures

PAGE = (12, 7)
"""The most rows and columns of a table in a document."""
ALIKE = ("model", "dtype", "batch", "precision")
"""Columns that become a part of the title if they have the same value in all lines."""
_NUMBER = re.compile(r"[\d~]|-\d|-$|failed|refused|emulated")


@dataclass(frozen=True)
class Table:
    """A table of texts; str() returns Markdown."""

    title: str
    head: list[str]
    rows: Sequence[tuple[str, ...]]
    notes: Mapping[str, str] = field(default_factory=dict)
    """Notes below the table, by contender."""

    def chosen(self, rows: str, columns: str) -> Table:
        """Return the part of the table for a page, at most PAGE.

        rows and columns: regular expressions, searched for in a line's text and in a heading.
        Raises ResultsError if what they choose is larger.
        """
        places = [place for place, head in enumerate(self.head) if re.search(columns, head)]
        lines = [
            tuple(line[place] for place in places)
            for line in self.rows
            if re.search(rows, " ".join(line))
        ]
        if len(lines) > PAGE[0] or len(places) > PAGE[1]:
            size = f"{len(lines)} x {len(places)}, more than {PAGE[0]} x {PAGE[1]}"
            raise ResultsError(f"{self.title}: {size}; choose rows and columns")
        left_out = len(self.rows) - len(lines)
        title = f"{self.title}; the file has {left_out} more rows" if left_out else self.title
        hidden = "".join(head for place, head in enumerate(self.head) if place not in places)
        names = (name for name in self.notes if f"`{name}`" not in hidden)
        notes = {name: self.notes[name] for name in names if re.search(rows, f"`{name}`")}
        return Table(title, [self.head[place] for place in places], lines, notes)

    def plain(self, width: int) -> str:
        """Return the table as text, its lines cut to a width."""
        return table(dict(zip(self.head, _alignment(self.rows), strict=True)), self.rows, width)

    def __str__(self) -> str:
        text = f"{self.title}:\n\n{markdown(self.head, self.rows)}"
        if any(figures.WITHIN_SPREAD in row for row in self.rows):
            text += f"\n`{figures.WITHIN_SPREAD}`: {figures.TIE}.\n"
        for note, names in figures.group_by(self.notes, lambda name: self.notes[name]).items():
            text += f"\n{', '.join(f'`{name}`' for name in names)}: {note}\n"
        return text


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


Getter: TypeAlias = Callable[[Entry], figures.Value]
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
    rows: Callable[[File], Iterable[Row]] = figures.main_rows
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
    """Return the tables of a file, without blank columns, and with ALIKE ones as text."""
    found = []
    for block in figures.group_by(layout.rows(file), layout.block).values():
        at = layout.at(block) if layout.at else None
        lines = []
        for mine in figures.group_by(block, layout.line).values():
            shown = (row for row in mine if at is None or figures.length(row) == at)
            lines.append(Entry(file, block, mine, next(shown, None)))
        lines = [line for line in lines if layout.keeps(line)]
        columns: dict[str, list[str]] = {}
        for column in layout.columns:
            values = [at] if column.over is None else dict.fromkeys(map(column.over, block))
            for value in sorted(values) if column.over is figures.length else values:
                head = column.head.format(at=value, baseline=file.study.get("baseline"))
                cells = (column.value(_about(line, column, value)) for line in lines)
                if any(texts := [figures.figure(cell, column.form) for cell in cells]):
                    columns[head] = texts
        alike = [head for head in ALIKE if len({*columns.get(head, ())}) == 1 < len(lines)]
        told = [f"{head} {columns.pop(head)[0]}" for head in alike]
        title = "; ".join([layout.title(name, file, block), *filter(None, [", ".join(told)])])
        notes = {row.contender: f"{row.status}: {row.reason}" for row in block if not row.samples}
        for row in block:
            if note := layout.remark(row):
                before = notes.get(row.contender, note)
                notes[row.contender] = note if before == note else f"{before}; {note}"
        found.append(Table(title, [*columns], [*zip(*columns.values(), strict=True)], notes))
    return found


def _about(line: Entry, column: Column, value: Any) -> Entry:
    if column.over is None:
        return line
    return replace(line, row=next((r for r in line.rows if column.over(r) == value), None))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of texts; columns of numbers and blanks are right-aligned."""
    align = _alignment(rows)
    return tabulate(rows, head, "pipe", disable_numparse=True, colalign=align) + "\n"


def _alignment(rows: Sequence[Sequence[str]]) -> list[str]:
    are_numbers = [all(map(_NUMBER.match, filter(None, x))) for x in zip(*rows, strict=True)]
    return ["right" if is_right else "left" for is_right in are_numbers]
