"""Results as Markdown tables: what the scripts print and what the documents show.

A ratio is given only within one file and one cell, never to a more precise baseline, and only if
the samples of the two do not overlap. Documents contain the tables between markers that `make docs`
fills:

    <!-- [[[cog from gpt2_infer.bench import tables; tables.show("kernel-fp32") ]]] -->
    <!-- [[[end]]] -->

Nothing here imports torch; ladders, which reads the headers of versions, does.
"""

from __future__ import annotations

import functools
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tabulate import tabulate

from gpt2_infer.bench.results import (
    BASELINE,
    FREE_ATTENTION,
    BatchSeries,
    BatchTiming,
    BuildSeries,
    BuildTiming,
    DecodeSeries,
    DecodeTiming,
    GenerationSeries,
    GenerationTiming,
    Inspected,
    Inspection,
    KernelCell,
    KernelSeries,
    KernelTiming,
    Perplexity,
    PerplexitySeries,
    Predicted,
    Predictions,
    Profile,
    Profiled,
    Provenance,
    Published,
    Results,
    ResultsError,
    Sampled,
    Series,
    Timing,
    newest,
)

WITHIN_SPREAD = "~"  # in place of a figure
TIE = "no difference beyond the spread of the samples"
# What a profile's table derives: the counter, and its bytes. A wavefront is 128 bytes at most.
THROUGHPUTS = {
    "shared loads, GB/s at most": ("shared_load_wavefronts", 128),
    "shared loads by ldmatrix, GB/s at most": ("shared_matrix_wavefronts", 128),
    "shared stores, GB/s at most": ("shared_store_wavefronts", 128),
    "global loads, GB/s": ("global_load_bytes", 1),
    "asynchronous global loads, GB/s": ("global_async_load_sectors", 32),
    "global stores, GB/s": ("global_store_bytes", 1),
}
# The instructions that limit each dtype, and how many of their products stand for one of its own.
ROOFS = {
    "float32": (
        ("FFMA", "ffma_tflops", 1),
        ("3 TF32 products", "mma_tf32_tflops", 3),
        ("3 float16 products", "mma_float16_tflops", 3),
    ),
    "float16": (("mma.sync, float16", "mma_float16_tflops", 1),),
}
# How coarse the precision classes of float32 are; every other class is its dtype's own.
COARSENESS = {"ieee-fp32": 0, "3xtf32": 1, "3xfp16": 1, "tf32": 2, "none": 3}
KINDS = ("load", "store")
_NUMBER = re.compile(r"[\d~]|failed|refused|emulated")

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)
AnySeries = TypeVar("AnySeries", KernelSeries, GenerationSeries)
Columns = dict[str, Callable[[Row], str]]
"""A table's columns: how to write the cell of a row, by heading."""


# ---- In documents --------------------------------------------------------------------------------


def show(task: str) -> None:
    """Print the table of a task's newest results, for the document that cog is filling."""
    path, results = newest_of(task)
    emit(render(_link(path), results))


def section(heading: str, task: str, *plots: str) -> None:
    """Print a section of a task's table and pictures, if it was measured."""
    if task in _files():
        emit(heading)
        show(task)
        for plot in plots:
            picture(task, plot)


def repeated(task: str, again: str) -> None:
    """Print how far the medians of a second run of kernels are from the first's."""
    (path, first), (path_again, second) = newest_of(task), newest_of(again)
    if not isinstance(first, KernelTiming) or not isinstance(second, KernelTiming):
        raise ResultsError(f"{task} and {again} are not timings of kernels")
    medians = {_same_code(one): one.median for one in second.series if one.samples}
    timed = [one for one in first.series if one.samples and _same_code(one) in medians]
    apart, inside = [], 0
    for mine in group_by(timed, lambda one: one.name).values():
        percent = [100 * abs(medians[_same_code(one)] / one.median - 1) for one in mine]
        inside += max(percent) <= max(spread_percent(one.samples) for one in mine)
        apart += percent
    emit(
        f"{_link(path_again)} repeats {_link(path)}: {inside} of "
        f"{len({one.name for one in timed})} backends stay within the spread of the first run, and "
        f"no median is more than {max(apart):.1f} % apart.\n"
    )


def _same_code(one: KernelSeries) -> tuple[str, KernelCell, str | None]:
    return one.name, one.cell, one.version_digest


def row_errors(task: str, *names: str) -> None:
    """Print the relative error of a row that some backends made at each length, over its budget."""
    path, results = newest_of(task)
    if not isinstance(results, KernelTiming):
        raise ResultsError(f"{task} is not a timing of kernels")
    checks = {(s.name, s.cell.length): s.check for s in results.series}

    def at(seqlen: int) -> Callable[[str], str]:
        def of(name: str) -> str:
            check = checks[name, seqlen]
            return f"{check.row_error:.1e} / {check.row_budget:.1e}" if check else ""

        return of

    lengths = sorted({cell.length for cell in results.cells})
    columns = {"backend": lambda name: f"`{name}`", **{f"N={n}": at(n) for n in lengths}}
    emit(str(_table(f"{where(results.provenance)} ({_link(path)})", names, columns)))


def predictions(task: str, *measured: str) -> None:
    """Print a task of predictions beside the times that were measured of the same files."""
    path, results = newest_of(task)
    if not isinstance(results, Predictions):
        raise ResultsError(f"{task} is no prediction")
    timings = [newest_of(name)[1] for name in measured]
    series = [one for file in timings if isinstance(file, KernelTiming) for one in file.series]
    emit("\n".join(map(str, _predictions(_link(path), results, series))))
    emit(f"{accuracy(results, series)}\n")


def wavefronts(task: str, profile: str) -> None:
    """Print the wavefronts that predictions count beside those of a profile."""
    path, results = newest_of(task)
    profiled_path, profiled = newest_of(profile)
    if not isinstance(results, Predictions) or not isinstance(profiled, Profile):
        raise ResultsError(f"{task} and {profile} are not predictions and a profile")
    measured = {one.name: one.metrics for one in profiled.versions}

    def share(kind: str) -> Callable[[Predicted], str]:
        def of(one: Predicted) -> str:
            counted = one.load_wavefronts if kind == "load" else one.store_wavefronts
            found = measured[one.name][f"shared_{kind}_wavefronts"]
            if kind == "load":
                found += measured[one.name].get("shared_matrix_wavefronts", 0)
            return f"{counted:,} / {found:,.0f}" + (f" = {counted / found:.3f}" if found else "")

        return of

    cell = (profiled.shape.seqlen, profiled.shape.batch, profiled.shape.heads)
    rows = [
        one
        for one in results.series
        if one.name in measured and (one.cell.seqlen, one.cell.batch, one.cell.num_heads) == cell
    ]
    columns: Columns[Predicted] = {
        "backend": lambda one: f"`{one.name}`",
        "loads": share("load"),
        "stores": share("store"),
    }
    files = f"{_link(path)}, {_link(profiled_path)}"
    emit(str(_table(f"{profiled.shape}; counted / profiled ({files})", rows, columns)))


def picture(task: str, plot: str) -> None:
    """Print the link to a picture, which `python scripts/plot_results.py` draws."""
    emit(f"!{_link(Path('results', 'plots', f'{task}_{plot}.svg'), f'{task}, {plot}')}\n")


@functools.cache
def _files() -> dict[str, tuple[Path, Results]]:
    return newest(Path("results"))


def newest_of(task: str) -> tuple[Path, Results]:
    """Return the newest results of a task and their file; raises ResultsError without any."""
    if task not in _files():
        raise ResultsError(f"no results are of the task {task}: there are {', '.join(_files())}")
    return _files()[task]


def _link(path: Path, text: str = "") -> str:
    """Return a link to a file from the document that cog is filling."""
    cog = sys.modules.get("cog")
    document = Path(str(cog.inFile) if cog else "README.md")
    return f"[{text or path.name}]({os.path.relpath(path, document.parent)})"


def emit(text: str) -> None:
    """Print Markdown for the document that cog is filling."""
    print(f"\n{text}")  # Markdown needs an empty line after a comment


# ---- What a figure means -------------------------------------------------------------------------


def ratio(series: Series, others: Iterable[Series], baseline: str) -> float | None:
    """Return how many times as fast as the baseline; None if the baseline is more precise.

    NaN if the ranges of their samples meet: then neither is faster.
    """
    for other in others:
        coarser = COARSENESS.get(series.precision, 0) > COARSENESS.get(other.precision, 0)
        if other.name == baseline and not coarser and other.samples and series.samples:
            told = other is series or not _overlap(series, other)
            return other.median / series.median if told else math.nan
    return None


def attention_share(series: GenerationSeries, others: Iterable[GenerationSeries]) -> float | None:
    """Return the part of an end-to-end time that goes away if attention takes none.

    NaN if that is within the spread: a sample with attention is no slower than one without.
    """
    for other in others:
        if other.name == FREE_ATTENTION and other.samples and series.samples:
            told = series.spread[0] > other.spread[1]
            return 1 - other.median / series.median if told else math.nan
    return None


def _overlap(one: Series, other: Series) -> bool:
    return one.spread[0] <= other.spread[1] and other.spread[0] <= one.spread[1]


def spread_percent(samples: Sequence[float]) -> float:
    """Return the distance from the smallest to the largest sample, in percent of the median."""
    return 100 * (max(samples) - min(samples)) / statistics.median(samples)


def detail_seqlen(seqlens: Collection[int]) -> int:
    """Return the length that stands for a kernel, in bars and beside its times."""
    return 1024 if 1024 in seqlens else max(seqlens)


def where(provenance: Provenance) -> str:
    """Return the machine and the torch of a run."""
    return f"{provenance.machine}, torch {provenance.packages['torch']}"


# ---- Tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of texts; as a str it is Markdown."""

    title: str
    head: list[str]
    rows: Sequence[tuple[str, ...]]
    notes: Mapping[str, str]
    """By the name of what they are about."""

    @property
    def has_ties(self) -> bool:
        """Whether a figure is left out because the samples do not tell it."""
        return any(WITHIN_SPREAD in row for row in self.rows)

    def __str__(self) -> str:
        text = f"{self.title}:\n\n{markdown(self.head, self.rows)}"
        if self.has_ties:
            text += f"\n`{WITHIN_SPREAD}`: {TIE}.\n"
        return text + "".join(f"\n`{name}`: {note}\n" for name, note in self.notes.items())


def render(file: str, results: Results) -> str:
    """Return the tables of a results file as Markdown; `file` is what names it."""
    return "\n".join(map(str, tables(file, results)))


def tables(file: str, results: Results) -> list[Table]:
    """Return the tables of a results file."""
    return _RENDERERS[type(results)](file, results)


def _generation(file: str, results: GenerationTiming) -> list[Table]:
    """Generation end to end: a table per batch, dtype and mode; a column per number of tokens."""
    if results.timed == "call":
        return [_beside_transformers(file, results)]
    groups = group_by(results.series, lambda s: s.cell.shape)
    return [_generation_block(file, results, group) for group in groups.values()]


def _generation_block(file: str, results: GenerationTiming, group: list[GenerationSeries]) -> Table:
    lengths = sorted({series.cell.length for series in group})
    cell = group[0].cell
    new_tokens = cell.batch * (lengths[-1] - results.prompt_tokens)
    by_name = group_by(group, lambda series: series.name)
    last = [series for series in group if series.cell.length == lengths[-1]]

    def seconds(tokens: int) -> Callable[[GenerationSeries], str]:
        return lambda one: _median(by_name[one.name], tokens, "{:.3f}")

    def share(one: GenerationSeries) -> float | None:
        return None if one.name == FREE_ATTENTION else attention_share(one, last)

    columns: Columns[GenerationSeries] = {
        "backend": lambda one: f"`{one.name}`",
        "precision": lambda one: one.precision,
        **{f"{n} tokens, s": seconds(n) for n in lengths},
        "spread": lambda one: _spread(by_name[one.name]) if one.samples else "",
        f"x {results.baseline}": lambda one: _times(ratio(one, last, results.baseline)),
        "tokens/s": lambda one: f"{new_tokens / one.median:.0f}" if one.samples else "",
        "attention's share": lambda one: _figure(share(one), "{:.1%}"),
        "peak memory, MiB": lambda one: _divided(one.peak_memory_bytes, 2**20),
    }
    title = f"{results.model}, {cell.shape}, {_how(file, results)}"
    return _table(title, last, columns, _untimed(group))


def _beside_transformers(file: str, results: GenerationTiming) -> Table:
    """Generation beside transformers; a ratio is of whole calls, warm-up included."""
    cell = results.cells[0]
    new_tokens = cell.max_tokens - results.prompt_tokens

    def times(one: GenerationSeries) -> float | None:
        return ratio(one, [s for s in results.series if s.cell == one.cell], results.baseline)

    def after_warm_up(one: GenerationSeries) -> float | None:
        """Seconds without the warm-up, which transformers has none of."""
        return statistics.median(one.generation_s or one.samples) if one.samples else None

    def rate(one: GenerationSeries) -> float | None:
        seconds = after_warm_up(one)
        return new_tokens / seconds if seconds else None

    columns: Columns[GenerationSeries] = {
        "program, mode": lambda one: f"{one.program}, {one.cell.mode}",
        "attention": lambda one: f"`{one.decode_attention or one.attention}`",
        "precision": lambda one: one.precision,
        "call, s (min .. max)": lambda one: with_spread(one, "{:.3f}"),
        "vs transformers": lambda one: _times(times(one)),
        "after warm-up, s": lambda one: _figure(after_warm_up(one), "{:.3f}"),
        "tokens/s": lambda one: _figure(rate(one), "{:.0f}"),
    }
    title = (
        f"{results.model}, {cell.dtype}, {results.prompt_tokens} + {new_tokens} tokens, "
        f"{_how(file, results, 'transformers')}"
    )
    return _table(title, results.series, columns)


def _kernel(file: str, results: KernelTiming) -> list[Table]:
    """The kernel alone: a table per shape; times by seqlen, then more about one of them.

    Shapes that have lengths of their own are the rows of one table.
    """
    groups = group_by(results.series, lambda s: s.cell.shape)
    if has_shapes(results):
        return [_kernel_shapes(file, results)]
    return [_kernel_block(file, results, group) for group in groups.values()]


def has_shapes(results: KernelTiming) -> bool:
    """Return whether shapes are compared, each at lengths of its own."""
    shapes, lengths = ({getattr(c, name) for c in results.cells} for name in ("shape", "length"))
    return len(results.cells) < len(shapes) * len(lengths)


def _kernel_shapes(file: str, results: KernelTiming) -> Table:
    by_cell = group_by(results.series, lambda one: one.cell)

    def speed(name: str) -> Callable[[KernelCell], str]:
        def of(cell: KernelCell) -> str:
            one = next(one for one in by_cell[cell] if one.name == name)
            if not one.samples:
                return one.status
            times = _times(ratio(one, by_cell[cell], results.baseline))
            has_ratio = times and name != results.baseline
            return f"{one.tflops:.3g}" + (f" ({times} x)" if has_ratio else "")

        return of

    timed = [one for one in results.series if one.samples]
    columns: Columns[KernelCell] = {"shape": str}
    for one in {one.name: one for one in timed}.values():
        columns[f"`{one.name}`, {one.precision}"] = speed(one.name)
    title = (
        f"TFLOP/s, and how many times as fast as `{results.baseline}`; {_how(file, results)}, the "
        f"widest spread of which is {_spread(timed)}"
    )
    if all(map(_within_budget, timed)):
        title += "; what was timed was within its budget"
    return _table(title, results.cells, columns, _untimed(results.series))


def _kernel_block(file: str, results: KernelTiming, group: list[KernelSeries]) -> Table:
    lengths = sorted({series.cell.seqlen for series in group})
    chosen = detail_seqlen(lengths)
    by_name = group_by(group, lambda series: series.name)
    at_chosen = {series.name: series for series in group if series.cell.seqlen == chosen}
    # A backend without times has no row.
    rows = [name for name, mine in by_name.items() if any(one.samples for one in mine)]

    def microseconds(seqlen: int) -> Callable[[str], str]:
        return lambda name: _median(by_name[name], seqlen, "{:.1f}")

    def at(text: Callable[[KernelSeries], str]) -> Callable[[str], str]:
        """Leave blank what is about the chosen length for a backend that has no time there."""
        timed = {name: one for name, one in at_chosen.items() if one.samples}
        return lambda name: text(timed[name]) if name in timed else ""

    def rate(work: Callable[[KernelCell], int], unit: float) -> Callable[[str], str]:
        return at(lambda one: f"{work(one.cell) / (one.median * 1e-6) / unit:.3g}")

    columns: Columns[str] = {
        "backend": lambda name: f"`{name}`",
        "precision": lambda name: by_name[name][0].precision,
        **{f"N={n}, us": microseconds(n) for n in lengths},
        **(
            {"20 % .. 80 %": at(lambda one: _quantiles(one.samples))}
            if len(lengths) == 1
            else {"spread": lambda name: _spread(by_name[name])}
        ),
        f"x {results.baseline}, N={chosen}": at(
            lambda one: _times(ratio(one, at_chosen.values(), results.baseline))
        ),
        "TFLOP/s": rate(lambda cell: cell.flops, 1e12),
        "GB/s": rate(lambda cell: cell.min_bytes, 1e9),
        "error": at(lambda one: f"{one.check.error:.1e}" if one.check else ""),
    }
    if len(lengths) == 1:
        columns["relative error"] = at(
            lambda one: f"{one.check.relative_error:.1%}" if one.check else ""
        )
    columns["workspace, KiB"] = at(lambda one: _divided(one.workspace_bytes, 1024))
    title = _kernel_title(file, results, group, chosen)
    return _table(title, rows, columns, _untimed(group))


def _kernel_title(file: str, results: KernelTiming, group: list[KernelSeries], chosen: int) -> str:
    cell, timed = group[0].cell, [series for series in group if series.samples]
    title = (
        f"{cell.shape}, {_how(file, results)}. TFLOP/s, GB/s (q, k, v and o once) and the largest "
        f"error against float64 are at N={chosen}"
    )
    checks = [series.check for series in group if series.check and series.cell.seqlen == chosen]
    # Where plain PyTorch has no row of its own; for float64 it is float32's, scaled.
    if BASELINE not in {series.name for series in timed} and cell.dtype != "float64":
        naive = [check.naive_error for check in checks if check.naive_error]
        title += f", where plain PyTorch's own error is {naive[0]:.1e}" if naive else ""
    if len({series.cell.seqlen for series in group}) > 1 and all(map(_within_budget, timed)):
        title += "; at every N what was timed was within its budget"
    limits = results.provenance.limits
    if tflops := limits.get(f"matmul_{cell.dtype}_tflops"):
        title += f"; in this run an 8192^3 matmul reached {tflops:.0f} TFLOP/s and a copy "
        title += f"{limits['copy_gbps']:.0f} GB/s"
    return title


def _profile(file: str, results: Profile) -> list[Table]:
    """What the profiler counted: a row per version, a column per metric."""
    metrics = dict.fromkeys(name for one in results.versions for name in one.metrics)

    def count(metric: str) -> Callable[[Profiled], str]:
        return lambda one: _figure(one.metrics.get(metric), "{:,.4g}")

    def throughput(metric: str, size: int) -> Callable[[Profiled], str]:
        def of(one: Profiled) -> str:
            if metric not in one.metrics or "duration_us" not in one.metrics:
                return ""
            return f"{one.metrics[metric] * size / one.metrics['duration_us'] / 1e3:,.3g}"

        return of

    columns: Columns[Profiled] = {
        "backend": lambda one: f"`{one.name}`",
        **{metric.replace("_", " "): count(metric) for metric in metrics},
        **{what: throughput(*of) for what, of in THROUGHPUTS.items()},
    }
    title = f"{results.shape}, {where(results.provenance)}; one profiled call each ({file})"
    return [_table(title, results.versions, columns)]


def _inspection(file: str, results: Inspection) -> list[Table]:
    """What the compiler and the source say of each version; blank if it cannot be counted."""

    def shared(found: dict[str, float], kind: str) -> str:
        if f"shared_{kind}_requests" not in found:
            return ""
        requests, conflicts, ways = (
            found[f"shared_{kind}_{what}"] for what in ("requests", "conflicts", "ways")
        )
        return f"{requests:,.0f}" + (f" + {conflicts:,.0f} ({ways:.0f}-way)" if conflicts else "")

    def sectors(found: dict[str, float], kind: str) -> str:
        if f"global_{kind}_sectors" not in found:
            return ""
        count, fewest = found[f"global_{kind}_sectors"], found[f"global_{kind}_fewest_sectors"]
        return f"{count:,.0f}" + (f" ({fewest:,.0f} would do)" if fewest < count else "")

    def occupancy(found: dict[str, float]) -> str:
        return f"{found['warps']:.0f}, {found['occupancy_percent']:.0f} %"

    columns: Columns[Inspected] = {
        "backend": lambda one: f"`{one.name}`",
        "registers": lambda one: f"{one.metrics['registers']:.0f}",
        "spills, bytes": lambda one: f"{one.metrics['spill_bytes']:.0f}",
        "shared memory, KiB": lambda one: f"{one.metrics['shared_bytes'] / 1024:.3g}",
        "warps/SM, occupancy": lambda one: occupancy(one.metrics),
        "shared loads": lambda one: shared(one.metrics, "load"),
        "shared stores": lambda one: shared(one.metrics, "store"),
        "sectors loaded": lambda one: sectors(one.metrics, "load"),
        "sectors stored": lambda one: sectors(one.metrics, "store"),
    }
    title = (
        f"{results.shape}; nvcc {results.nvcc} for sm_{results.arch}, accesses counted in the "
        f"source ({file}). After a + are bank conflicts"
    )
    counted = [one for one in results.versions if one.metrics]
    notes = {one.name: f"refused: {one.refused}" for one in results.versions if one.refused}
    return [_table(title, counted, columns, notes)]


def _predictions(
    file: str, results: Predictions, series: Iterable[KernelSeries] = ()
) -> list[Table]:
    """Predicted microseconds, and measured ones with their ratio: a row per version."""
    found = []
    for shape, group in group_by(results.series, lambda one: one.cell.shape).items():
        by_cell = {(one.name, one.cell.seqlen): one for one in group}
        lengths = sorted({one.cell.seqlen for one in group})
        columns: Columns[str] = {"backend": lambda name: f"`{name}`"}
        for n in lengths:
            columns[f"N={n}"] = functools.partial(_prediction, by_cell, n, [*series])
        last = lengths[-1]
        columns["bound at the longest"] = lambda name, of=by_cell, n=last: of[name, n].bound  # type: ignore[misc]
        notes = {one.name: one.refused for one in group if one.refused}
        title = f"{shape}, {results.gpu}; microseconds, predicted / measured ({file})"
        found.append(_table(title, [*dict.fromkeys(one.name for one in group)], columns, notes))
    return found


def _prediction(
    by_cell: Mapping[tuple[str, int], Predicted], n: int, series: Sequence[KernelSeries], name: str
) -> str:
    one = by_cell[name, n]
    if one.refused:
        return "refused"
    time = _measured(one, series)
    return f"{one.time_us:.4g}" + (f" / {time:.4g} = {one.time_us / time:.2f}" if time else "")


def _measured(one: Predicted, series: Iterable[KernelSeries]) -> float | None:
    """Return the median of the same version file in the same cell, if it was measured."""
    return next((s.median for s in series if s.samples and one.is_of(s)), None)


def accuracy(results: Predictions, series: Sequence[KernelSeries]) -> str:
    """Say how far predictions are from what was measured."""
    ratios = {
        (one.name, one.cell.seqlen): one.time_us / time
        for one in results.series
        if not one.refused and (time := _measured(one, series))
    }
    if not ratios:
        return "None of it has been measured yet."
    errors = {key: abs(ratio - 1) for key, ratio in ratios.items()}
    worst = max(errors, key=lambda key: errors[key])
    far = sum(error > 0.35 for error in errors.values())
    return (
        f"Of {len(ratios)} cells that were measured, the median error is "
        f"{statistics.median(errors.values()):.1%}; {far or 'none'} of them "
        f"{'is' if far < 2 else 'are'} off by more than 35 %. The worst is `{worst[0]}` at "
        f"N={worst[1]}: {ratios[worst]:.2f} times the measured time."
    )


def _build(file: str, results: BuildTiming) -> list[Table]:
    """The seconds of a cold build: a row per compiler."""
    columns: Columns[BuildSeries] = {
        "compiler": lambda one: one.name,
        "seconds": lambda one: f"{one.median:.1f}",
        "min .. max": lambda one: f"{one.spread[0]:.1f} .. {one.spread[1]:.1f}",
    }
    title = f"{results.series[0].versions} versions on {results.jobs} cores ({file})"
    return [_table(title, results.series, columns)]


def _decode(file: str, results: DecodeTiming) -> list[Table]:
    """Whole texts: a row per cell and contender."""
    columns: Columns[DecodeSeries] = {
        "model": lambda one: one.cell.model,
        "dtype": lambda one: one.cell.dtype,
        "batch": lambda one: str(one.cell.batch),
        "contender": lambda one: one.name,
        "seconds": lambda one: _figure(
            one.median if one.samples and one.cell.mode == "recompute" else None, "{:.3f}"
        ),
        "tokens/s": lambda one: f"{one.tokens_per_second:,.0f}" if one.samples else "",
        "least .. most": lambda one: (
            " .. ".join(
                f"{one.tokens_per_second * one.median / seconds:,.0f}"
                for seconds in reversed(one.spread)
            )
            if one.samples
            else ""
        ),
        "us per step": lambda one: _figure(one.step_us, "{:.0f}"),
        "weights, GB/s": lambda one: _figure(one.gb_per_second, "{:,.0f}"),
        "of the bandwidth": lambda one: _figure(
            one.gb_per_second and one.gb_per_second / results.read_gb_s, "{:.0%}"
        ),
    }
    cells = [one.cell for one in results.series]
    counts = sorted({cell.new_tokens for cell in cells})
    title = (
        f"{cells[0].prompt_tokens} + {' and '.join(map(str, counts))} tokens, "
        f"{results.read_gb_s / 1000:.2f} TB/s of read bandwidth measured, {_how(file, results)}"
    )
    differs = [one for one in results.series if one.same_text is False]
    notes = {one.name: f"another text in {one.cell.model}" for one in differs}
    notes |= {one.name: one.reason for one in results.series if one.reason}
    return [_table(title, results.series, columns, notes)]


def _batch(file: str, results: BatchTiming) -> list[Table]:
    """Many prompts: a row per batch size, program or options of a job."""
    columns: Columns[BatchSeries] = {
        "dtype": lambda one: one.dtype,
        "contender": lambda one: one.name,
        "prompts": lambda one: f"{one.prompts:,}",
        "start, s": lambda one: f"{one.start_s:.1f}" if one.start_s else "",
        "seconds": lambda one: with_spread(one, "{:.2f}"),
        "tokens/s": lambda one: f"{one.tokens_per_second:,.0f}" if one.samples else "",
        "same rows": lambda one: _figure(one.same_rows, "{:.1%}"),
    }
    title = f"{results.model}, {results.new_tokens} new tokens each, {_how(file, results)}"
    notes = {one.name: one.reason for one in results.series if one.reason}
    return [_table(title, results.series, columns, notes)]


def _perplexity(file: str, results: Perplexity) -> list[Table]:
    """The score of every backend: a row each, with its difference from NAIVE_PYTORCH."""
    columns: Columns[PerplexitySeries] = {
        "dtype": lambda one: one.dtype,
        "backend": lambda one: f"`{one.name}`",
        "precision": lambda one: one.precision,
        "bits per byte": lambda one: "" if one.reason else f"{one.bits_per_byte:.7f}",
        "perplexity": lambda one: "" if one.reason else f"{one.perplexity:.5f}",
        "nats per token": lambda one: "" if one.reason else f"{one.difference:+.1e}",
        "standard errors": lambda one: (
            f"{one.difference / one.standard_error:+.1f}" if one.standard_error else ""
        ),
    }
    title = (
        f"{results.model}, the first {results.tokens:,} tokens of the held-out books, windows of "
        f"{results.window}; {where(results.provenance)} ({file}). The last two columns: apart from "
        f"`{BASELINE}` in the same dtype"
    )
    notes = {one.name: one.reason for one in results.series if one.reason}
    return [_table(title, results.series, columns, notes)]


def _published(file: str, results: Published) -> list[Table]:
    """Somebody else's published seconds: a row per implementation, a column per card."""
    cards = dict.fromkeys(card for row in results.seconds.values() for card in row)

    def seconds(card: str) -> Callable[[str], str]:
        return lambda name: _figure(results.seconds[name].get(card), "{:.1f} s")

    columns: Columns[str] = {
        "backend": lambda name: f"`{name}`",
        **{card: seconds(card) for card in cards},
    }
    return [_table(f"{results.note} ({file})", list(results.seconds), columns)]


_RENDERERS: dict[type, Callable[[str, Any], list[Table]]] = {
    GenerationTiming: _generation,
    KernelTiming: _kernel,
    Profile: _profile,
    Inspection: _inspection,
    Predictions: _predictions,
    BuildTiming: _build,
    DecodeTiming: _decode,
    BatchTiming: _batch,
    Perplexity: _perplexity,
    Published: _published,
}


# ---- Cells of a table ----------------------------------------------------------------------------


def group_by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Return the rows by key, both in the order of the rows."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def are_numbers(column: Iterable[str]) -> bool:
    """Return whether a column of texts, some of them blank, is to be aligned to the right."""
    return all(map(_NUMBER.match, filter(None, column)))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of texts; a column of numbers is aligned to the right."""
    align = ["right" if are_numbers(column) else "left" for column in zip(*rows, strict=True)]
    return tabulate(rows, head, "pipe", disable_numparse=True, colalign=align) + "\n"


def _table(
    title: str,
    rows: Sequence[Row],
    columns: Columns[Row],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Return a table without the columns that are blank throughout."""
    cells = {head: [cell(row) for row in rows] for head, cell in columns.items()}
    cells = {head: column for head, column in cells.items() if any(column)}
    return Table(title, [*cells], [*zip(*cells.values(), strict=True)], notes)


def _how(file: str, results: Timing | DecodeTiming | BatchTiming, *packages: str) -> str:
    """Say where, with which versions and how often something was timed."""
    versions = (f", {name} {results.provenance.packages[name]}" for name in packages)
    place = where(results.provenance) + "".join(versions)
    return f"{place}; medians of {results.rounds} interleaved rounds ({file})"


def with_spread(series: Sampled, form: str) -> str:
    """Return the median with the smallest and the largest sample, or why there is none."""
    if not series.samples:
        return f"{series.status}: {series.reason}"
    middle, low, high = (form.format(value) for value in (series.median, *series.spread))
    return f"{middle} ({low} .. {high})"


def _median(series: Sequence[AnySeries], length: int, form: str) -> str:
    """Return the median of the one series at a length, or its status."""
    for one in series:
        if one.cell.length == length:
            return form.format(one.median) if one.samples else one.status
    return ""


def _spread(series: Iterable[Series]) -> str:
    """Return the widest spread of several series."""
    return f"{max(spread_percent(s.samples) for s in series if s.samples):.1f} %"


def _quantiles(samples: Sequence[float]) -> str:
    """Return the 20th and 80th percentiles."""
    low, *_, high = statistics.quantiles(samples, n=5, method="inclusive")
    return f"{low:.1f} .. {high:.1f}"


def _times(value: float | None) -> str:
    return _figure(value, "{:.2g}" if value is not None and value < 0.1 else "{:.2f}")


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return WITHIN_SPREAD if math.isnan(value) else form.format(value)


def _divided(count: int | None, unit: int) -> str:
    return "" if count is None else f"{count / unit:.0f}"


def _within_budget(series: Series) -> bool:
    check = series.check
    if check is None or check.error is None or check.budget is None:
        return False
    return check.error <= check.budget


def _untimed(group: Iterable[Series]) -> dict[str, str]:
    """Say of each backend why it has no time, or that its text was compared with none."""
    notes = {s.name: f"{s.status}: {s.reason}" for s in group if not s.samples}
    for series in group:
        unchecked = isinstance(series, GenerationSeries) and series.text_compared is False
        if unchecked and series.name != FREE_ATTENTION:
            notes[series.name] = "its text was compared with nothing: the baseline wrote none"
    return notes
