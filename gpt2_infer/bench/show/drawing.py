"""What all charts have in common: their style, figures, titles and bars."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # a backend without a display; set before pyplot is imported

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

STYLE = Path(__file__).with_name("charts.mplstyle")
QUIET = "#555555"
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")


def to_svg(figure: Figure) -> bytes:
    """Return the SVG of a figure, and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return buffer.getvalue()


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


def one_axes(height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes; height in inches."""
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    return figure, axes


def two_axes(size: tuple[float, float], **options: Any) -> tuple[Figure, Axes, Axes]:
    """Return a figure with two pairs of axes side by side; size in inches."""
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained", **options)
    return figure, left, right


def put_title(axes: Axes, title: str, facts: str) -> None:
    """Write a title, and below it in grey how its figures were measured."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=20)
    note(axes, facts, (0, 1), (0, 6), "axes fraction", fontsize=8, color=QUIET)


def note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
    coordinates: Any = "data",
    **look: Any,
) -> None:
    """Write a text, shifted by some points from a place in the given coordinates."""
    axes.annotate(text, at, shift, coordinates, "offset points", **look)


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with a name and a description on its left and a text on its right."""

    name: str
    what: str
    value: float
    text: str
    colour: str
    spread: tuple[float, float] | None = None
    """The ends of its whisker."""

    @property
    def end(self) -> float:
        """Where the text begins."""
        return self.spread[1] if self.spread else self.value


def bar_figure(bars: Sequence[Bar], xlabel: str, title: str = "", facts: str = "") -> Figure:
    """Draw horizontal bars."""
    figure, axes = one_axes(1.3 + 0.42 * len(bars))
    draw_bars(axes, bars)
    axes.set_xlabel(xlabel)
    if title:
        put_title(axes, title, facts)
    return figure


def draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw horizontal bars with their names, descriptions, texts and whiskers."""
    places = range(len(bars))
    axes.set_yticks(places, [bar.name for bar in bars], fontsize=8)
    for tick, bar in zip(axes.yaxis.get_major_ticks(), bars, strict=True):
        tick.label1.set_verticalalignment("bottom")
        look = {"ha": "right", "va": "top", "fontsize": 6.5, "color": QUIET}
        note(axes, bar.what, (0, tick.get_loc()), (-7, -1), axes.get_yaxis_transform(), **look)
    for place, bar in enumerate(bars):
        note(axes, bar.text, (bar.end, place), (4, 0), va="center", fontsize=7.5)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(bar.end for bar in bars))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.grid(visible=False, axis="y")
    values, colours = [bar.value for bar in bars], [bar.colour for bar in bars]
    spreads = [(bar.value - bar.spread[0], bar.spread[1] - bar.value) for bar in bars if bar.spread]
    whiskers = [*zip(*spreads, strict=True)] if spreads else None
    axes.barh(places, values, color=colours, xerr=whiskers, error_kw={"linewidth": 0.8})
