"""Charts of results; measures nothing and does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gpt2_infer.bench.record import FREE_ATTENTION, File, Row
from gpt2_infer.bench.show.drawing import (
    PLAIN,
    QUIET,
    STYLE,
    Bar,
    bar_figure,
    draw_bars,
    note,
    put_title,
    to_svg,
    two_axes,
)
from gpt2_infer.bench.show.figures import (
    cell_name,
    detail_length,
    group_by,
    how,
    length,
    main_rows,
    new_tokens,
    roofs,
)

# Backends outside the ladders have Okabe and Ito's colours, the versions of a ladder shades of
# viridis: both are safe for the colour-blind.
COLOURS = {
    "NAIVE_PYTORCH": "#000000",
    "PYTORCH_SDPA_MATH": "#999999",
    "PYTORCH_SDPA_EFFICIENT_ATTENTION": "#D55E00",
    "PYTORCH_SDPA_FLASH_ATTENTION": "#CC79A7",
    "PYTORCH_SDPA_CUDNN_ATTENTION": "#E69F00",
    FREE_ATTENTION: "#56B4E9",
    "eager": "#999999",
    "graph": "#E69F00",
    "fused": "#0072B2",
}
OTHERS = ("#0072B2", "#009E73", "#882255", "#44AA99", "#332288", "#AA4499", "#661100", "#DDCC77")
MARKERS = "osD^vP*Xhd<>p8"
WHISKERS = "median, least to most"


def render(file: File, wanted: Container[str] | None = None) -> dict[str, bytes]:
    """Draw the wanted plots of a results file, by default all; return SVGs by plot name.

    The same file gives the same picture, except for the last digits of coordinates, which depend on
    the processor.
    """
    drawn = {}
    with plt.style.context(STYLE):
        for name, plot in PLOTS.get(file.study["kind"], {}).items():
            figure = plot(file) if wanted is None or name in wanted else None
            if figure is not None:
                drawn[name] = to_svg(figure)
    return drawn


# ---- Lines over the lengths ----------------------------------------------------------------------


def kernel_time(file: File) -> Figure | None:
    """Draw kernel times and TFLOP/s, with the card's limit, by seqlen."""
    group = _timed(file)
    if len({*map(length, group)}) < 2:
        return None
    figure, left, right = two_axes((12, 5))
    left.set(xlabel="seqlen", ylabel=f"microseconds: {WHISKERS}", yscale="log")
    right.set(xlabel="seqlen", ylabel="TFLOP/s", yscale="log")
    _draw_lines(left, group, lambda _, microseconds: microseconds, legend=False)
    _draw_lines(right, group, lambda row, microseconds: row.kernel.flops / microseconds / 1e6)
    dtype = group[0].kernel.dtype
    if limit := file.provenance.limits.get(f"matmul_{dtype}_tflops"):
        right.axhline(limit, color=QUIET, linestyle=":", linewidth=1)
        text = f"8192\u00b3 matmul, {dtype}: {limit:.0f}"
        right.annotate(text, (min(map(length, group)), limit), va="bottom", fontsize=8)
    put_title(left, f"Attention alone, {cell_name(group[0])}", how(file))
    return figure


def _draw_lines(
    axes: Axes, group: Sequence[Row], y: Callable[[Row, float], float], *, legend: bool = True
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


# ---- Horizontal bars -----------------------------------------------------------------------------


def median_bars(file: File) -> Figure | None:
    """Draw each backend's median at detail_length(): a kernel's time, or a generation's."""
    group = _timed(file)
    at = [row for row in group if length(row) == detail_length(group)]
    if len(at) < 2:
        return None
    if "seqlen" in at[0].cell:
        title, unit, form = f"Attention alone, {at[0].kernel}", "microseconds", "{:,.1f}"
    else:
        title = f"Generation, {cell_name(at[0])}: {length(at[0])} tokens"
        unit, form = "seconds", "{:.3f}"
    looks = _looks(at)
    bars = [
        Bar(*_label(row), row.median, form.format(row.median), looks[row.contender][0], row.spread)
        for row in at
    ]
    return bar_figure(bars, f"{unit}: {WHISKERS}", title, how(file))


def roofline(file: File) -> Figure | None:
    """Draw each backend's TFLOP/s at the longest seqlen, with the GPU's limits, and its error.

    The error is the relative error of a row, or the largest absolute error in files without it.
    """
    group = _timed(file)
    longest = max(map(length, group), default=0)
    at = [row for row in group if length(row) == longest and row.check]
    if len(at) < 2:
        return None
    size = (11, 1.6 + 0.36 * len(at))
    figure, left, right = two_axes(size, sharey=True, width_ratios=(2, 1))
    colours = [_looks(at)[row.contender][0] for row in at]
    draw_bars(
        left,
        [
            Bar(*_label(row), row.tflops, f"{row.tflops:.3g}", colour)
            for row, colour in zip(at, colours, strict=True)
        ],
    )
    bounds = {
        words: roof
        for words, roof in roofs(at[0], file.provenance.limits).items()
        if "matmul" not in words
    }
    left.set_xlim(0, 1.08 * max(*(row.tflops for row in at), *bounds.values()))
    for words, roof in bounds.items():
        left.axvline(roof, color=QUIET, linestyle=":", linewidth=1)
        look = {"rotation": "vertical", "ha": "right", "va": "top", "fontsize": 7.5, "color": QUIET}
        note(left, f"{words}: {roof:.0f}", (roof, 1), (-3, -3), ("data", "axes fraction"), **look)
    put_title(left, f"TFLOP/s, {at[0].kernel}", how(file))
    checks = [row.check for row in at if row.check]
    by_row = all(check.row_error is not None for check in checks)
    pairs = [(c.row_error, c.row_budget) if by_row else (c.error, c.budget) for c in checks]
    for place, ((error, budget), colour) in enumerate(zip(pairs, colours, strict=True)):
        if error is not None and budget is not None:
            right.plot(budget, place, "|", color=QUIET, markersize=9)
            right.plot(
                error, place, "o", color=colour, markeredgecolor="black", markeredgewidth=0.4
            )
    what = "a row's relative error" if by_row else "largest error"
    put_title(right, "Error against float64", f"{what}; | its budget")
    right.set_xscale("log")
    low, high = right.get_xlim()
    right.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 100 * low else (1,)))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    right.xaxis.set_minor_locator(NullLocator())
    right.grid(visible=False, axis="y")
    return figure


def decode_bars(file: File) -> Figure | None:
    """Draw each contender's tokens per second and the limit set by the bandwidth.

    None for prompts alone, which are not limited by it.
    """
    bars, looks = [], _looks(main_rows(file))
    for row in main_rows(file) if "read_gbps" in file.provenance.limits else ():
        if row.samples and row.cell["new_tokens"] != 1:
            bandwidth = file.provenance.limits["read_gbps"] * 1e9
            limit = int(row.cell["batch"]) * bandwidth / row.extra["weight_bytes"]
            least, most = row.spread
            tokens = new_tokens(file, row)
            speed, low, high = (tokens / seconds for seconds in (row.median, most, least))
            what = "{model}, {dtype}, batch {batch}".format(**row.cell)
            text = f"{speed:,.0f}, {speed / limit:.0%} of the limit"
            colour, _ = looks[row.contender]
            bars.append(Bar(row.contender, what, speed, text, colour, (low, high)))
    xlabel = "new tokens per second; the limit is one reading of the weights per step"
    return bar_figure(bars, xlabel, "Decoding with a cache", how(file)) if len(bars) > 1 else None


# ---- All charts ----------------------------------------------------------------------------------


def _timed(file: File) -> list[Row]:
    """Return the rows of the first shape that have samples."""
    first = next(iter(group_by(main_rows(file), cell_name).values()))
    return [row for row in first if row.samples]


def _label(row: Row) -> tuple[str, str]:
    """Return a contender's name and description."""
    return row.contender, row.extra.get("change") or row.extra["precision"]


def _looks(group: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Return each backend's colour and marker: by name, by version, or the next free ones."""
    names = list(dict.fromkeys(row.contender for row in group))
    families = {row.contender: row.extra.get("family", "") for row in group}
    shades: dict[str, str] = {}
    for family in dict.fromkeys(families.values()):
        steps = [n for n in names if families[n] == family and re.search(r"_\d+$", n)]
        for index, name in enumerate(steps if len(steps) > 1 else []):
            shade = plt.get_cmap("viridis")(0.95 - 0.95 * index / (len(steps) - 1))
            shades[name] = to_hex(shade)
    fixed = {COLOURS.get(n) for n in names}
    free = iter([colour for colour in OTHERS if colour not in fixed] * 9)
    colours = {n: COLOURS.get(n) or shades.get(n) or next(free) for n in names}
    return {n: (colours[n], MARKERS[index % len(MARKERS)]) for index, n in enumerate(names)}


PLOTS: dict[str, dict[str, Callable[[File], Figure | None]]] = {
    "generation": {"bars": median_bars},
    "kernel": {"time": kernel_time, "bars": median_bars, "roofline": roofline},
    "decode": {"bars": decode_bars},
}
