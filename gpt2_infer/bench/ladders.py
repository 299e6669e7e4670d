"""The versions of a ladder in documents: their headers beside what was measured of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attention_kernels import ladder
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.results import (
    GenerationTiming,
    Inspection,
    KernelTiming,
    Profile,
    Results,
    ResultsError,
    Series,
)
from gpt2_infer.bench.tables import (
    AnySeries,
    attention_share,
    detail_seqlen,
    emit,
    group_by,
    markdown,
    newest_of,
    ratio,
)

PROFILED = {
    "shared_load_bank_conflicts": ("{:,.0f}", "bank conflicts on shared loads"),
    "shared_load_wavefronts": ("{:,.0f}", "wavefronts of shared loads"),
    "registers_per_thread": ("{:.0f}", "registers"),
    "warps_active_percent": ("{:.0f} %", "of the warps that a GPU can hold are active"),
    "issue_active_percent": ("{:.0f} %", "of the issue slots are used"),
}
INSPECTED = {
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


def show_versions(family: str) -> None:
    """Print the table of a ladder's versions, from their headers."""
    emit(versions_table(family))


def show_overview(family: str, kernel: str, generation: str) -> None:
    """Print a ladder's versions with the times of a task of kernels and one of generation."""
    alone, whole = newest_of(kernel)[1], newest_of(generation)[1]
    if not isinstance(alone, KernelTiming) or not isinstance(whole, GenerationTiming):
        raise ResultsError(f"{kernel} and {generation} are not timings of kernels and generation")
    emit(overview(family, alone, whole))


def show_sections(family: str, *tasks: str) -> None:
    """Print a section for each version of a ladder: its header, and what these tasks measured."""
    emit(sections(family, [newest_of(task)[1] for task in tasks]))


def versions_table(family: str) -> str:
    """Return a table of a ladder's versions: what each changed, its tile and what it takes.

    What all of them take alike is said once.
    """
    rows = []
    for name, version in ladder.versions(family).items():
        flags = f" (`{' '.join(version.flags)}`)" if version.flags else ""
        head_dims = ", ".join(map(str, version.head_dims))
        takes = f"{', '.join(version.dtypes)}, head_dim {head_dims}"
        rows.append([f"`{name}`", _prose(version.title) + flags, _prose(version.tile), takes])
    head = ["backend", "change", "tile", "takes"]
    if len({takes for *_, takes in rows}) > 1:
        return markdown(head, rows)
    return f"{markdown(head[:-1], [row[:-1] for row in rows])}\nEach takes {rows[0][-1]}.\n"


def overview(family: str, kernel: KernelTiming, generation: GenerationTiming) -> str:
    """Return a table of a ladder's timed versions: the change, the time alone and end to end."""
    rows, lengths = [], (0, 0)
    for name, version in ladder.versions(family).items():
        alone, whole = (
            _chosen(kernel.series, name, detail_seqlen),
            _chosen(generation.series, name, max),
        )
        if not (alone and alone[0].samples):
            continue
        # A version that is newer than the runs end to end has its first figure alone.
        measured = whole[0] if whole and whole[0].samples else None
        if measured is not None:
            lengths = alone[0].cell.seqlen, measured.cell.max_tokens
        times = f"{alone[0].median:.1f}", f"{measured.median:.3f}" if measured else ""
        rows.append([f"`{name}`", _prose(version.title), *times])
    seqlen, tokens = lengths
    head = ["backend", "change", f"alone, N={seqlen}, us", f"{tokens} tokens, s"]
    return markdown(head, rows)


def predecessors(versions: Mapping[str, VersionHeader]) -> dict[str, str | None]:
    """Return what each version is compared with: the one before it; None for the first.

    Or the one that its header starts from: `Change: (from v01) ...`.
    """
    names = {version.name: name for name, version in versions.items()}
    found: dict[str, str | None] = {}
    last: str | None = None
    for name, version in versions.items():
        start = re.match(r"\(from (v\d+)\)", version.change)
        found[name] = names.get(start[1]) if start else last
        last = name
    return found


def sections(family: str, measured: Sequence[Results]) -> str:
    """Return a section for each version of a ladder: its header's words, then what was measured.

    A version is compared with its predecessor.
    """
    texts = []
    versions = ladder.versions(family)
    for (name, version), before in zip(
        versions.items(), predecessors(versions).values(), strict=True
    ):
        title, change, *rest = map(
            _prose, (version.title, version.change, version.why, version.cost, version.expect)
        )
        words = [f"#### `{name}`: {_capital(title)}", _capital(change)]
        words += [
            f"*{word}:* {text}"
            for word, text in zip(("Why", "Cost", "Expected"), rest, strict=True)
        ]
        facts = [fact for one in measured for fact in _FACTS[type(one)](one, name, before)]
        words += [f"**Measured:** {'; '.join(facts)}."] if facts else []
        texts.append("\n\n".join(words))
    return "\n\n".join(texts) + "\n"


def _prose(text: str) -> str:
    """Mark as code, or escape, what Markdown would take for its own."""
    text = re.sub(r"__\w+__|\w+<[^>]*>", lambda name: f"`{name[0]}`", text)
    return text.replace("*", "\\*")


def _capital(text: str) -> str:
    return text if "_" in text.split(maxsplit=1)[0] else text[0].upper() + text[1:]


def _chosen(
    series: Sequence[AnySeries], name: str, choose: Callable[[Collection[int]], int]
) -> list[AnySeries]:
    """Return the series of the cell that stands for a backend, the backend's own first.

    It is in the first shape that the backend was tried in, at the chosen length.
    """
    for group in group_by(series, lambda one: one.cell.shape).values():
        lengths = {one.cell.length for one in group if one.name == name}
        if lengths:
            at = [one for one in group if one.cell.length == choose(lengths)]
            return sorted(at, key=lambda one: one.name != name)
    return []


def _compared(group: Sequence[Series], before: str | None, what: str, form: str) -> str:
    """Return a median with its spread, and how many times as fast as another version that is."""
    series = group[0]
    if not series.samples:
        return f"{what.rsplit(' ', 1)[0]}: {series.status}, {series.reason}"
    middle, low, high = (form.format(value) for value in (series.median, *series.spread))
    text = f"{what} {middle} {series.unit} ({low} .. {high})"
    times = ratio(series, group[1:], before or "")
    if times is None:
        return text
    if math.isnan(times):
        return f"{text}, the same as `{before}` within the spread"
    return f"{text}, {times:.2f} times as fast as `{before}`"


def _kernel_facts(results: KernelTiming, name: str, before: str | None) -> list[str]:
    group = _chosen(results.series, name, detail_seqlen)
    if not group:
        return []
    what = f"the kernel alone at N={group[0].cell.seqlen} takes"
    return [_compared(group, before, what, "{:.1f}")]


def _generation_facts(results: GenerationTiming, name: str, before: str | None) -> list[str]:
    group = _chosen(results.series, name, max)
    if not group:
        return []
    what = f"{group[0].cell.max_tokens} tokens take"
    text, share = _compared(group, before, what, "{:.3f}"), attention_share(group[0], group)
    if share is None:
        return [text]
    part = "within the spread" if math.isnan(share) else f"{share:.0%} of that"
    return [f"{text}; attention is {part}"]


def _profile_facts(results: Profile, name: str, before: str | None) -> list[str]:
    found = {one.name: one.metrics for one in results.versions}
    texts = []
    for metric, (form, words) in PROFILED.items():
        now, then = (found.get(one or "", {}).get(metric) for one in (name, before))
        if now is not None:
            texts.append(f"{form.format(now)} {words}")
            texts[-1] += f" (`{before}`: {form.format(then)})" if then is not None else ""
    return texts


def _inspection_facts(results: Inspection, name: str, before: str | None) -> list[str]:
    """Return every number of a first version; of another, those that changed."""
    found = {one.name: one.metrics for one in results.versions}
    mine, others = found.get(name, {}), found.get(before or "", {})
    if not any(metric in mine for metric in INSPECTED):
        return []
    words = []
    for metric, what in INSPECTED.items():
        now, then = mine.get(metric), others.get(metric)
        if now is not None and now != then:
            words.append(f"{what} {now:,.0f}" + (f" after {then:,.0f}" if then is not None else ""))
    what = f"by inspection at N={results.shape.seqlen}"
    return [f"{what}, {', '.join(words) or f'nothing differs from `{before}`'}"]


_FACTS: dict[type, Callable[[Any, str, str | None], list[str]]] = {
    KernelTiming: _kernel_facts,
    GenerationTiming: _generation_facts,
    Profile: _profile_facts,
    Inspection: _inspection_facts,
}
