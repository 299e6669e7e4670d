"""Charts of results; measures nothing and does not import torch."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import msgspec
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from gpt2_infer.bench.record import FREE_ATTENTION, File, Row
from gpt2_infer.bench.show.drawing import (
    PLAIN,
    QUIET,
    STYLE,
    Bar,
    bar_figure,
    draw_bars,
    note,
    one_axes,
    put_title,
    to_svg,
    two_axes,
)
from gpt2_infer.bench.show.figures import (
    cell_name,
    detail_length,
    group_by,
    has_shapes,
    how,
    length,
    main_rows,
    new_tokens,
    roofs,
    shape_of,
    where,
)

if TYPE_CHECKING:  # this module imports torch
    from attention_kernels.inspection.accesses import Turn

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


def generation_time(file: File) -> Figure | None:
    """Draw generation seconds by the number of tokens: the case study's plot."""
    if not (group := _over_lengths(file)):
        return None
    figure, axes = one_axes(5)
    axes.set(xlabel="tokens, prompt included", ylabel=f"seconds: {WHISKERS}", yscale="log")
    _draw_lines(axes, group, lambda _, seconds: seconds)
    put_title(axes, f"Generation, {cell_name(group[0])}", how(file))
    return figure


def peak_memory(file: File) -> Figure | None:
    """Draw peak memory by the number of tokens: the case study's open question."""
    group = [
        msgspec.structs.replace(peak, extra=row.extra)
        for row in _over_lengths(file)
        if row.contender != FREE_ATTENTION and (peak := file.beside(row, "peak memory"))
    ]
    if not group:
        return None
    figure, axes = one_axes(5)
    axes.set(xlabel="tokens, prompt included", ylabel="MiB")
    _draw_lines(axes, group, lambda _, memory: memory / 2**20)
    facts = f"{where(file)}; one call each"
    put_title(axes, "Device memory at its peak, weights included", facts)
    return figure


def kernel_time(file: File) -> Figure | None:
    """Draw kernel times and TFLOP/s, with the card's limit, by seqlen."""
    if not (group := _over_lengths(file)):
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


def decode_positions(file: File) -> Figure | None:
    """Draw each engine's time per step by position."""
    marked = [row for row in main_rows(file) if row.samples and "marks" in row.extra]
    group = [row for row in marked if len(row.extra["marks"][0]) > 2]
    if not group or max(int(row.cell["new_tokens"]) for row in group) < 512:
        return None
    figure, axes = one_axes(4.5)
    step = 64
    for row in group:
        moments = [statistics.median(at) for at in zip(*row.extra["marks"], strict=True)]
        # Leave out the first interval, which includes the prompt, and an incomplete last one.
        whole = int(row.cell["new_tokens"]) // step
        times = [1e6 * (b - a) / step for a, b in itertools.pairwise(moments[:whole])]
        places = [int(row.cell["prompt_tokens"]) + step * (i + 1.5) for i in range(len(times))]
        label = f"{row.contender}, {row.cell['dtype']}"
        axes.plot(places, times, marker="o", markersize=3, label=label)
    axes.set(xlabel="position", ylabel="microseconds per step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    put_title(axes, f"Time of a step by position, {group[0].cell['model']}, batch 1", how(file))
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


def turns(found: Sequence[Turn]) -> bytes:
    """Draw the turns of a block's warps in order, between its barriers, as SVG."""
    warps = 1 + max(turn.warp for turn in found)
    total = sum(turn.accesses for turn in found)
    with plt.style.context(STYLE):
        figure, axes = one_axes(1.1 + 0.14 * warps)
        x, y, start = list[float](), list[float](), 0
        for barriers, mine in group_by(found, lambda turn: turn.barriers).items():
            axes.axvline(start, color="#D55E00", linestyle=":", linewidth=1)
            if sum(turn.accesses for turn in mine) > 0.03 * total:
                note(axes, f"{barriers}", (start, -0.5), (2, 3), fontsize=7.5, color=QUIET)
            for turn in mine:
                # At least wide enough to be seen.
                x += [start, start + max(turn.accesses, total / 2000), math.nan]
                y += [turn.warp, turn.warp, math.nan]
                start += turn.accesses
        axes.plot(x, y, color="#0072B2", linewidth=7, solid_capstyle="butt")
        order = f"accesses so far, of {total:,}, in the emulator's order, not in time"
        axes.set_xlabel(f"{order}; on top: barriers passed")
        axes.set(ylabel="warp", xlim=(0, total), ylim=(warps - 0.5, -0.5))
        axes.xaxis.set_major_formatter(PLAIN)
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(visible=False)
        return to_svg(figure)


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


def kernel_shapes(file: File) -> Figure | None:
    """Draw each backend's throughput in each shape, if the file compares shapes."""
    if not has_shapes(file):
        return None
    timed = [row for row in main_rows(file) if row.samples]
    cells = [*dict.fromkeys(row.kernel for row in main_rows(file))]
    looks = _looks(timed)
    height = 0.8 / len(looks)
    figure, axes = one_axes(1.2 + 0.16 * len(timed))
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
    put_title(axes, "Attention alone, by shape", how(file))
    figure.legend(loc="outside lower left", ncols=2, fontsize=7.5)
    return figure


def shared_load_bars(file: File) -> Figure | None:
    """Draw each version's shared-memory loads and their bank conflicts."""
    bars = []
    for name, mine in group_by(file.rows, lambda row: row.contender).items():
        counts = {row.metric: row.samples[0] for row in mine if row.samples}
        if "shared_load_requests" in counts:
            loads, conflicts = counts["shared_load_requests"], counts["shared_load_conflicts"]
            change = next(row.extra["change"] for row in mine if row.extra)
            text = f"{loads:,.0f}" + (f" + {conflicts:,.0f}" if conflicts else "")
            bars.append(Bar(name, change, loads, text, "#0072B2", rest=conflicts))
    if len(bars) < 2:
        return None
    facts = str(shape_of(file.rows[0]))
    figure = bar_figure(bars, "", "Shared memory: loads in the source", facts)
    labels = ("loads of a warp", "bank conflicts on them")
    for container, label in zip(figure.axes[0].containers, labels, strict=True):
        container.set_label(label)
    figure.legend(loc="outside lower right", ncols=2)
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


def decode_energy(file: File) -> Figure | None:
    """Draw each contender's tokens per joule by its tokens per second, and lines of equal power."""
    spent = [row for row in file.of("energy") if row.samples]
    if len(spent) < 2:
        return None
    figure, axes = one_axes(5)
    colours = {name: colour for name, (colour, _) in _looks(spent).items()}
    by_cell = group_by(spent, lambda row: "{model}, {dtype}, batch {batch}".format(**row.cell))
    markers = dict(zip(by_cell, itertools.cycle(MARKERS), strict=False))
    for cell, row in ((cell, row) for cell, rows in by_cell.items() for row in rows):
        tokens = new_tokens(file, row)
        speed = tokens * row.extra["calls"] / row.extra["seconds"]
        colour = colours[row.contender]
        axes.plot(speed, tokens / row.median, markers[cell], color=colour, markersize=7)
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="tokens per second, in whole calls", ylabel="tokens per joule")
    axes.margins(0.2)  # room for the labels of the lines
    _draw_watts(axes)
    looks = [(name, "s", colour) for name, colour in colours.items()]
    looks += [(cell, marker, QUIET) for cell, marker in markers.items()]
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=label)
        for label, marker, colour in looks
    ]
    figure.legend(handles=handles, loc="outside right upper")
    put_title(axes, "Energy of decoding", where(file))
    return figure


def _draw_watts(axes: Axes) -> None:
    """Draw lines of equal power behind points (tokens per second, tokens per joule)."""
    (x, right), (y, top) = axes.get_xlim(), axes.get_ylim()
    for watts in (50, 100, 200, 400, 800):
        end = min(right, top * watts)
        if end / watts > y and end > x:
            axes.plot((x, end), (x / watts, end / watts), ":", color=QUIET, linewidth=0.8)
            look = {"ha": "right", "va": "top", "fontsize": 7.5, "color": QUIET}
            note(axes, f"{watts} W", (end, end / watts), (-10, -2), **look)
    axes.set(xlim=(x, right), ylim=(y, top))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(PLAIN)
        axis.set_minor_locator(NullLocator())


# ---- All charts ----------------------------------------------------------------------------------


def _timed(file: File) -> list[Row]:
    """Return the rows of the first shape that have samples."""
    first = next(iter(group_by(main_rows(file), cell_name).values()))
    return [row for row in first if row.samples]


def _over_lengths(file: File) -> list[Row]:
    """Return the timed rows of the first shape; none if they have a single length."""
    group = _timed(file)
    return group if len({*map(length, group)}) > 1 else []


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
    "generation": {"time": generation_time, "bars": median_bars, "memory": peak_memory},
    "kernel": {
        "time": kernel_time,
        "bars": median_bars,
        "roofline": roofline,
        "shapes": kernel_shapes,
    },
    "inspection": {"bars": shared_load_bars},
    "decode": {"bars": decode_bars, "energy": decode_energy, "positions": decode_positions},
}
