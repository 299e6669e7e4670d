"""Results as Markdown tables: what the scripts print and what the README shows.

A ratio is quoted only within one file, one cell and one precision class, and where the samples of
the two do not overlap.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from attention_kernels import ladder
from gpt2_infer.bench.compare import BASELINE, FREE_ATTENTION, KERNEL_SHAPE, KernelCell
from gpt2_infer.bench.results import Results, Series

WITHIN_SPREAD = "~"  # in place of a figure
Cell = tuple[Any, ...]
KINDS = ("load", "store")
SHARED = ("requests", "conflicts", "ways")
SECTORS = ("sectors", "fewest_sectors")
# What the profile's table derives: the counter, and its bytes. A wavefront is 128 bytes at most.
THROUGHPUTS = {
    "shared loads, GB/s at most": ("shared_load_wavefronts", 128),
    "shared stores, GB/s at most": ("shared_store_wavefronts", 128),
    "global loads, GB/s": ("global_load_bytes", 1),
    "asynchronous global loads, GB/s": ("global_async_load_sectors", 32),
    "global stores, GB/s": ("global_store_bytes", 1),
}


def render(path: Path, results: Results, *, linked: bool = False) -> str:
    """The table of a results file; raises KeyError for a task that has none.

    linked: name the file by a link into results/, as the README does, and not by its path.
    """
    file = f"[{path.name}](results/{path.name})" if linked else str(path)
    return _TABLES[_kind(results)](file, results)


def ratio(series: Series, others: Iterable[Series], baseline: str) -> float | None:
    """How many times as fast as the baseline's series; None for another precision class.

    NaN where the ranges of their samples meet: then neither is the faster.
    """
    for other in others:
        same = other.labels["precision"] == series.labels["precision"]
        if other.name == baseline and same and other.samples and series.samples:
            told = other is series or not _overlap(series, other)
            return other.median / series.median if told else math.nan
    return None


def attention_share(series: Series, others: Iterable[Series]) -> float | None:
    """The part of an end-to-end time that goes when attention takes none.

    NaN where that is within the spread: a sample with attention is no slower than one without.
    """
    for other in others:
        if other.name == FREE_ATTENTION and other.samples and series.samples:
            told = series.spread[0] > other.spread[1]
            return 1 - other.median / series.median if told else math.nan
    return None


def _overlap(one: Series, other: Series) -> bool:
    return one.spread[0] <= other.spread[1] and other.spread[0] <= one.spread[1]


def spread_percent(samples: Sequence[float]) -> float:
    """From the smallest to the largest sample, in percent of the median."""
    return 100 * (max(samples) - min(samples)) / statistics.median(samples)


def detail_seqlen(seqlens: Collection[int]) -> int:
    """The length that a kernel is told by: the bars' one, and the others' beside its times."""
    return 1024 if 1024 in seqlens else max(seqlens)


def _generation_comparison(file: str, results: Results) -> str:
    """End to end: a block per batch, dtype and mode; a column per number of tokens."""
    settings = results.settings
    blocks = []
    for (batch, dtype, mode), group in _groups(results, "batch", "dtype", "mode").items():
        lengths = sorted({series.labels["max_tokens"] for series in group})
        last = [series for series in group if series.labels["max_tokens"] == lengths[-1]]
        has_memory = any(series.facts.get("peak_memory_bytes") for series in last)
        head = ["backend", "precision", *(f"{n} tokens, s" for n in lengths), "spread"]
        head += [f"x {settings['baseline']}", "tokens/s", "attention's share"]
        head += ["peak memory, MiB"] if has_memory else []
        rows = []
        for series in last:
            mine = [s for s in group if s.name == series.name]
            by_length = {s.labels["max_tokens"]: s for s in mine}
            row = [f"`{series.name}`", series.labels["precision"]]
            row += [_median(by_length.get(n), "{:.3f}") for n in lengths]
            if series.samples:
                new_tokens = batch * (lengths[-1] - settings["prompt_tokens"])
                share = attention_share(series, last)
                row += [_spread(mine), _times(ratio(series, last, settings["baseline"]))]
                row += [f"{new_tokens / series.median:.0f}"]
                row += ["" if series.name == FREE_ATTENTION else _figure(share, "{:.1%}")]
                memory = series.facts.get("peak_memory_bytes")
                row += [f"{memory / 2**20:.0f}" if memory else ""] if has_memory else []
            rows.append(row)
        what = f"{settings['model']}, {dtype}, batch {batch}, {mode}"
        title = f"{what}, {where(results)}; {_how(file, results)}"
        blocks.append(f"{title}:\n\n{_markdown(head, rows)}{_untimed(group)}")
    return "\n".join(blocks)


def _kernel_comparison(file: str, results: Results) -> str:
    """The kernel alone: times by seqlen, then more about one of them."""
    settings = results.settings
    blocks = []
    for shape, group in _groups(results, *KERNEL_SHAPE).items():
        batch, heads, head_dim, dtype, is_causal = shape
        lengths = sorted({series.labels["seqlen"] for series in group})
        chosen = detail_seqlen(lengths)
        cell = KernelCell(chosen, **dict(zip(KERNEL_SHAPE, shape, strict=True)))
        names = dict.fromkeys(series.name for series in group if series.samples)
        has_workspace = any(s.facts.get("workspace_bytes") is not None for s in group)
        one = len(lengths) == 1
        head = ["backend", "precision", *(f"N={n}, us" for n in lengths)]
        head += ["20 % .. 80 %" if one else "spread"]
        head += [f"x {settings['baseline']}, N={chosen}", "TFLOP/s", "GB/s", "error"]
        head += ["relative error"] if one else []
        head += ["workspace, KiB"] if has_workspace else []
        rows = []
        at_chosen = [series for series in group if series.labels["seqlen"] == chosen]
        for name in names:
            mine = {s.labels["seqlen"]: s for s in group if s.name == name}
            series = mine.get(chosen) or next(iter(mine.values()))
            row = [f"`{name}`", series.labels["precision"]]
            row += [_median(mine.get(n), "{:.1f}") for n in lengths]
            row += [_quantiles(series.samples) if one else _spread(mine.values())]
            if series.labels["seqlen"] == chosen and series.samples:
                seconds = series.median * 1e-6
                row += [_times(ratio(series, at_chosen, settings["baseline"]))]
                row += [
                    f"{cell.flops / seconds / 1e12:.3g}",
                    f"{cell.min_bytes / seconds / 1e9:.3g}",
                ]
                row += [f"{series.facts['error']:.1e}"]
                row += [f"{series.facts['relative_error']:.1%}"] if one else []
                if has_workspace:
                    row += [f"{series.facts['workspace_bytes'] / 1024:.0f}"]
            rows.append(row)
        kind = "causal" if is_causal else "full"
        title = (
            f"B={batch} H={heads} head_dim={head_dim}, {kind}, {dtype}, {where(results)}; "
            f"{_how(file, results)}. TFLOP/s, GB/s (q, k, v and o once) and the largest error "
            f"against float64 are at N={chosen}"
        )
        # Where plain PyTorch has no row of its own; for float64 it is float32's, scaled.
        naive = [s.facts["naive_error"] for s in at_chosen if s.facts.get("naive_error")]
        if naive and BASELINE not in names and dtype != "float64":
            title += f", where plain PyTorch's own error is {naive[0]:.1e}"
        if not one and all(s.facts["error"] <= s.facts["budget"] for s in group if s.samples):
            title += "; at every N what was timed was within its budget"
        limits = results.provenance.get("limits", {})
        if f"matmul_{dtype}_tflops" in limits:
            tflops, gbps = limits[f"matmul_{dtype}_tflops"], limits["copy_gbps"]
            title += f"; in this run an 8192^3 matmul reached {tflops:.0f} TFLOP/s and a copy "
            title += f"{gbps:.0f} GB/s"
        blocks.append(f"{title}:\n\n{_markdown(head, rows)}{_untimed(group)}")
    return "\n".join(blocks)


def _beside_transformers(file: str, results: Results) -> str:
    """Generation beside transformers; a ratio is of whole calls, warm-up included."""
    settings, packages = results.settings, results.provenance["packages"]
    new_tokens = settings["new_tokens"]
    head = ["program, mode", "attention", "precision", "call, s (min .. max)", "vs transformers"]
    head += ["after warm-up, s", "tokens/s"]
    rows = []
    for series in results.series:
        labels = series.labels
        attention = labels["decode_attention"] or labels["attention"]
        row = [f"{labels['program']}, {labels['mode']}", f"`{attention}`", labels["precision"]]
        if not series.samples:
            rows.append([*row, f"{series.status}: {series.reason}"])
            continue
        times = ""
        for other in results.series:
            same = all(other.labels[key] == labels[key] for key in ("mode", "precision"))
            if same and other.labels["program"] == "transformers" and other.samples:
                times = _times(ratio(series, [other], other.name))
        low, high = series.spread
        generation = statistics.median(series.facts.get("generation_s", series.samples))
        row += [f"{series.median:.3f} ({low:.3f} .. {high:.3f})", times]
        rows.append([*row, f"{generation:.3f}", f"{new_tokens / generation:.0f}"])
    title = (
        f"{settings['model']}, {settings['dtype']}, {settings['prompt_tokens']} + {new_tokens} "
        f"tokens, {where(results)}, transformers {packages['transformers']}; {_how(file, results)}"
    )
    return f"{title}:\n\n{_markdown(head, rows)}"


def _profile(file: str, results: Results) -> str:
    """What the profiler counted: a row per backend, a column per metric."""
    metrics = list(dict.fromkeys(series.labels["metric"] for series in results.series))
    names = dict.fromkeys(series.name for series in results.series)
    cells = {(s.name, s.labels["metric"]): s for s in results.series}
    throughputs = {what: of for what, of in THROUGHPUTS.items() if of[0] in metrics}
    rows = []
    for name in names:
        row = [f"`{name}`", *(_count(cells.get((name, metric))) for metric in metrics)]
        time = cells.get((name, "duration_us"))
        for metric, size in throughputs.values():
            amount = cells.get((name, metric))
            gbps = amount.median * size / time.median / 1e3 if amount and time else None
            row.append("" if gbps is None else f"{gbps:,.3g}")
        rows.append(row)
    title = f"{profiled_shape(results)}, {where(results)}; one profiled call each ({file})"
    head = ["backend", *(metric.replace("_", " ") for metric in metrics), *throughputs]
    return f"{title}:\n\n{_markdown(head, rows)}"


def _inspection(file: str, results: Results) -> str:
    """What the compiler and the source say of each version; blank where it cannot be counted."""
    cells = counts(results)
    head = ["backend", "registers", "spills, bytes", "shared memory, KiB", "warps/SM, occupancy"]
    head += ["shared loads", "shared stores", "sectors loaded", "sectors stored"]
    rows = []
    for name in dict.fromkeys(name for name, _ in cells):
        row = [f"`{name}`", *(f"{cells[name, n]:.0f}" for n in ("registers", "spill_bytes"))]
        row += [f"{cells[name, 'shared_bytes'] / 1024:.3g}"]
        row += [f"{cells[name, 'warps']:.0f}, {cells[name, 'occupancy_percent']:.0f} %"]
        for kind in KINDS if (name, "shared_load_requests") in cells else ():
            requests, conflicts, ways = (cells[name, f"shared_{kind}_{n}"] for n in SHARED)
            more = f" + {conflicts:,.0f} ({ways:.0f}-way)" if conflicts else ""
            row.append(f"{requests:,.0f}{more}")
        for kind in KINDS if (name, "shared_load_requests") in cells else ():
            sectors, fewest = (cells[name, f"global_{kind}_{n}"] for n in SECTORS)
            row.append(f"{sectors:,.0f}" + (f" ({fewest:,.0f} would do)" * (fewest < sectors)))
        rows.append(row)
    s = results.settings
    title = (
        f"{profiled_shape(results)}; nvcc {s['nvcc']} for sm_{s['arch']}, accesses counted in the "
        f"source ({file}). After a + are bank conflicts"
    )
    return f"{title}:\n\n{_markdown(head, rows)}{_untimed(results.series)}"


def counts(results: Results) -> dict[tuple[str, str], float]:
    """What was profiled or inspected, by backend and metric; nothing of what was refused."""
    return {(s.name, s.labels["metric"]): s.median for s in results.series if s.samples}


def profiled_shape(results: Results) -> str:
    """The one shape in which versions were profiled, or inspected."""
    s = results.settings
    kind = "full" if s["full"] else "causal"
    return f"B={s['batch']} H={s['heads']} N={s['seqlen']} head_dim={s['head_dim']}, {kind}"


def _case_study(file: str, results: Results) -> str:
    """Somebody else's published seconds: a row per implementation, a column per card."""
    cards = list(dict.fromkeys(series.labels["gpu"] for series in results.series))
    names = dict.fromkeys(series.name for series in results.series)
    cells = {(s.name, s.labels["gpu"]): s for s in results.series}
    rows = [
        [f"`{n}`", *(_median(cells.get((n, card)), "{:.1f} s") for card in cards)] for n in names
    ]
    title = f"{results.settings['note']} ({file})"
    return f"{title}:\n\n{_markdown(['backend', *cards], rows)}"


_TABLES: dict[str, Callable[[str, Results], str]] = {
    "generation": _generation_comparison,
    "kernel": _kernel_comparison,
    "generation-cpu": _beside_transformers,
    "generation-cuda": _beside_transformers,
    "profile": _profile,
    "inspection": _inspection,
    "case-study": _case_study,
}


def versions_table(family: str) -> str:
    """A ladder's versions, from their headers: what changed, the tile and what it takes.

    What all of them take alike is said once.
    """
    rows = []
    for name, version in ladder.versions(family).items():
        flags = f" (`{' '.join(version.flags)}`)" if version.flags else ""
        takes = f"{version.dtype}, head_dim {', '.join(map(str, version.head_dims))}"
        rows.append([f"`{name}`", _prose(version.title) + flags, _prose(version.tile), takes])
    head = ["backend", "change", "tile", "takes"]
    if len({takes for *_, takes in rows}) > 1:
        return _markdown(head, rows)
    return f"{_markdown(head[:-1], (row[:-1] for row in rows))}\nEach takes {rows[0][-1]}.\n"


def ladder_sections(family: str, measured: Sequence[Results]) -> str:
    """A section for each version of a ladder: its header's own words, then what was measured.

    measured: results of the kernel, of generation and of the profiler, as far as there are any. A
    version is compared with the one before it, or with the one that its header starts from:
    `Change: (from v01) ...`.
    """
    sections = []
    last: str | None = None
    names = {version.name: name for name, version in ladder.versions(family).items()}
    for name, version in ladder.versions(family).items():
        start = re.match(r"\(from (v\d+)\)", version.change)
        before = names.get(start[1]) if start else last
        title, change, *rest = map(
            _prose, (version.title, version.change, version.why, version.cost, version.expect)
        )
        words = [f"#### `{name}`: {_capital(title)}", _capital(change)]
        words += [
            f"*{word}:* {text}"
            for word, text in zip(("Why", "Cost", "Expected"), rest, strict=True)
        ]
        facts = [fact for r in measured for fact in _FACTS[_kind(r)](r, name, before)]
        words += [f"**Measured:** {'; '.join(facts)}."] if facts else []
        sections.append("\n\n".join(words))
        last = name
    return "\n\n".join(sections) + "\n"


def _prose(text: str) -> str:
    """A header's words with what Markdown would take for its own marked as code or escaped."""
    text = re.sub(r"__\w+__|\w+<[^>]*>", lambda name: f"`{name[0]}`", text)
    return text.replace("*", "\\*")


def _capital(text: str) -> str:
    return text if "_" in text.split(maxsplit=1)[0] else text[0].upper() + text[1:]


def _kind(results: Results) -> str:
    return str(results.settings.get("measures", results.task))


def _chosen(
    results: Results, name: str, key: str, choose: Callable[[Collection[int]], int]
) -> list[Series]:
    """The cell that a backend is told by: the first shape it was tried in, with the chosen length.

    All its series, the backend's own first.
    """
    for first in results.settings["cells"]:
        shape = {k: v for k, v in first.items() if k != key}
        group = [s for s in results.series if shape.items() <= s.labels.items()]
        values = {s.labels[key] for s in group if s.name == name}
        if values:
            at = choose(values)
            group = [s for s in group if s.labels[key] == at]
            return sorted(group, key=lambda series: series.name != name)
    return []


def _compared(group: Sequence[Series], before: str | None, what: str, verb: str, form: str) -> str:
    """A median with its spread, and how many times as fast as another version that is."""
    series = group[0]
    if not series.samples:
        return f"{what}: {series.status}, {series.reason}"
    middle, low, high = (form.format(value) for value in (series.median, *series.spread))
    text = f"{what} {verb} {middle} {series.unit} ({low} .. {high})"
    times = ratio(series, group[1:], before or "")
    if times is None:
        return text
    if math.isnan(times):
        return f"{text}, the same as `{before}` within the spread"
    return f"{text}, {times:.2f} times as fast as `{before}`"


def _kernel_facts(results: Results, name: str, before: str | None) -> list[str]:
    group = _chosen(results, name, "seqlen", detail_seqlen)
    if not group:
        return []
    what = f"the kernel alone at N={group[0].labels['seqlen']}"
    return [_compared(group, before, what, "takes", "{:.1f}")]


def _generation_facts(results: Results, name: str, before: str | None) -> list[str]:
    group = _chosen(results, name, "max_tokens", max)
    if not group:
        return []
    what = f"{group[0].labels['max_tokens']} tokens"
    text, share = _compared(group, before, what, "take", "{:.3f}"), attention_share(group[0], group)
    if share is None:
        return [text]
    part = "within the spread" if math.isnan(share) else f"{share:.0%} of that"
    return [f"{text}; attention is {part}"]


def _profile_facts(results: Results, name: str, before: str | None) -> list[str]:
    found = counts(results)

    def count(metric: str, form: str, words: str) -> list[str]:
        if (name, metric) not in found:
            return []
        text = f"{form.format(found[name, metric])} {words}"
        if before and (before, metric) in found:
            text += f" (`{before}`: {form.format(found[before, metric])})"
        return [text]

    return [
        *count("shared_load_bank_conflicts", "{:,.0f}", "bank conflicts on shared loads"),
        *count("shared_load_wavefronts", "{:,.0f}", "wavefronts of shared loads"),
        *count("registers_per_thread", "{:.0f}", "registers"),
        *count("warps_active_percent", "{:.0f} %", "of the warps that a GPU can hold are active"),
        *count("issue_active_percent", "{:.0f} %", "of the issue slots are used"),
    ]


def _inspection_facts(results: Results, name: str, before: str | None) -> list[str]:
    """All numbers of a first version; of another those that changed."""
    found = counts(results)
    names = {
        "registers": "registers",
        "spill_bytes": "bytes spilled",
        "shared_bytes": "bytes of shared memory",
        "warps": "resident warps",
        "shared_load_requests": "shared loads",
        "shared_load_conflicts": "bank conflicts on shared loads",
        "shared_store_requests": "shared stores",
        "shared_store_conflicts": "bank conflicts on shared stores",
        "global_load_sectors": "sectors loaded",
        "global_store_sectors": "sectors stored",
    }
    words = []
    for metric, what in names.items():
        now, then = found.get((name, metric)), found.get((before or "", metric))
        if now is not None and now != then:
            words.append(f"{what} {now:,.0f}" + (f" after {then:,.0f}" if then is not None else ""))
    if not any((name, metric) in found for metric in names):
        return []
    what = f"by inspection at N={results.settings['seqlen']}"
    return [f"{what}, {', '.join(words) or f'nothing differs from `{before}`'}"]


_FACTS: dict[str, Callable[[Results, str, str | None], list[str]]] = {
    "kernel": _kernel_facts,
    "generation": _generation_facts,
    "profile": _profile_facts,
    "inspection": _inspection_facts,
}


def _groups(results: Results, *keys: str) -> dict[Cell, list[Series]]:
    groups: dict[Cell, list[Series]] = {}
    for series in results.series:
        groups.setdefault(tuple(series.labels[key] for key in keys), []).append(series)
    return groups


def where(results: Results) -> str:
    """The machine and the torch of a results file."""
    facts = results.provenance
    gpu = facts["gpu"]
    machine = gpu["name"] if gpu else f"{facts['cpu']}, {facts['cpu_threads']} threads"
    return f"{machine}, torch {facts['packages']['torch']}"


def _how(file: str, results: Results) -> str:
    rounds = results.settings["rounds"]
    return f"medians of {rounds} interleaved rounds ({file})"


def _median(series: Series | None, form: str) -> str:
    if series is None:
        return ""
    return form.format(series.median) if series.samples else series.status


def _spread(series: Iterable[Series]) -> str:
    """The widest of several series."""
    return f"{max(spread_percent(s.samples) for s in series if s.samples):.1f} %"


def _quantiles(samples: Sequence[float]) -> str:
    """The fifths that the middle three lie between."""
    low, *_, high = statistics.quantiles(samples, n=5, method="inclusive")
    return f"{low:.1f} .. {high:.1f}"


def _times(value: float | None) -> str:
    return _figure(value, "{:.2g}" if value is not None and value < 0.1 else "{:.2f}")


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return WITHIN_SPREAD if math.isnan(value) else form.format(value)


def _count(series: Series | None) -> str:
    return "" if series is None or not series.samples else f"{series.median:,.4g}"


def _untimed(group: Iterable[Series]) -> str:
    """A line for each backend that has no time, with the reason, or whose text nobody compared."""
    notes = {s.name: f"{s.status}: {s.reason}" for s in group if not s.samples}
    for series in group:
        if series.facts.get("text_compared") is False and series.name != FREE_ATTENTION:
            notes[series.name] = "its text was compared with nothing: the baseline wrote none"
    return "".join(f"\n`{name}`: {note}\n" for name, note in notes.items())


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    note = ""
    for row in rows:
        cells = [*row, *[""] * (len(head) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
        if WITHIN_SPREAD in cells:
            note = f"\n`{WITHIN_SPREAD}`: no difference beyond the spread of the samples.\n"
    return "\n".join(lines) + f"\n{note}"
