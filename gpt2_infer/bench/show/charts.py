"""Charts of results; measures nothing and does not import torch."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from gpt2_infer.bench.record import FREE_ATTENTION, File, Row
from gpt2_infer.bench.show.figures import cell_name, detail_length, group_by, how, length, main_rows

# Backends outside the ladders have Okabe and Ito's colours, the versions of a ladder shades of
# viridis: both are safe for the colour-blind.
COLOURS = {
    "NAIVE_PYTORCH": "#000000",
    "PYTORCH_SDPA_MATH": "#999999",
    "PYTORCH_SDPA_EFFICIENT_ATTENTION": "#D55E00",
    "PYTORCH_SDPA_FLASH_ATTENTION": "#CC79A7",
    "PYTORCH_SDPA_CUDNN_ATTENTION": "#E69F00",
    FREE_ATTENTION: "#56B4E9",
}
OTHERS = ("#0072B2", "#009E73", "#882255", "#44AA99", "#332288", "#AA4499", "#661100", "#DDCC77")
MARKERS = "osD^vP*Xhd<>p8"
STYLE = Path(__file__).with_name("charts.mplstyle")
QUIET = "#555555"
REST = "#BBBBBB"
"""The colour of all time but attention's."""
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")
WHISKERS = "median, least to most"
BESIDE: dict[str, Any] = {"textcoords": "offset points"}
"""Shifts a text by some points from its place."""


def render(file: File, wanted: Container[str] | None = None) -> dict[str, bytes]:
    """Draw the wanted plots of a results file, by default all; return SVGs by plot name.

    The same file gives the same picture, except for the last digits of coordinates, which depend on
    the processor.
    """
    drawn = {}
    with style.context(STYLE):
        for name, plot in PLOTS.get(file.study["kind"], {}).items():
            if (wanted is None or name in wanted) and (figure := plot(file)):
                buffer = io.BytesIO()
                figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
                drawn[name] = buffer.getvalue()
    return drawn


def is_same(one: str, other: str) -> bool:
    """Return whether two SVGs have the same text and elements, within 0.01 points."""
    number = r"-?\d+\.\d+"
    # Ids are hashes over coordinates.
    one, other = (
        re.sub(r"(?<=[#\"])[a-zA-Z][0-9a-f]{10}(?=[\")])", "id", svg) for svg in (one, other)
    )
    if re.split(number, one) != re.split(number, other):
        return False
    pairs = zip(re.findall(number, one), re.findall(number, other), strict=True)
    return all(abs(float(x) - float(y)) < 0.01 for x, y in pairs)


def time_lines(file: File) -> Figure | None:
    """Draw kernel times and TFLOP/s, with the card's limit, by seqlen."""
    group = _timed(file)
    if len({*map(length, group)}) < 2:
        return None
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(xlabel="seqlen", ylabel=f"microseconds: {WHISKERS}", yscale="log")
    right.set(xlabel="seqlen", ylabel="TFLOP/s", yscale="log")
    _draw_lines(left, group, lambda _, microseconds: microseconds)
    lines = _draw_lines(right, group, lambda row, us: row.kernel.flops / us / 1e6)
    # The legend is in the order of the lines' right ends.
    lines.sort(key=lambda line: -line.get_ydata()[-1])
    figure.legend(handles=lines, loc="outside right upper")
    dtype = group[0].kernel.dtype
    if limit := file.provenance.limits.get(f"matmul_{dtype}_tflops"):
        right.axhline(limit, color=QUIET, linestyle=":", linewidth=1)
        text = f"8192\u00b3 matmul, {dtype}: {limit:.0f}"
        right.annotate(text, (min(map(length, group)), limit), va="bottom", fontsize=8)
    _put_title(left, f"Attention alone, {cell_name(group[0])}", how(file))
    return figure


def _draw_lines(
    axes: Axes, group: Sequence[Row], height: Callable[[Row, float], float]
) -> list[Any]:
    """Draw and return a line per backend over the lengths, with whiskers from least to most.

    height: converts a sample.
    """
    looks, lines = _looks(group), []
    for name, mine in group_by(group, lambda row: row.contender).items():
        colour, marker = looks[name]
        points = sorted((length(row), height(row, row.median)) for row in mine)
        least, most = ([height(row, row.spread[end]) for row in mine] for end in (0, 1))
        axes.vlines([*map(length, mine)], least, most, colour, linewidth=1)
        lines += axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            label=f"{name} ({mine[0].extra['precision']})",
        )
    lengths = sorted({*map(length, group)})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [*map(str, lengths)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)
    return lines


def median_bars(file: File) -> Figure | None:
    """Draw each backend's median at detail_length(): a kernel's time, or a generation's."""
    group = _timed(file)
    rows = [row for row in group if length(row) == detail_length(group)]
    if len(rows) < 2:
        return None
    if "seqlen" in rows[0].cell:
        title, unit, form = f"Attention alone, {rows[0].kernel}", "microseconds", "{:,.1f}"
    else:
        title = f"Generation, {cell_name(rows[0])}: {length(rows[0])} tokens"
        unit, form = "seconds", "{:.3f}"
    looks = _looks(rows)
    figure = Figure(figsize=(9, 1.3 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=8)
    for tick, row in zip(axes.yaxis.get_major_ticks(), rows, strict=True):
        tick.label1.set_verticalalignment("bottom")
        text = row.extra.get("change") or row.extra["precision"]
        look = {"ha": "right", "va": "top", "fontsize": 6.5, "color": QUIET, **BESIDE}
        axes.annotate(text, (0, tick.get_loc()), (-7, -1), axes.get_yaxis_transform(), **look)
    for place, row in enumerate(rows):
        end = (row.spread[1], place)
        axes.annotate(form.format(row.median), end, (4, 0), va="center", fontsize=7.5, **BESIDE)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(row.spread[1] for row in rows))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.grid(visible=False, axis="y")
    below = [row.median - row.spread[0] for row in rows]
    above = [row.spread[1] - row.median for row in rows]
    axes.barh(
        range(len(rows)),
        [row.median for row in rows],
        color=[looks[row.contender][0] for row in rows],
        xerr=[below, above],
        error_kw={"linewidth": 0.8},
    )
    axes.set_xlabel(f"{unit}: {WHISKERS}")
    _put_title(axes, title, how(file))
    return figure


def mode_bars(file: File) -> Figure | None:
    """Draw each mode's times: of everything else, which FREE_ATTENTION takes, and of attention."""
    modes = group_by(
        [row for row in file.of("generation") if row.samples], lambda row: str(row.cell["mode"])
    )
    if not modes:
        return None
    looks = _looks([row for rows in modes.values() for row in rows])
    heights = [len(rows) for rows in modes.values()]
    size = (9, 0.9 + 0.5 * len(modes) + 0.3 * sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(modes), 1, squeeze=False, height_ratios=heights)
    for (mode, rows), (axes,) in zip(modes.items(), grid, strict=True):
        free = next((row.median for row in rows if row.contender == FREE_ATTENTION), 0.0)
        for place, row in enumerate(rows):
            told = f"{row.median:.3g} s" + ", predicted" * ("predicted" in row.extra)
            axes.annotate(told, (row.median, place), (4, 0), va="center", fontsize=7.5, **BESIDE)
            axes.barh(place, row.median, color=looks[row.contender][0])
            axes.barh(place, min(free, row.median), color=REST)
        axes.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.18 * max(row.median for row in rows))
        axes.grid(visible=False, axis="y")
        axes.set_title(mode, loc="left", fontsize=9)
    axes.set_xlabel("seconds: everything else in grey, then attention")
    return figure


def _put_title(axes: Axes, title: str, facts: str) -> None:
    """Write a title, and below it in grey how its figures were measured."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=20)
    axes.annotate(facts, (0, 1), (0, 6), "axes fraction", fontsize=8, color=QUIET, **BESIDE)


def _timed(file: File) -> list[Row]:
    """Return the rows of the first shape that have samples."""
    first = next(iter(group_by(main_rows(file), cell_name).values()))
    return [row for row in first if row.samples]


def _looks(group: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Return each backend's colour and marker: by name, by version, or the next free ones."""
    names = list(dict.fromkeys(row.contender for row in group))
    families = {row.contender: row.extra.get("family", "") for row in group}
    shades: dict[str, str] = {}
    for family in dict.fromkeys(families.values()):
        steps = [n for n in names if families[n] == family and re.search(r"_\d+$", n)]
        for index, name in enumerate(steps if len(steps) > 1 else []):
            shade = mpl.colormaps["viridis"](0.95 - 0.95 * index / (len(steps) - 1))
            shades[name] = to_hex(shade)
    fixed = {COLOURS.get(n) for n in names}
    free = iter([colour for colour in OTHERS if colour not in fixed] * 9)
    colours = {n: COLOURS.get(n) or shades.get(n) or next(free) for n in names}
    return {n: (colours[n], MARKERS[index % len(MARKERS)]) for index, n in enumerate(names)}


PLOTS: dict[str, dict[str, Callable[[File], Figure | None]]] = {
    "generation": {"bars": median_bars},
    "kernel": {"time": time_lines, "bars": median_bars},
    "worth": {"modes": mode_bars, "bars": median_bars},
}
