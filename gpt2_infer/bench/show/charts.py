"""Charts of results; measures nothing and does not import torch."""

from __future__ import annotations

import io
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # must precede pyplot; needs no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gpt2_infer.bench.record import FREE_ATTENTION, File, Row
from gpt2_infer.bench.show.figures import (
    cell_name,
    detail_length,
    group_by,
    has_shapes,
    how,
    length,
    main_rows,
    roofs,
    where,
)
from gpt2_infer.bench.show.tables import shape_of, tokens_per_second

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
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")


def render(file: File) -> dict[str, bytes]:
    """Draw all plots of a results file; return SVGs by plot name.

    The same file gives the same picture, except for the last digits of coordinates, which depend on
    the processor.
    """
    drawn = {}
    with plt.style.context(STYLE):
        for name, plot in PLOTS.get(file.study["kind"], {}).items():
            figure = plot(file)
            if figure is not None:
                drawn[name] = _svg(figure)
    return drawn


def _svg(figure: Figure) -> bytes:
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


# ---- Plots ---------------------------------------------------------------------------------------


def generation_time(file: File) -> Figure | None:
    """Draw generation seconds by the number of tokens: the case study's plot."""
    group = _timed(file)
    if not _has_lengths(group):
        return None
    figure, axes = _figure(5)
    axes.set(
        xlabel="tokens, prompt included", ylabel="seconds: median, least to most", yscale="log"
    )
    _draw_lines(axes, group, lambda _, seconds: seconds)
    _title(axes, f"Generation, {cell_name(group[0])}", how(file))
    return figure


def generation_bars(file: File) -> Figure | None:
    """Draw the longest generation of each backend."""
    at = _at_detail(file)
    title = f"Generation, {cell_name(at[0])}: {length(at[0])} tokens" if at else ""
    return _bars(at, title, how(file), "seconds", "{:.3f}")


def peak_memory(file: File) -> Figure | None:
    """Draw peak memory by the number of tokens: the case study's open question."""
    timed = [row for row in _timed(file) if row.contender != FREE_ATTENTION]
    peaks = [(row, peak) for row in timed if (peak := file.beside(row, "peak memory"))]
    if not _has_lengths([row for row, _ in peaks]):
        return None
    figure, axes = _figure(5)
    memory = {id(row): peak.median / 2**20 for row, peak in peaks}
    _draw_lines(axes, [row for row, _ in peaks], lambda row, _: memory[id(row)])
    facts = f"{where(file.provenance)}; one call each"
    _title(axes, "Device memory at its peak, weights included", facts)
    axes.set(xlabel="tokens, prompt included", ylabel="MiB")
    return figure


def kernel_time(file: File) -> Figure | None:
    """Draw kernel times and TFLOP/s, with the card's limit, by seqlen."""
    group = _timed(file)
    if not _has_lengths(group):
        return None
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    left.set(xlabel="seqlen", ylabel="microseconds: median, least to most", yscale="log")
    right.set(xlabel="seqlen", ylabel="TFLOP/s", yscale="log")
    _draw_lines(left, group, lambda _, microseconds: microseconds, legend=False)
    _draw_lines(right, group, lambda row, microseconds: row.kernel.flops / microseconds / 1e6)
    dtype = group[0].kernel.dtype
    if limit := file.provenance.limits.get(f"matmul_{dtype}_tflops"):
        right.axhline(limit, color="#555555", linestyle=":", linewidth=1)
        text = f"8192\u00b3 matmul, {dtype}: {limit:.0f}"
        shortest = min(map(length, group))
        right.annotate(text, (shortest, limit), va="bottom", fontsize=8)
    _title(left, f"Attention alone, {cell_name(group[0])}", how(file))
    return figure


def kernel_bars(file: File) -> Figure | None:
    """Draw each backend at one seqlen, 1,024 or the longest."""
    at = _at_detail(file)
    title = f"Attention alone, {at[0].kernel}" if at else ""
    return _bars(at, title, how(file), "microseconds", "{:,.1f}")


def roofline(file: File) -> Figure | None:
    """Draw each backend's TFLOP/s at the longest seqlen, with the GPU's limits, and its error.

    The error is the relative error of a row, or the largest absolute error in files without it.
    """
    group = _timed(file)
    longest = max(map(length, group), default=0)
    at = [row for row in group if length(row) == longest and row.check]
    if len(at) < 2:
        return None
    speeds = [row.tflops for row in at]
    looks = [_looks(at)[row.contender] for row in at]
    bounds = {
        f"{text}: {roof:.0f}": roof
        for text, roof in roofs(at[0], file.provenance.limits).items()
        if "matmul" not in text
    }
    figure: Figure
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(11, 1.6 + 0.36 * len(at)),
        sharey=True,
        width_ratios=(2, 1),
        layout="constrained",
    )
    _label_bars(
        left,
        [*map(_label, at)],
        speeds,
        [f"{speed:.3g}" for speed in speeds],
    )
    left.set_xlim(0, 1.08 * max(*speeds, *bounds.values()))
    left.barh(range(len(at)), speeds, color=[colour for colour, _ in looks])
    for text, roof in bounds.items():
        left.axvline(roof, color="#555555", linestyle=":", linewidth=1)
        left.annotate(
            text,
            (roof, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, -3),
            textcoords="offset points",
            rotation="vertical",
            ha="right",
            va="top",
            fontsize=7.5,
            color="#555555",
        )
    _title(left, f"TFLOP/s, {at[0].kernel}", how(file))
    checks = [row.check for row in at if row.check]
    by_row = all(check.row_error is not None for check in checks)
    pairs = [(c.row_error, c.row_budget) if by_row else (c.error, c.budget) for c in checks]
    for place, ((error, budget), (colour, _)) in enumerate(zip(pairs, looks, strict=True)):
        if error is not None and budget is not None:
            right.plot(budget, place, "|", color="#555555", markersize=9)
            right.plot(
                error, place, "o", color=colour, markeredgecolor="black", markeredgewidth=0.4
            )
    what = "a row's relative error" if by_row else "largest error"
    _title(right, "Error against float64", f"{what}; | its budget")
    right.set_xscale("log")
    low, high = right.get_xlim()
    _log_ticks(right.xaxis, (1, 3) if high < 100 * low else (1,), "{:.0e}")
    right.grid(visible=False, axis="y")
    return figure


def kernel_shapes(file: File) -> Figure | None:
    """Draw each backend's throughput in each shape, if the file compares shapes."""
    if not has_shapes(file):
        return None
    timed = [row for row in main_rows(file) if row.samples]
    cells = [*dict.fromkeys(row.kernel for row in main_rows(file))]
    looks = _looks(timed)
    height = 0.8 / len(looks)
    figure, axes = _figure(1.2 + 0.16 * len(timed))
    for index, (name, (colour, _)) in enumerate(looks.items()):
        mine = [row for row in timed if row.contender == name]
        places = [cells.index(row.kernel) - 0.4 + height * (index + 0.5) for row in mine]
        speeds = [row.tflops for row in mine]
        label = f"{name} ({mine[0].extra['precision']})"
        bars = axes.barh(places, speeds, height, color=colour, label=label)
        axes.bar_label(bars, [f"{speed:.3g}" for speed in speeds], padding=3, fontsize=6.5)
    axes.set_yticks(range(len(cells)), [*map(str, cells)], fontsize=8)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("TFLOP/s")
    _title(axes, "Attention alone, by shape", how(file))
    figure.legend(loc="outside lower left", ncols=2, fontsize=7.5)
    return figure


def shared_load_bars(file: File) -> Figure | None:
    """Draw each version's shared-memory loads and their bank conflicts."""
    metrics = {
        name: {row.metric: row.samples[0] for row in mine if row.samples}
        for name, mine in group_by(file.rows, lambda row: row.contender).items()
    }
    changes = {row.contender: row.extra["change"] for row in file.rows if row.extra}
    counted = {name: found for name, found in metrics.items() if "shared_load_requests" in found}
    if len(counted) < 2:
        return None
    loads = [found["shared_load_requests"] for found in counted.values()]
    conflicts = [found["shared_load_conflicts"] for found in counted.values()]
    ends = [load + conflict for load, conflict in zip(loads, conflicts, strict=True)]
    texts = [
        f"{load:,.0f}" + (f" + {conflict:,.0f}" if conflict else "")
        for load, conflict in zip(loads, conflicts, strict=True)
    ]
    figure, axes = _bar_axes([(name, changes[name]) for name in counted], ends, texts)
    places = range(len(counted))
    axes.barh(places, loads, color="#0072B2", label="loads of a warp")
    axes.barh(places, conflicts, left=loads, color="#D55E00", label="bank conflicts on them")
    _title(axes, "Shared memory: loads in the source", str(shape_of(file.rows[0])))
    figure.legend(loc="outside lower right", ncols=2)
    return figure


def decode_bars(file: File) -> Figure | None:
    """Draw each contender's tokens per second and the limit set by the bandwidth."""
    group = [row for row in main_rows(file) if row.samples]
    if len(group) < 2:
        return None
    bandwidth = file.provenance.limits["read_gbps"] * 1e9
    speeds = [tokens_per_second(row) for row in group]
    limits = [int(row.cell["batch"]) * bandwidth / row.extra["weight_bytes"] for row in group]
    seconds = [(row.median, *row.spread) for row in group]
    low = [v * median / most for v, (median, _, most) in zip(speeds, seconds, strict=True)]
    high = [v * median / least for v, (median, least, _) in zip(speeds, seconds, strict=True)]
    figure, axes = _bar_axes(
        [(row.contender, "{model}, {dtype}, batch {batch}".format(**row.cell)) for row in group],
        high,
        [
            f"{speed:,.0f}, {speed / limit:.0%} of the limit"
            for speed, limit in zip(speeds, limits, strict=True)
        ],
    )
    colours = [_CONTENDERS.get(row.contender, OTHERS[-1]) for row in group]
    _whisker_bars(axes, speeds, low, high, colours)
    _title(axes, "Decoding with a cache", how(file))
    axes.set_xlabel("new tokens per second; the limit is one reading of the weights per step")
    return figure


def decode_positions(file: File) -> Figure | None:
    """Draw each engine's time per step by position."""
    group = [row for row in main_rows(file) if row.samples and len(row.extra["marks"][0]) > 2]
    if not group or max(int(row.cell["new_tokens"]) for row in group) < 512:
        return None
    figure, axes = _figure(4.5)
    for row in group:
        step = 64
        moments = [statistics.median(at) for at in zip(*row.extra["marks"], strict=True)]
        # Only whole intervals, without the first, which includes the prompt.
        whole = int(row.cell["new_tokens"]) // step
        times = [1e6 * (b - a) / step for a, b in itertools.pairwise(moments[:whole])]
        places = [int(row.cell["prompt_tokens"]) + step * (i + 1.5) for i in range(len(times))]
        label = f"{row.contender}, {row.cell['dtype']}"
        axes.plot(places, times, marker="o", markersize=3, label=label)
    axes.set(xlabel="position", ylabel="microseconds per step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    _title(axes, f"Time of a step by position, {group[0].cell['model']}, batch 1", how(file))
    return figure


def prediction_bars(row: Row, measured: Sequence[tuple[str, Row]]) -> bytes:
    """Draw each resource's time, the prediction and the measurements, as SVG.

    measured: tasks with the rows that timed the same version file in the same cell.
    """
    found = row.extra
    needs = sorted(found["needs_us"].items(), key=lambda need: -need[1])
    notes = {"load-store unit": "shared memory, L1 and shuffles together"}
    bars = [(name, notes.get(name, ""), us, "#999999") for name, us in needs if us >= 0.05]
    bars += [
        (name, what, found[key], "#56B4E9")
        for name, what, key in (
            ("latency", "warps wait for results, barriers and each other", "waiting_us"),
            ("uneven blocks", "multiprocessors without work", "uneven_us"),
            ("launch", "", "launch_us"),
        )
        if found.get(key)
    ]
    bars.append(("predicted", f"bound by {found['bound']}", row.median, "#0072B2"))
    bars += [
        (
            "measured",
            f"{task}; predicted {row.median / one.median:.2f} times",
            one.median,
            "#009E73",
        )
        for task, one in measured
    ]
    values = [us for _, _, us, _ in bars]
    with plt.style.context(STYLE):
        labels = [(name, what) for name, what, _, _ in bars]
        figure, axes = _bar_axes(labels, values, [f"{us:,.1f}" for us in values])
        axes.barh(range(len(bars)), values, color=[colour for *_, colour in bars])
        axes.set_xlabel("microseconds")
        return _svg(figure)


_CONTENDERS = {"eager": "#999999", "graph": "#E69F00", "fused": "#0072B2"}

PLOTS: dict[str, dict[str, Callable[[File], Figure | None]]] = {
    "generation": {"time": generation_time, "bars": generation_bars, "memory": peak_memory},
    "kernel": {
        "time": kernel_time,
        "bars": kernel_bars,
        "roofline": roofline,
        "shapes": kernel_shapes,
    },
    "inspection": {"bars": shared_load_bars},
    "decode": {"bars": decode_bars, "positions": decode_positions},
}


# ---- What is drawn -------------------------------------------------------------------------------


def _timed(file: File) -> list[Row]:
    """Return the rows of the first shape that have samples."""
    first = next(iter(group_by(main_rows(file), cell_name).values()))
    return [row for row in first if row.samples]


def _has_lengths(group: Sequence[Row]) -> bool:
    return len({*map(length, group)}) > 1


def _at_detail(file: File) -> list[Row]:
    """Return the rows at detail_length()."""
    group = _timed(file)
    chosen = detail_length(group) if group else 0
    return [row for row in group if length(row) == chosen]


def _label(row: Row) -> tuple[str, str]:
    """Return a contender's name and description."""
    return row.contender, row.extra.get("change") or row.extra["precision"]


# ---- How it is drawn -----------------------------------------------------------------------------


def _looks(group: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Return each backend's colour and marker: by name, by version, or the next free ones."""
    names = list(dict.fromkeys(row.contender for row in group))
    families = {row.contender: row.extra.get("family", "") for row in group}
    shades: dict[str, str] = {}
    for family in dict.fromkeys(families.values()):
        steps = [n for n in names if families[n] == family and re.search(r"_\d+$", n)]
        for index, name in enumerate(steps):
            shade = plt.get_cmap("viridis")(0.95 - 0.95 * index / max(len(steps) - 1, 1))
            shades[name] = mpl.colors.to_hex(shade)
    free = iter(OTHERS * 9)
    colours = {n: COLOURS.get(n) or shades.get(n) or next(free) for n in names}
    return {n: (colours[n], MARKERS[index % len(MARKERS)]) for index, n in enumerate(names)}


def _draw_lines(
    axes: Axes,
    group: Sequence[Row],
    y: Callable[[Row, float], float],
    *,
    legend: bool = True,
) -> None:
    """Draw a line per backend over the lengths, with whiskers from minimum to maximum.

    y: converts a sample to a height. The legend is in the order of the lines' right ends.
    """
    looks, ends = _looks(group), []
    for name, mine in group_by(group, lambda row: row.contender).items():
        colour, marker = looks[name]
        points = sorted((length(row), y(row, row.median)) for row in mine)
        least, most = ([y(row, row.spread[end]) for row in mine] for end in (0, 1))
        axes.vlines([*map(length, mine)], least, most, colour, linewidth=1)
        (line,) = axes.plot(
            *zip(*points, strict=True),
            "--" if name == FREE_ATTENTION else "-",
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            label=f"{name} ({mine[0].extra['precision']})",
        )
        ends.append((points[-1][1], line))
    if legend:
        handles = [line for _, line in sorted(ends, key=lambda end: -end[0])]
        axes.figure.legend(handles=handles, loc="outside right upper")
    lengths = sorted({*map(length, group)})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [*map(str, lengths)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)


def _bars(at: Sequence[Row], title: str, how: str, unit: str, form: str) -> Figure | None:
    """Draw horizontal bars of medians, with whiskers from minimum to maximum."""
    if len(at) < 2:
        return None
    medians = [row.median for row in at]
    low, high = zip(*(row.spread for row in at), strict=True)
    texts = [form.format(median) for median in medians]
    figure, axes = _bar_axes([*map(_label, at)], high, texts)
    colours = [colour for colour, _ in _looks(at).values()]
    _whisker_bars(axes, medians, low, high, colours)
    _title(axes, title, how)
    axes.set_xlabel(f"{unit}: median, least to most")
    return figure


def _whisker_bars(
    axes: Axes,
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    colours: Sequence[str],
) -> None:
    """Draw horizontal bars with whiskers from the lowest to the highest value."""
    whiskers = [
        [value - least for value, least in zip(values, low, strict=True)],
        [most - value for value, most in zip(values, high, strict=True)],
    ]
    axes.barh(range(len(values)), values, color=colours, xerr=whiskers, error_kw={"linewidth": 0.8})


def _bar_axes(
    labels: Sequence[tuple[str, str]], ends: Sequence[float], texts: Sequence[str]
) -> tuple[Figure, Axes]:
    """Prepare axes for horizontal bars, each with a name, a description and a text at its end."""
    figure, axes = _figure(1.3 + 0.42 * len(labels))
    _label_bars(axes, labels, ends, texts)
    return figure, axes


def _label_bars(
    axes: Axes, labels: Sequence[tuple[str, str]], ends: Sequence[float], texts: Sequence[str]
) -> None:
    """Write each bar's name, description and text, with room for all of them."""
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
    axes.xaxis.set_major_formatter(PLAIN)
    axes.grid(visible=False, axis="y")


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    return figure, axes


def _title(axes: Axes, title: str, facts: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=20)
    axes.annotate(
        facts,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )


def _log_ticks(axis: Any, subs: Sequence[float], form: str) -> None:
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axis.set_minor_locator(NullLocator())
