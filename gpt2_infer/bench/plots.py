"""Results as pictures; nothing is measured here, and torch is not imported."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gpt2_infer.bench.results import (
    FREE_ATTENTION,
    GenerationTiming,
    Inspection,
    KernelSeries,
    KernelTiming,
    Results,
    Series,
)
from gpt2_infer.bench.tables import AnySeries, detail_seqlen, group_by, where

STYLE = Path(__file__).with_suffix(".mplstyle")
# Okabe and Ito's colours, which the colour-blind can tell apart, for backends that are no rung; the
# rungs of a ladder are shades of viridis, which they can tell apart, too.
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
Points = dict[str, list[tuple[int, float]]]


def render(results: Results) -> dict[str, bytes]:
    """Draw every plot that a results file has, as SVG by the plot's name.

    The same file gives the same picture, except for the last digits of coordinates, which depend on
    the processor.
    """
    drawn = {}
    with plt.style.context(STYLE):
        for name, plot in PLOTS.get(type(results), {}).items():
            figure = plot(results)
            if figure is not None:
                buffer = io.BytesIO()
                figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
                plt.close(figure)
                drawn[name] = buffer.getvalue()
    return drawn


def is_same(one: str, other: str) -> bool:
    """Tell whether two SVGs have the same text and elements, within 0.01 points of each other."""
    number = r"-?\d+\.\d+"
    # An id is a hash over coordinates.
    one, other = (
        re.sub(r"(?<=[#\"])[a-zA-Z][0-9a-f]{10}(?=[\")])", "id", svg) for svg in (one, other)
    )
    if re.split(number, one) != re.split(number, other):
        return False
    pairs = zip(re.findall(number, one), re.findall(number, other), strict=True)
    return all(abs(float(x) - float(y)) < 0.01 for x, y in pairs)


# ---- Plots ---------------------------------------------------------------------------------------


def generation_time(results: GenerationTiming) -> Figure | None:
    """Draw seconds to generate, by the number of tokens: the case study's plot."""
    group = _first_shape(results.series)
    lines = _lines(group, lambda s: s.median)
    if not _has_lengths(lines):
        return None
    figure, axes = _figure(5)
    _draw_lines(axes, lines, group)
    _title(axes, f"Generation, {group[0].cell.shape}", _how(results))
    axes.set(xlabel="tokens, prompt included", ylabel="seconds", xscale="log", yscale="log")
    _plain_ticks(axes, [x for x, _ in next(iter(lines.values()))])
    return figure


def generation_bars(results: GenerationTiming) -> Figure | None:
    """Draw the longest generation of each backend."""
    group = _first_shape(results.series)
    longest = max(series.cell.max_tokens for series in group)
    at = [s for s in group if s.samples and s.cell.max_tokens == longest]
    title = f"Generation, {group[0].cell.shape}: {longest} tokens"
    return _bars(at, title, _how(results), "seconds", "{:.3f}")


def peak_memory(results: GenerationTiming) -> Figure | None:
    """Draw memory at its peak, by the number of tokens: the case study's open question."""
    group = [
        series
        for series in _first_shape(results.series)
        if series.peak_memory_bytes and series.name != FREE_ATTENTION
    ]
    lines = _lines(group, lambda s: (s.peak_memory_bytes or 0) / 2**20)
    if not _has_lengths(lines):
        return None
    figure, axes = _figure(5)
    _draw_lines(axes, lines, group)
    facts = f"{where(results.provenance)}; one call each"
    _title(axes, "Device memory at its peak, weights included", facts)
    axes.set(xlabel="tokens, prompt included", ylabel="MiB", xscale="log")
    _plain_ticks(axes, [x for x, _ in next(iter(lines.values()))])
    return figure


def kernel_time(results: KernelTiming) -> Figure | None:
    """Draw the kernel alone: microseconds, and TFLOP/s below the card's limit, by seqlen."""
    group = _first_shape(results.series)
    lines = _lines(group, lambda s: s.median)
    if not _has_lengths(lines):
        return None
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _draw_lines(left, lines, group, legend=False)
    tflops = _lines(group, lambda s: s.cell.flops / s.median / 1e6)
    _draw_lines(right, tflops, group)
    seqlens = sorted({series.cell.seqlen for series in group})
    dtype = group[0].cell.dtype
    if limit := results.provenance.limits.get(f"matmul_{dtype}_tflops"):
        right.axhline(limit, color="#555555", linestyle=":", linewidth=1)
        text = f"8192\u00b3 matmul, {dtype}: {limit:.0f}"
        right.annotate(text, (seqlens[0], limit), va="bottom", fontsize=8)
    _title(left, f"Attention alone, {group[0].cell.shape}", _how(results))
    left.set(xlabel="seqlen", ylabel="microseconds", xscale="log", yscale="log")
    right.set(xlabel="seqlen", ylabel="TFLOP/s", xscale="log", yscale="log")
    for axes in (left, right):
        _plain_ticks(axes, seqlens)
    return figure


def kernel_bars(results: KernelTiming) -> Figure | None:
    """Draw one seqlen, 1,024 or the longest, of each backend."""
    at = _at_one_seqlen(results)
    title = f"Attention alone, {at[0].cell}" if at else ""
    return _bars(at, title, _how(results), "microseconds", "{:,.1f}")


def error_and_speed(results: KernelTiming) -> Figure | None:
    """Draw the largest error against float64, by the time."""
    at = _at_one_seqlen(results)
    checks = [series.check for series in at if series.check]
    errors = [check.error for check in checks if check.error is not None]
    naive_error = next((c.naive_error for c in checks if c.naive_error is not None), None)
    if len(at) < 2 or len(errors) < len(at) or naive_error is None:
        return None
    figure, axes = _figure(5)
    for series, error, (colour, marker) in zip(at, errors, _looks(at), strict=True):
        axes.plot(
            series.median,
            error,
            marker,
            color=colour,
            markersize=8,
            markeredgecolor="black",
            markeredgewidth=0.4,
            label=f"{series.name} ({series.precision})",
        )
    axes.axhline(naive_error, color="#555555", linestyle=":", linewidth=1)
    axes.annotate(
        "plain PyTorch in this dtype",
        (1, naive_error),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    _title(axes, str(at[0].cell), _how(results))
    axes.set(xlabel="microseconds", xscale="log", yscale="log")
    axes.set_ylabel("largest error against float64")
    times = [series.median for series in at]
    low, high = axes.get_ylim()
    subs = (1,) if max(times) > 300 * min(times) else (1, 2, 5)
    _log_ticks(axes.xaxis, subs, "{:,.10g}")
    _log_ticks(axes.yaxis, (1, 1.5, 2, 3, 5, 7), "{:.1e}" if high > 1.5 * low else "{:.2e}")
    figure.legend(loc="outside right upper")
    return figure


def shared_load_bars(results: Inspection) -> Figure | None:
    """Draw shared loads of each version and the bank conflicts on them."""
    counted = [one for one in results.versions if "shared_load_requests" in one.metrics]
    if len(counted) < 2:
        return None
    loads = [one.metrics["shared_load_requests"] for one in counted]
    conflicts = [one.metrics["shared_load_conflicts"] for one in counted]
    ends = [load + conflict for load, conflict in zip(loads, conflicts, strict=True)]
    texts = [
        f"{load:,.0f}" + (f" + {conflict:,.0f}" if conflict else "")
        for load, conflict in zip(loads, conflicts, strict=True)
    ]
    figure, axes = _bar_axes([(one.name, one.change) for one in counted], ends, texts)
    places = range(len(counted))
    axes.barh(places, loads, color="#0072B2", label="loads of a warp")
    axes.barh(places, conflicts, left=loads, color="#D55E00", label="bank conflicts on them")
    _title(axes, "Shared memory: loads in the source", str(results.shape))
    figure.legend(loc="outside lower right", ncols=2)
    return figure


PLOTS: dict[type, dict[str, Callable[[Any], Figure | None]]] = {
    GenerationTiming: {"time": generation_time, "bars": generation_bars, "memory": peak_memory},
    KernelTiming: {"time": kernel_time, "bars": kernel_bars, "error": error_and_speed},
    Inspection: {"bars": shared_load_bars},
}


# ---- What is drawn -------------------------------------------------------------------------------


def _first_shape(series: Sequence[AnySeries]) -> list[AnySeries]:
    """Return the series of the first shape."""
    return next(iter(group_by(series, lambda s: s.cell.shape).values()))


def _at_one_seqlen(results: KernelTiming) -> list[KernelSeries]:
    group = _first_shape(results.series)
    chosen = detail_seqlen({series.cell.seqlen for series in group})
    return [s for s in group if s.samples and s.cell.seqlen == chosen]


def _lines(group: Sequence[AnySeries], y: Callable[[AnySeries], float]) -> Points:
    groups = group_by([series for series in group if series.samples], lambda s: s.name)
    return {name: sorted((s.cell.length, y(s)) for s in mine) for name, mine in groups.items()}


def _has_lengths(lines: Points) -> bool:
    return len({x for points in lines.values() for x, _ in points}) > 1


def _how(results: GenerationTiming | KernelTiming) -> str:
    return f"{where(results.provenance)}; medians of {results.rounds} interleaved rounds"


# ---- How it is drawn -----------------------------------------------------------------------------


def _looks(group: Sequence[Series]) -> list[tuple[str, str]]:
    """Return colour and marker of each series: by name, by rung, or the next free ones."""
    names = list(dict.fromkeys(series.name for series in group))
    families = {series.name: series.family for series in group}
    shades: dict[str, str] = {}
    for family in dict.fromkeys(families.values()):
        steps = [n for n in names if families[n] == family and re.search(r"_\d+$", n)]
        for index, name in enumerate(steps):
            shade = plt.get_cmap("viridis")(0.95 - 0.95 * index / max(len(steps) - 1, 1))
            shades[name] = mpl.colors.to_hex(shade)
    free = iter(OTHERS * 9)
    colours = {n: COLOURS.get(n) or shades.get(n) or next(free) for n in names}
    markers = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(names)}
    return [(colours[series.name], markers[series.name]) for series in group]


def _draw_lines(axes: Axes, lines: Points, group: Sequence[Series], *, legend: bool = True) -> None:
    looks = {series.name: look for series, look in zip(group, _looks(group), strict=True)}
    precisions = {series.name: series.precision for series in group}
    for name, points in lines.items():
        colour, marker = looks[name]
        axes.plot(
            *zip(*points, strict=True),
            "--" if name == FREE_ATTENTION else "-",
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            label=f"{name} ({precisions[name]})",
        )
    if legend:  # in the order of the lines' right ends
        handles, labels = axes.get_legend_handles_labels()
        ends = [points[-1][1] for points in lines.values()]
        order = sorted(range(len(labels)), key=lambda i: -ends[i])
        axes.figure.legend(
            [handles[i] for i in order], [labels[i] for i in order], loc="outside right upper"
        )


def _bars(at: Sequence[Series], title: str, how: str, unit: str, form: str) -> Figure | None:
    """Draw horizontal bars of medians, with a whisker from the least to the most."""
    if len(at) < 2:
        return None
    medians = [series.median for series in at]
    low, high = zip(*(series.spread for series in at), strict=True)
    whiskers = [
        [median - least for median, least in zip(medians, low, strict=True)],
        [most - median for median, most in zip(medians, high, strict=True)],
    ]
    figure, axes = _bar_axes(
        [(series.name, series.change or series.precision) for series in at],
        high,
        [form.format(median) for median in medians],
    )
    colours = [colour for colour, _ in _looks(at)]
    axes.barh(range(len(at)), medians, color=colours, xerr=whiskers, error_kw={"linewidth": 0.8})
    _title(axes, title, how)
    axes.set_xlabel(f"{unit}: median, least to most")
    return figure


def _bar_axes(
    labels: Sequence[tuple[str, str]], ends: Sequence[float], texts: Sequence[str]
) -> tuple[Figure, Axes]:
    """Prepare axes for horizontal bars, each with its name, what it is, and a text at its end."""
    figure, axes = _figure(1.3 + 0.42 * len(labels))
    axes.set_yticks(range(len(labels)), [name for name, _ in labels], fontsize=8)
    for tick, (_, what) in zip(axes.yaxis.get_major_ticks(), labels, strict=True):
        tick.label1.set_verticalalignment("bottom")
        axes.annotate(
            what,
            (0, tick.get_loc()),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-7, -1),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=6.5,
            color="#555555",
        )
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.annotate(
            text,
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(ends))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(visible=False, axis="y")
    return figure, axes


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    return figure, axes


def _title(axes: Axes, title: str, facts: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=20)
    axes.text(0, 1.015, facts, transform=axes.transAxes, fontsize=8, color="#555555")


def _log_ticks(axis: Any, subs: Sequence[float], form: str) -> None:
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axis.set_minor_locator(NullLocator())


def _plain_ticks(axes: Axes, values: list[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
