"""Results as Markdown tables: what the scripts print and what the documents show.

A ratio is given only within one file, one cell and one precision class, and only if the samples of
the two do not overlap. Documents contain the tables between markers that `make docs` fills:

    <!-- [[[cog from gpt2_infer.bench import tables; tables.show("kernel-fp32") ]]] -->
    <!-- [[[end]]] -->

Nothing here imports torch, except versions() and ladder(), which read the headers of a ladder.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tabulate import tabulate

from gpt2_infer.bench.results import (
    BASELINE,
    FREE_ATTENTION,
    BuildTiming,
    GenerationSeries,
    GenerationTiming,
    Inspection,
    KernelCell,
    KernelSeries,
    KernelTiming,
    Profile,
    Provenance,
    Published,
    Results,
    ResultsError,
    Series,
    newest,
)

WITHIN_SPREAD = "~"  # in place of a figure
# What a profile's table derives: the counter, and its bytes. A wavefront is 128 bytes at most.
THROUGHPUTS = {
    "shared loads, GB/s at most": ("shared_load_wavefronts", 128),
    "shared stores, GB/s at most": ("shared_store_wavefronts", 128),
    "global loads, GB/s": ("global_load_bytes", 1),
    "asynchronous global loads, GB/s": ("global_async_load_sectors", 32),
    "global stores, GB/s": ("global_store_bytes", 1),
}
KINDS = ("load", "store")

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)
AnySeries = TypeVar("AnySeries", bound=Series)
Columns = Sequence[tuple[str, Callable[[Row], str]]]
"""A table's columns: the heading, and the cell of a row."""


# ---- In documents --------------------------------------------------------------------------------


def show(task: str) -> None:
    """Print the table of a task's newest results, for the document that cog is filling."""
    path, results = _newest(task)
    link = os.path.relpath(path, Path(_document()).parent)
    _print(render(f"[{path.name}]({link})", results))


def versions(family: str) -> None:
    """Print the table of a ladder's versions, from their headers."""
    from gpt2_infer.bench import ladders

    _print(ladders.versions_table(family))


def overview(family: str, kernel: str, generation: str) -> None:
    """Print a ladder's versions with the times of a task of kernels and one of generation."""
    from gpt2_infer.bench import ladders

    alone, whole = _newest(kernel)[1], _newest(generation)[1]
    if not isinstance(alone, KernelTiming) or not isinstance(whole, GenerationTiming):
        raise ResultsError(f"{kernel} and {generation} are not timings of kernels and generation")
    _print(ladders.overview(family, alone, whole))


def row_errors(task: str, *names: str) -> None:
    """Print the relative error of a row that some backends made at each length, over its budget."""
    path, results = _newest(task)
    if not isinstance(results, KernelTiming):
        raise ResultsError(f"{task} is not a timing of kernels")
    lengths = sorted({cell.seqlen for cell in results.cells})
    rows = []
    for name in names:
        mine = {s.cell.seqlen: s.check for s in results.series if s.name == name}
        found = [mine[n] for n in lengths]
        rows.append(
            [f"`{name}`", *(f"{c.row_error:.1e} / {c.row_budget:.1e}" if c else "" for c in found)]
        )
    link = os.path.relpath(path, Path(_document()).parent)
    title = f"{where(results.provenance)} ([{path.name}]({link}))"
    _print(f"{title}:\n\n{markdown(['backend', *(f'N={n}' for n in lengths)], rows)}")


def ladder(family: str, *tasks: str) -> None:
    """Print a section for each version of a ladder: its header, and what these tasks measured."""
    from gpt2_infer.bench import ladders

    _print(ladders.sections(family, [_newest(task)[1] for task in tasks]))


def picture(task: str, plot: str) -> None:
    """Print the link to a picture, which `python scripts/plot_results.py` draws."""
    file = Path("results", "plots", f"{task}_{plot}.svg")
    _print(f"![{task}, {plot}]({os.path.relpath(file, Path(_document()).parent)})\n")


@functools.cache
def _files() -> dict[str, tuple[Path, Results]]:
    return newest(Path("results"))


def _newest(task: str) -> tuple[Path, Results]:
    if task not in _files():
        raise ResultsError(f"no results are of the task {task}: there are {', '.join(_files())}")
    return _files()[task]


def _document() -> str:
    """Return the file that cog is filling."""
    cog = sys.modules.get("cog")
    return str(cog.inFile) if cog else "README.md"


def _print(text: str) -> None:
    print(f"\n{text}")  # Markdown needs an empty line after a comment


# ---- What a figure means -------------------------------------------------------------------------


def ratio(series: AnySeries, others: Iterable[AnySeries], baseline: str) -> float | None:
    """Return how many times as fast as the baseline; None for another precision class.

    NaN if the ranges of their samples meet: then neither is faster.
    """
    for other in others:
        same = other.precision == series.precision
        if other.name == baseline and same and other.samples and series.samples:
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


def render(file: str, results: Results) -> str:
    """Return the table of a results file; `file` is what names it."""
    render_kind = _RENDERERS[type(results)]
    return render_kind(file, results)


def _generation(file: str, results: GenerationTiming) -> str:
    """Generation end to end: a block per batch, dtype and mode; a column per number of tokens."""
    blocks = []
    for (batch, dtype, mode), group in group_by(
        results.series, lambda s: (s.cell.batch, s.cell.dtype, s.cell.mode)
    ).items():
        lengths = sorted({series.cell.max_tokens for series in group})
        last = [series for series in group if series.cell.max_tokens == lengths[-1]]
        new_tokens = batch * (lengths[-1] - results.prompt_tokens)

        columns = _generation_columns(results, group, last, lengths, new_tokens)
        what = f"{results.model}, {dtype}, batch {batch}, {mode}"
        title = f"{what}, {where(results.provenance)}; {_how(file, results.rounds)}"
        blocks.append(f"{title}:\n\n{_table(last, columns)}{_untimed(group)}")
    return "\n".join(blocks)


def _generation_columns(
    results: GenerationTiming,
    group: list[GenerationSeries],
    last: list[GenerationSeries],
    lengths: list[int],
    new_tokens: int,
) -> Columns[GenerationSeries]:
    cells = {(series.name, series.cell.max_tokens): series for series in group}
    by_name = group_by(group, lambda series: series.name)

    def share(one: GenerationSeries) -> str:
        is_free = one.name == FREE_ATTENTION
        return "" if is_free else _figure(attention_share(one, last), "{:.1%}")

    return [
        ("backend", lambda one: f"`{one.name}`"),
        ("precision", lambda one: one.precision),
        *(
            (f"{n} tokens, s", lambda one, n=n: _median(cells.get((one.name, n)), "{:.3f}"))
            for n in lengths
        ),
        ("spread", lambda one: _timed(one, lambda one: _spread(by_name[one.name]))),
        (f"x {results.baseline}", lambda one: _times(ratio(one, last, results.baseline))),
        ("tokens/s", lambda one: _timed(one, lambda one: f"{new_tokens / one.median:.0f}")),
        ("attention's share", share),
        ("peak memory, MiB", lambda one: _mebibytes(one.peak_memory_bytes)),
    ]


def _beside_transformers(file: str, results: GenerationTiming) -> str:
    """Generation beside transformers; a ratio is of whole calls, warm-up included."""
    new_tokens = results.cells[0].max_tokens - results.prompt_tokens
    transformers = [s for s in results.series if s.program == "transformers"]

    def seconds(one: GenerationSeries) -> float:
        """Without the warm-up, which transformers has none of."""
        return statistics.median(one.generation_s or one.samples)

    def times(one: GenerationSeries) -> str:
        of_mode = [other for other in transformers if other.cell == one.cell]
        return _times(ratio(one, of_mode, results.baseline))

    def call(one: GenerationSeries) -> str:
        if not one.samples:
            return f"{one.status}: {one.reason}"
        low, high = one.spread
        return f"{one.median:.3f} ({low:.3f} .. {high:.3f})"

    columns: Columns[GenerationSeries] = [
        ("program, mode", lambda one: f"{one.program}, {one.cell.mode}"),
        ("attention", lambda one: f"`{one.decode_attention or one.attention}`"),
        ("precision", lambda one: one.precision),
        ("call, s (min .. max)", call),
        ("vs transformers", times),
        ("after warm-up, s", lambda one: _timed(one, lambda one: f"{seconds(one):.3f}")),
        ("tokens/s", lambda one: _timed(one, lambda one: f"{new_tokens / seconds(one):.0f}")),
    ]
    title = (
        f"{results.model}, {results.cells[0].dtype}, {results.prompt_tokens} + {new_tokens} "
        f"tokens, {where(results.provenance)}, transformers "
        f"{results.provenance.packages['transformers']}; {_how(file, results.rounds)}"
    )
    return f"{title}:\n\n{_table(results.series, columns)}"


def _kernel(file: str, results: KernelTiming) -> str:
    """The kernel alone: a block per shape; times by seqlen, then more about one of them."""
    blocks = []
    for group in group_by(results.series, lambda s: s.cell.shape).values():
        lengths = sorted({series.cell.seqlen for series in group})
        one_length = len(lengths) == 1
        chosen = detail_seqlen(lengths)
        at_chosen = [series for series in group if series.cell.seqlen == chosen]
        by_name = group_by(group, lambda series: series.name)
        # The series at the chosen length stands for the row; a backend without times has no row.
        rows = [
            next((s for s in mine if s.cell.seqlen == chosen), mine[0])
            for mine in by_name.values()
            if any(series.samples for series in mine)
        ]
        columns = _kernel_columns(results, by_name, at_chosen, lengths, chosen)
        cell = group[0].cell
        kind = "causal" if cell.is_causal else "full"
        title = (
            f"B={cell.batch} H={cell.num_heads} head_dim={cell.head_dim}, {kind}, {cell.dtype}, "
            f"{where(results.provenance)}; {_how(file, results.rounds)}. TFLOP/s, GB/s (q, k, v "
            f"and o once) and the largest error against float64 are at N={chosen}"
        )
        # Where plain PyTorch has no row of its own; for float64 it is float32's, scaled.
        naive = [s.check.naive_error for s in at_chosen if s.check and s.check.naive_error]
        if naive and BASELINE not in {row.name for row in rows} and cell.dtype != "float64":
            title += f", where plain PyTorch's own error is {naive[0]:.1e}"
        if not one_length and all(_within_budget(s) for s in group if s.samples):
            title += "; at every N what was timed was within its budget"
        limits = results.provenance.limits
        if f"matmul_{cell.dtype}_tflops" in limits:
            tflops, gbps = limits[f"matmul_{cell.dtype}_tflops"], limits["copy_gbps"]
            title += f"; in this run an 8192^3 matmul reached {tflops:.0f} TFLOP/s and a copy "
            title += f"{gbps:.0f} GB/s"
        blocks.append(f"{title}:\n\n{_table(rows, columns)}{_untimed(group)}")
    return "\n".join(blocks)


def _kernel_columns(
    results: KernelTiming,
    by_name: dict[str, list[KernelSeries]],
    at_chosen: list[KernelSeries],
    lengths: list[int],
    chosen: int,
) -> Columns[KernelSeries]:
    cells = {(s.name, s.cell.seqlen): s for mine in by_name.values() for s in mine}
    one_length = len(lengths) == 1

    def at(one: KernelSeries, text: Callable[[KernelSeries], str]) -> str:
        """Leave blank what is about the chosen length for a row that has no time there."""
        return _timed(one, text) if one.cell.seqlen == chosen else ""

    def rate(work: Callable[[KernelCell], int], unit: float) -> Callable[[KernelSeries], str]:
        def of(one: KernelSeries) -> str:
            return f"{work(one.cell) / (one.median * 1e-6) / unit:.3g}"

        return lambda one: at(one, of)

    def error(one: KernelSeries) -> str:
        return at(one, lambda one: f"{one.check.error:.1e}" if one.check else "")

    def relative_error(one: KernelSeries) -> str:
        return at(one, lambda one: f"{one.check.relative_error:.1%}" if one.check else "")

    spread: tuple[str, Callable[[KernelSeries], str]] = (
        "spread",
        lambda one: _spread(by_name[one.name]),
    )
    if one_length:
        spread = ("20 % .. 80 %", lambda one: _quantiles(one.samples))
    return [
        ("backend", lambda one: f"`{one.name}`"),
        ("precision", lambda one: one.precision),
        *(
            (f"N={n}, us", lambda one, n=n: _median(cells.get((one.name, n)), "{:.1f}"))
            for n in lengths
        ),
        spread,
        (
            f"x {results.baseline}, N={chosen}",
            lambda one: at(one, lambda one: _times(ratio(one, at_chosen, results.baseline))),
        ),
        ("TFLOP/s", rate(lambda cell: cell.flops, 1e12)),
        ("GB/s", rate(lambda cell: cell.min_bytes, 1e9)),
        ("error", error),
        *([("relative error", relative_error)] if one_length else []),
        ("workspace, KiB", lambda one: at(one, lambda one: _kibibytes(one.workspace_bytes))),
    ]


def _profile(file: str, results: Profile) -> str:
    """What the profiler counted: a row per version, a column per metric."""
    metrics = list(dict.fromkeys(name for one in results.versions for name in one.metrics))

    def count(found: dict[str, float], metric: str) -> str:
        return f"{found[metric]:,.4g}" if metric in found else ""

    def throughput(found: dict[str, float], metric: str, size: int) -> str:
        if metric not in found or "duration_us" not in found:
            return ""
        return f"{found[metric] * size / found['duration_us'] / 1e3:,.3g}"

    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("backend", lambda one: f"`{one.name}`"),
        *(
            (metric.replace("_", " "), lambda one, metric=metric: count(one.metrics, metric))
            for metric in metrics
        ),
        *(
            (what, lambda one, of=of: throughput(one.metrics, *of))
            for what, of in THROUGHPUTS.items()
            if of[0] in metrics
        ),
    ]
    title = f"{results.shape}, {where(results.provenance)}; one profiled call each ({file})"
    return f"{title}:\n\n{_table(results.versions, columns)}"


def _inspection(file: str, results: Inspection) -> str:
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

    columns: Columns[dict[str, float]] = [
        ("registers", lambda found: f"{found['registers']:.0f}"),
        ("spills, bytes", lambda found: f"{found['spill_bytes']:.0f}"),
        ("shared memory, KiB", lambda found: f"{found['shared_bytes'] / 1024:.3g}"),
        (
            "warps/SM, occupancy",
            lambda found: f"{found['warps']:.0f}, {found['occupancy_percent']:.0f} %",
        ),
        ("shared loads", lambda found: shared(found, "load")),
        ("shared stores", lambda found: shared(found, "store")),
        ("sectors loaded", lambda found: sectors(found, "load")),
        ("sectors stored", lambda found: sectors(found, "store")),
    ]
    counted = [one for one in results.versions if one.metrics]
    named: list[tuple[str, Callable[[Any], str]]] = [
        ("backend", lambda one: f"`{one.name}`"),
        *((head, lambda one, cell=cell: cell(one.metrics)) for head, cell in columns),
    ]
    title = (
        f"{results.shape}; nvcc {results.nvcc} for sm_{results.arch}, accesses counted in the "
        f"source ({file}). After a + are bank conflicts"
    )
    notes = {one.name: f"refused: {one.refused}" for one in results.versions if one.refused}
    return f"{title}:\n\n{_table(counted, named)}{_notes(notes)}"


def _build(file: str, results: BuildTiming) -> str:
    """The seconds of a cold build: a row per compiler."""
    columns: Columns[Any] = [
        ("compiler", lambda one: one.name),
        ("seconds", lambda one: f"{one.median:.1f}"),
        ("min .. max", lambda one: f"{one.spread[0]:.1f} .. {one.spread[1]:.1f}"),
    ]
    title = f"{results.series[0].versions} versions on {results.jobs} cores ({file})"
    return f"{title}:\n\n{_table(results.series, columns)}"


def _published(file: str, results: Published) -> str:
    """Somebody else's published seconds: a row per implementation, a column per card."""
    cards = list(dict.fromkeys(card for row in results.seconds.values() for card in row))
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("backend", lambda row: f"`{row[0]}`"),
        *(
            (card, lambda row, card=card: f"{row[1][card]:.1f} s" if card in row[1] else "")
            for card in cards
        ),
    ]
    return f"{results.note} ({file}):\n\n{_table(list(results.seconds.items()), columns)}"


def _generation_of_either_kind(file: str, results: GenerationTiming) -> str:
    return (_beside_transformers if results.timed == "call" else _generation)(file, results)


_RENDERERS: dict[type, Callable[[str, Any], str]] = {
    GenerationTiming: _generation_of_either_kind,
    KernelTiming: _kernel,
    Profile: _profile,
    Inspection: _inspection,
    BuildTiming: _build,
    Published: _published,
}


# ---- Cells of a table ----------------------------------------------------------------------------


def group_by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Return the rows by key, both in the order of the rows."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of texts."""
    return tabulate(rows, head, tablefmt="github", disable_numparse=True) + "\n"


def _table(rows: Sequence[Row], columns: Columns[Row]) -> str:
    """Return a Markdown table without the columns that are blank in every row."""
    columns = [(head, cell) for head, cell in columns if any(cell(row) for row in rows)]
    body = [[cell(row) for _, cell in columns] for row in rows]
    text = markdown([head for head, _ in columns], body)
    if any(WITHIN_SPREAD in row for row in body):
        text += f"\n`{WITHIN_SPREAD}`: no difference beyond the spread of the samples.\n"
    return text


def _how(file: str, rounds: int) -> str:
    return f"medians of {rounds} interleaved rounds ({file})"


def _timed(series: AnySeries, text: Callable[[AnySeries], str]) -> str:
    return text(series) if series.samples else ""


def _median(series: Series | None, form: str) -> str:
    if series is None:
        return ""
    return form.format(series.median) if series.samples else series.status


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


def _mebibytes(count: int | None) -> str:
    return f"{count / 2**20:.0f}" if count else ""


def _kibibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1024:.0f}"


def _within_budget(series: Series) -> bool:
    check = series.check
    if check is None or check.error is None or check.budget is None:
        return False
    return check.error <= check.budget


def _untimed(group: Iterable[Series]) -> str:
    """Return a line for each backend without a time, with the reason, or with an unchecked text."""
    notes = {s.name: f"{s.status}: {s.reason}" for s in group if not s.samples}
    for series in group:
        unchecked = isinstance(series, GenerationSeries) and series.text_compared is False
        if unchecked and series.name != FREE_ATTENTION:
            notes[series.name] = "its text was compared with nothing: the baseline wrote none"
    return _notes(notes)


def _notes(notes: dict[str, str]) -> str:
    return "".join(f"\n`{name}`: {note}\n" for name, note in notes.items())
