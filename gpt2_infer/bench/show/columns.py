"""Values of a table's columns, and the columns that several tables have."""

from __future__ import annotations

from collections.abc import Callable

from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show.figures import Value, calls_of, new_tokens, ratio, steps_of, times
from gpt2_infer.bench.show.pivot import Column, Entry, Getter


def first(value: Callable[[Row], Value]) -> Getter:
    """Return a value of a line's first row."""
    return lambda line: value(line.first)


def timed(value: Callable[[Row], Value]) -> Getter:
    """Return a value of a cell's row; blank if it has no samples."""
    return lambda line: value(line.row) if line.row and line.row.samples else None


def median(line: Entry) -> Value:
    """Return the median of a cell's row, or its status if it has no samples."""
    if not line.row:
        return None
    return line.row.median if line.row.samples else line.row.status


def cell(name: str) -> Getter:
    """Return a field of a line's cell."""
    return first(lambda row: row.cell[name])


def extra(name: str) -> Getter:
    """Return a field of `extra`; blank if a row lacks it."""
    return first(lambda row: row.extra.get(name))


def of(find: Callable[[File, Row], Row | None], value: Callable[[Row, Entry], Value]) -> Getter:
    """Return a value of the row that find() returns for a cell's row; blank without samples."""

    def got(line: Entry) -> Value:
        found = line.row and find(line.file, line.row)
        return value(found, line) if found and found.samples else None

    return got


def versus(line: Entry) -> str:
    """Return how many times as fast as the baseline a cell's row is."""
    found = ratio(line.row, line.same_cell, line.file.study["baseline"]) if line.row else None
    return times(found)


def tokens(line: Entry) -> int:
    """Return the new tokens of a sample of a cell's row."""
    return new_tokens(line.file, line.row or line.first)


def per_second(row: Row, line: Entry) -> float:
    """Return the median tokens per second."""
    return tokens(line) / row.median


def least_and_most(row: Row, line: Entry) -> str:
    """Return the least and the most tokens per second."""
    least, most = row.spread
    return f"{tokens(line) / most:,.0f} .. {tokens(line) / least:,.0f}"


BACKEND = Column("backend", first(lambda row: f"`{row.contender}`"))
CONTENDER = Column("contender", first(lambda row: row.contender))
DTYPE = Column("dtype", cell("dtype"))
DECODED = (
    Column("model", cell("model")),
    DTYPE,
    Column("batch", cell("batch")),
    Column("piece", first(lambda row: row.cell.get("piece") or None)),
    CONTENDER,
)
PRECISION = Column("precision", extra("precision"))
RATE = Column("tokens/s", of(steps_of, per_second), "{:,.0f}")
CALL_RATE = Column("tokens/s, whole calls", of(calls_of, per_second), "{:,.0f}")
ENERGY = Column(
    "mJ per token",
    of(
        lambda file, row: file.beside(row, "energy"),
        lambda row, line: 1e3 * row.median / tokens(line),
    ),
    "{:,.1f}",
)
