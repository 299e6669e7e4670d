"""Plot results; nothing is measured here.

    python scripts/plot_results.py [--results results] [--out results/plots] [--check]
    python scripts/plot_results.py FILE ...

For the newest results file of each task, every plot that its kind has, as SVG and PNG, named
<task>_<plot>; for each FILE the same, beside it or in --out, named <file>_<plot>. The same files
give the same bytes; --check says which pictures are stale, missing or of no results. It holds an
SVG to its text and a PNG to its pixels.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gpt2_infer.bench.compare import FREE_ATTENTION, KERNEL_SHAPE, KernelCell
from gpt2_infer.bench.results import Results, ResultsError, Series, newest, read_finished
from gpt2_infer.bench.tables import counts, detail_seqlen, profiled_shape, where
from gpt2_infer.cli import Parser

RESULTS = Path(__file__).parents[1] / "results"
# Okabe and Ito's colours, which the colour-blind can tell apart, for backends that are no step; the
# steps of a ladder are shades of viridis, which they can, too.
COLOURS = {
    "NAIVE_PYTORCH": "#000000",
    "PYTORCH_SDPA_MATH": "#999999",
    "PYTORCH_SDPA_EFFICIENT_ATTENTION": "#D55E00",
    "PYTORCH_SDPA_FLASH_ATTENTION": "#CC79A7",
    "PYTORCH_SDPA_CUDNN_ATTENTION": "#E69F00",
    FREE_ATTENTION: "#56B4E9",
}
OTHERS = ("#0072B2", "#009E73", "#F0E442", "#56B4E9", "#882255", "#44AA99", "#332288", "#AA4499")
MARKERS = "osD^vP*Xhd<>p8"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "gpt2-infer",
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}
# Nothing of the time, the machine or the version of matplotlib may be in the files.
METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}

Plot = Callable[[Results], "Figure | None"]


def generation_time(results: Results) -> Figure | None:
    """Seconds to generate, by the number of tokens: the case study's plot."""
    group = _first_group(results, "batch", "dtype", "mode")
    lines = _lines(group, "max_tokens", lambda series: series.median)
    if len({x for points in lines.values() for x, _ in points}) < 2:
        return None
    figure, axes = _figure()
    _draw_lines(axes, lines, group)
    labels = group[0].labels
    _finish(
        axes, f"Generation, {labels['mode']}, {labels['dtype']}, batch {labels['batch']}", results
    )
    axes.set(xlabel="tokens, prompt included", ylabel="seconds", xscale="log", yscale="log")
    _plain_ticks(axes, [x for x, _ in next(iter(lines.values()))])
    return figure


def generation_bars(results: Results) -> Figure | None:
    """The longest generation of each backend, with what changed in each version."""
    group = _first_group(results, "batch", "dtype", "mode")
    longest = max(series.labels["max_tokens"] for series in group)
    at = [s for s in group if s.samples and s.labels["max_tokens"] == longest]
    labels = group[0].labels
    what = f"{labels['mode']}, {labels['dtype']}, batch {labels['batch']}"
    title = f"Generation, {what}: {longest} tokens"
    return _bars(at, results, title, "seconds", "{:.3f}")


def peak_memory(results: Results) -> Figure | None:
    """Memory at its peak, by the number of tokens: the case study's open question."""
    group = [
        series
        for series in _first_group(results, "batch", "dtype", "mode")
        if series.facts.get("peak_memory_bytes") and series.name != FREE_ATTENTION
    ]
    if not group:
        return None
    lines = _lines(group, "max_tokens", lambda s: s.facts["peak_memory_bytes"] / 2**20)
    if len({x for points in lines.values() for x, _ in points}) < 2:
        return None
    figure, axes = _figure()
    _draw_lines(axes, lines, group)
    title = "Device memory at its peak, weights included"
    _title(axes, title, f"{where(results)}; one call each")
    axes.set(xlabel="tokens, prompt included", ylabel="MiB", xscale="log")
    _plain_ticks(axes, [x for x, _ in next(iter(lines.values()))])
    return figure


def kernel_time(results: Results) -> Figure | None:
    """The kernel alone: microseconds, and TFLOP/s against the card's limit, by seqlen."""
    group = _first_group(results, *KERNEL_SHAPE)
    lines = _lines(group, "seqlen", lambda series: series.median)
    if len({x for points in lines.values() for x, _ in points}) < 2:
        return None

    def tflops(series: Series) -> float:
        cell = KernelCell(**{key: series.labels[key] for key in ("seqlen", *KERNEL_SHAPE)})
        return cell.flops / series.median / 1e6

    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _draw_lines(left, lines, group, legend=False)
    _draw_lines(right, _lines(group, "seqlen", tflops), group)
    seqlens = sorted({series.labels["seqlen"] for series in group})
    labels = group[0].labels
    limit = results.provenance.get("limits", {}).get(f"matmul_{labels['dtype']}_tflops")
    if limit:
        right.axhline(limit, color="#555555", linestyle=":", linewidth=1)
        right.annotate(
            f"8192\u00b3 matmul, {labels['dtype']}: {limit:.0f}",
            (seqlens[0], limit),
            va="bottom",
            fontsize=8,
        )
    _finish(left, f"Attention alone, {_shape(group[0])}", results)
    left.set(xlabel="seqlen", ylabel="microseconds", xscale="log", yscale="log")
    right.set(xlabel="seqlen", ylabel="TFLOP/s", xscale="log", yscale="log")
    for axes in (left, right):
        _plain_ticks(axes, seqlens)
    return figure


def kernel_bars(results: Results) -> Figure | None:
    """One seqlen, 1,024 or the longest, of each backend, with what changed in each version."""
    shape, at = _at_one_seqlen(results)
    title = f"Attention alone, {shape}"
    return _bars(at, results, title, "microseconds", "{:,.1f}")


def error_and_speed(results: Results) -> Figure | None:
    """The largest error against float64, against the time."""
    shape, at = _at_one_seqlen(results)
    if len(at) < 2:
        return None
    figure, axes = _figure()
    for series, (colour, marker) in zip(at, _looks(at), strict=True):
        axes.plot(
            series.median,
            series.facts["error"],
            marker,
            color=colour,
            markersize=8,
            markeredgecolor="black",
            markeredgewidth=0.4,
            label=f"{series.name} ({series.labels['precision']})",
        )
    axes.axhline(at[0].facts["naive_error"], color="#555555", linestyle=":", linewidth=1)
    axes.annotate(
        "plain PyTorch in this dtype",
        (0.01, at[0].facts["naive_error"]),
        xycoords=("axes fraction", "data"),
        va="bottom",
        fontsize=8,
    )
    _finish(axes, shape, results)
    axes.set(xlabel="microseconds", xscale="log", yscale="log")
    axes.set_ylabel("largest error against float64")
    times = [series.median for series in at]
    wide = max(times) > 300 * min(times)
    low, high = axes.get_ylim()
    for axis, form in (
        (axes.xaxis, "{:,.10g}"),
        (axes.yaxis, "{:.1e}" if high > 1.5 * low else "{:.2e}"),
    ):
        subs = (1, 1.5, 2, 3, 5, 7) if axis is axes.yaxis else (1,) if wide else (1, 2, 5)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form.format(value)))
        axis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right upper")
    return figure


def shared_load_bars(results: Results) -> Figure | None:
    """Shared loads of each version and the bank conflicts on them, with what changed."""
    found = counts(results)
    loads = [s for s in results.series if s.labels.get("metric") == "shared_load_requests"]
    if len(loads) < 2:
        return None
    figure, axes = _figure(1.4 + 0.34 * len(loads))
    places = range(len(loads))
    requests = [series.median for series in loads]
    conflicts = [found[series.name, "shared_load_conflicts"] for series in loads]
    axes.barh(places, requests, color="#0072B2", label="loads of a warp")
    axes.barh(places, conflicts, left=requests, color="#D55E00", label="bank conflicts on them")
    axes.set_yticks(places, [series.name for series in loads], fontsize=8)
    axes.invert_yaxis()
    widest = max(map(sum, zip(requests, conflicts, strict=True)))
    for place, series, load, conflict in zip(places, loads, requests, conflicts, strict=True):
        text = f"{load:,.0f}" + (f" + {conflict:,.0f}" * bool(conflict))
        end = load + conflict + 0.01 * widest
        axes.text(end, place, f"{text}  {series.labels['change']}", va="center", fontsize=7.5)
    axes.set_xlim(0, 2 * widest)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(visible=False, axis="y")
    _title(axes, "Shared memory: loads in the source", profiled_shape(results))
    figure.legend(loc="outside lower right", ncols=2)
    return figure


PLOTS: dict[str, dict[str, Plot]] = {
    "generation": {"time": generation_time, "bars": generation_bars, "memory": peak_memory},
    "kernel": {"time": kernel_time, "bars": kernel_bars, "error": error_and_speed},
    "inspection": {"bars": shared_load_bars},
}


def render(results: Results, stem: str | None = None) -> Iterator[tuple[str, bytes]]:
    """Every plot of a results file, as (file name, bytes); stem: what its name begins with."""
    with mpl.rc_context(STYLE):
        for name, plot in PLOTS.get(results.settings.get("measures", ""), {}).items():
            figure = plot(results)
            if figure is None:
                continue
            for kind, metadata in METADATA.items():
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
                yield f"{stem or results.task}_{name}.{kind}", buffer.getvalue()
            plt.close(figure)


def outdated(drawn: Mapping[Path, bytes], there: Iterable[Path]) -> dict[str, list[str]]:
    """Names of pictures by what is wrong with them; there: files that should be among the drawn."""
    found = {
        "stale": [f.name for f, new in drawn.items() if f.is_file() and not _is_same(f, new)],
        "missing": [file.name for file in drawn if not file.is_file()],
        "of no results": sorted(file.name for file in {*there} - {*drawn}),
    }
    return {what: names for what, names in found.items() if names}


def main() -> int:
    """Plot, or say what is not current."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="results (default: the newest in --results)",
    )
    add("--results", type=Path, help="a folder (default: results)")
    add("--out", type=Path, help="default: beside a FILE, else results/plots")
    add("--check", action="store_true", help="draw nothing; exit 1 where a picture is not current")
    arguments = parser.parse_args()
    if arguments.files and arguments.results:
        parser.error("--results is a folder in place of FILE")
    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out is a folder, and {arguments.out} is none")
    there: list[Path] = []
    try:
        if arguments.files:
            found = [(arguments.out or f.parent, f.stem, read_finished(f)) for f in arguments.files]
            for folder, stem, _ in found:
                there += _pictures(folder, stem)
        else:
            folder = arguments.out or RESULTS / "plots"
            results_of = newest(arguments.results or RESULTS)
            found = [(folder, task, results) for task, (_, results) in results_of.items()]
            there = [path for kind in METADATA for path in folder.glob(f"*.{kind}")]
    except ResultsError as error:
        parser.error(str(error))
    drawn = {
        folder / name: content
        for folder, stem, results in found
        for name, content in render(results, stem)
    }
    if arguments.check:
        if wrong := outdated(drawn, there):
            told = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items())
            hint = "draw again without --check, and delete what is of no results"
            print(f"{told} ({hint})", file=sys.stderr)
        return int(bool(wrong))
    for file, content in drawn.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        except OSError as error:
            parser.error(f"{file} cannot be written: {error.strerror}")
        print(f"wrote {file}")
    if not drawn:
        print("there was nothing to draw")
    return 0


def _pictures(folder: Path, stem: str) -> list[Path]:
    """The pictures in a folder that have a results file's name and a plot's."""
    plots = {plot for of in PLOTS.values() for plot in of}
    paths = [folder / f"{stem}_{plot}.{kind}" for plot in plots for kind in METADATA]
    return [path for path in paths if path.exists()]


def _is_same_svg(old: str, new: str) -> bool:
    """Whether two SVGs have the same text and elements, at places that agree within 0.01 points.

    The last digits of a coordinate depend on the processor, and an id on the coordinates.
    """
    number = r"-?\d+\.\d+"
    old, new = (re.sub(r"(?<=[#\"])[a-zA-Z][0-9a-f]{10}(?=[\")])", "id", svg) for svg in (old, new))
    if re.split(number, old) != re.split(number, new):
        return False
    pairs = zip(re.findall(number, old), re.findall(number, new), strict=True)
    return all(abs(float(one) - float(other)) < 0.01 for one, other in pairs)


def _is_same(file: Path, content: bytes) -> bool:
    """Whether a picture is what is drawn now: of a PNG the pixels, however they are packed."""
    old = file.read_bytes()
    if old == content:
        return True
    if file.suffix == ".svg":
        return _is_same_svg(old.decode(), content.decode())
    try:
        was, now = (plt.imread(io.BytesIO(png), format="png") for png in (old, content))
    except (OSError, SyntaxError, ValueError):  # it is no whole PNG
        return False
    return np.array_equal(was, now)


def _first_group(results: Results, *keys: str) -> list[Series]:
    """The series of the first cell's shape, dtype and mode: a plot shows one."""
    first = results.series[0].labels
    return [s for s in results.series if all(s.labels[key] == first[key] for key in keys)]


def _at_one_seqlen(results: Results) -> tuple[str, list[Series]]:
    """The timed series of the length that is told in detail, and their shape in words."""
    group = _first_group(results, *KERNEL_SHAPE)
    chosen = detail_seqlen({series.labels["seqlen"] for series in group})
    at = [s for s in group if s.samples and s.labels["seqlen"] == chosen]
    return f"{_shape(group[0])}, N={chosen}", at


def _lines(
    group: list[Series], x: str, y: Callable[[Series], float]
) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for series in group:
        if series.samples:
            lines.setdefault(series.name, []).append((series.labels[x], y(series)))
    return {name: sorted(points) for name, points in lines.items()}


def _looks(group: list[Series]) -> list[tuple[str, str]]:
    """Colour and marker of each series: by name, by place in its ladder, or the next free ones."""
    names = list(dict.fromkeys(series.name for series in group))
    families = {series.name: series.labels["family"] for series in group}
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


def _figure(height: float = 5) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)  # for the last letters beside the bars
    return figure, axes


def _draw_lines(
    axes: Axes,
    lines: dict[str, list[tuple[int, float]]],
    group: list[Series],
    *,
    legend: bool = True,
) -> None:
    looks = {series.name: look for series, look in zip(group, _looks(group), strict=True)}
    precisions = {series.name: series.labels["precision"] for series in group}
    for name, points in lines.items():
        colour, marker = looks[name]
        style = "--" if name == FREE_ATTENTION else "-"
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs,
            ys,
            style,
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


def _shape(series: Series) -> str:
    labels = series.labels
    kind = "causal" if labels["is_causal"] else "full"
    shape = f"B={labels['batch']} H={labels['num_heads']} head_dim={labels['head_dim']}"
    return f"{shape}, {labels['dtype']}, {kind}"


def _bars(at: list[Series], results: Results, title: str, unit: str, form: str) -> Figure | None:
    """Horizontal bars in the order of the registry, medians, with a whisker from least to most."""
    if len(at) < 2:
        return None
    figure, axes = _figure(1.4 + 0.34 * len(at))
    medians = [series.median for series in at]
    whiskers = [
        [m - s.spread[0] for m, s in zip(medians, at, strict=True)],
        [s.spread[1] - m for m, s in zip(medians, at, strict=True)],
    ]
    colours = [colour for colour, _ in _looks(at)]
    places = range(len(at))
    axes.barh(places, medians, color=colours, xerr=whiskers, error_kw={"linewidth": 0.8})
    axes.set_yticks(places, [series.name for series in at], fontsize=8)
    axes.invert_yaxis()
    wide = max(s.spread[1] for s in at)
    for place, series in zip(places, at, strict=True):
        change = series.labels.get("change", series.labels["precision"])
        text = f"{form.format(series.median)}  {change}"
        axes.text(series.spread[1] + 0.01 * wide, place, text, va="center", fontsize=7.5)
    axes.set_xlim(0, 2.3 * wide)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(visible=False, axis="y")
    _finish(axes, title, results)
    axes.set_xlabel(f"{unit}: median, least to most")
    return figure


def _finish(axes: Axes, title: str, results: Results) -> None:
    rounds = results.settings["rounds"]
    _title(axes, title, f"{where(results)}; medians of {rounds} interleaved rounds")


def _title(axes: Axes, title: str, facts: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=20)
    axes.text(0, 1.015, facts, transform=axes.transAxes, fontsize=8, color="#555555")


def _plain_ticks(axes: Axes, values: list[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


if __name__ == "__main__":
    raise SystemExit(main())
