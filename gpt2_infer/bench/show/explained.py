"""Predicted stalls next to the profiler's, and what-ifs next to the versions that followed them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show import columns
from gpt2_infer.bench.show.figures import Value, group_by
from gpt2_infer.bench.show.pivot import Column, Entry, Getter, Layout, Table


def out_of(line: Entry, part: str, whole: str) -> Value:
    """Return two metrics of a line as "4 of 5"."""
    found, of = line.value(part), line.value(whole)
    return None if found is None else f"{found:.0f} of {of:.0f}"


COMPARED: dict[str, tuple[Getter, str]] = {
    "rank correlation": (columns.metric("rank correlation"), "{:.2f}"),
    "worst lines found": (lambda line: out_of(line, "worst found", "worst"), "{}"),
    "reasons equal": (lambda line: out_of(line, "reasons equal", "reasons"), "{}"),
}
"""How well stalls were predicted, by heading."""


def compared(earlier: File) -> Layout:
    """Return the layout of stalls, first as an earlier model predicted them."""
    before = group_by(earlier.rows, lambda row: row.contender)

    def first(get: Getter) -> Getter:
        def value(line: Entry) -> Value:
            rows = before.get(line.first.contender)  # the earlier model may not have been asked
            return get(Entry(earlier, earlier.rows, rows, rows[0])) if rows else None

        return value

    return Layout(
        title=lambda name, file, block: f"Stalls predicted for {file.study['gpu']} ({name})",
        rows=lambda file: file.rows,
        columns=[
            columns.BACKEND,
            Column("samples", columns.metric("samples"), "{:,.0f}"),
            *(
                Column(f"{head}{when}", of(get), form)
                for head, (get, form) in COMPARED.items()
                for when, of in ((", first", first), (", now", lambda get: get))
            ),
        ],
    )


def worst_lines(name: str, file: File, contender: str) -> Table:
    """Return the lines of a version with the most measured stalls, and what was predicted."""
    rows = [row for row in file.rows if row.contender == contender]
    lines = next(row.extra["lines"] for row in rows if "lines" in row.extra)
    return lines_table(f"The worst lines of `{contender}` ({name})", lines)


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


class Step(NamedTuple):
    """A version, the one that followed it, and the cause of stalls that this took away."""

    version: str
    next_version: str
    change: str
    cause: str = ""
    """The `cause` of the what-ifs, or "" if none stands for the change."""


def step(one: Step, file: File, timed: Sequence[Row]) -> tuple[str, ...]:
    """Return the line of a table of steps: times without the cause, and with the next version."""
    row = next(row for row in file.of("predicted time") if row.contender == one.version)
    what_ifs: list[dict[str, Any]] = row.extra["what_ifs"]
    advice = [x for x in what_ifs if x["cause"] == one.cause]
    before, after = (
        next(x.median for x in timed if x.contender == name and x.cell.items() >= row.cell.items())
        for name in (one.version, one.next_version)
    )
    measured = 1 - after / before
    names = f"`{one.version}`", f"`{one.next_version}`: {one.change}"
    took = f"{before:,.1f} -> {after:,.1f} ({-measured:.0%})"
    if not advice:
        return (*names, "", "", took, "")
    best = min(advice, key=lambda x: x["time_us"])
    predicted = 1 - best["time_us"] / row.median
    place = f"line {best['line']} " if best["line"] else ""
    would = f"{row.median:,.1f} -> {best['time_us']:,.1f} ({-predicted:.0%})"
    return (*names, f"{place}{best['change']}", would, took, f"{predicted / measured:.2f}")


STEPS_HEAD = ["version", "next version", "on the list", "predicted, us", "measured, us", "ratio"]
