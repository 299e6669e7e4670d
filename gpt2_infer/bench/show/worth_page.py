"""The page on what a kernel is worth: a table and pictures in one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from html import escape

from gpt2_infer.bench.record import File
from gpt2_infer.bench.show.pivot import Table
from gpt2_infer.bench.show.tables import tables

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src \
'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }} img {{ max-width: 100% }}
table {{ border-collapse: collapse }} td, th {{ padding: 0.2em 0.6em; text-align: left }}
</style>
<h1>{title}</h1>
<table>
<caption>{how}</caption>
{rows}
</table>
{notes}
"""
ALT = {"modes": "Time by mode, attention apart", "bars": "The kernel alone, with the spread"}


def render(file: File, pictures: Mapping[str, bytes]) -> str:
    """Return the HTML page on results of the kind "worth"; pictures: SVGs by plot name."""
    (table,) = tables("", file)
    lines = [("th", table.head), *(("td", row) for row in table.rows)]
    rows = ("".join(f"<{tag}>{escape(x)}" for x in line) for tag, line in lines)
    image = '<p><img alt="{}" src="data:image/svg+xml;base64,{}">'.format
    images = [image(ALT[x], base64.b64encode(svg).decode()) for x, svg in pictures.items()]
    return PAGE.format(
        title=escape(f"What {file.study['kernel']} is worth"),
        how=escape(table.title),
        rows="\n".join(f"<tr>{row}" for row in rows),
        notes="\n".join([*(f"<p>{escape(line)}" for line in remarks(file, table)), *images]),
    )


def remarks(file: File, table: Table) -> Iterator[str]:
    """Yield the prediction for the kernel alone, and why figures are missing, a line each."""
    for row in file.of("predicted time"):
        timed = file.beside(row, "time")
        measured = row.extra.get("measured_us") or (
            timed.median if timed and timed.samples and "predicted" not in timed.extra else None
        )
        if row.samples and measured:
            times = f"{row.median:.1f} us predicted, {measured:.1f} us measured"
            yield f"alone: {times}, a ratio of {row.median / measured:.2f}"
    yield from (f"{name}: {note.removeprefix('refused: ')}" for name, note in table.notes.items())
    if any("~" in row for row in table.rows):
        yield "~: no difference beyond the spread of the samples"
