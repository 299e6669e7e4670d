"""The versions of a ladder in documents: their headers and their measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from attention_kernels import ladder
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show.figures import (
    attention_share,
    cell_name,
    detail_length,
    group_by,
    length,
    main_rows,
    ratio,
)
from gpt2_infer.bench.show.pivot import markdown

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


def versions_table(family: str) -> str:
    """Return a table of a ladder's versions: the change, the tile and the supported inputs.

    If all support the same inputs, a sentence says so once.
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


def overview(family: str, kernel: File, generation: File) -> str:
    """Return a table of a ladder's timed versions: change, kernel time and end-to-end time."""
    rows, lengths = [], (0, 0)
    for name, version in ladder.versions(family).items():
        alone, whole = _chosen(kernel, name), _chosen(generation, name)
        if not (alone and alone[0].samples):
            continue
        # A version newer than the end-to-end runs has only a kernel time.
        measured = whole[0] if whole and whole[0].samples else None
        if measured is not None:
            lengths = length(alone[0]), length(measured)
        times = f"{alone[0].median:.1f}", f"{measured.median:.3f}" if measured else ""
        rows.append([f"`{name}`", _prose(version.title), *times])
    seqlen, tokens = lengths
    head = ["backend", "change", f"alone, N={seqlen}, us", f"{tokens} tokens, s"]
    return markdown(head, rows)


def predecessors(versions: Mapping[str, VersionHeader]) -> dict[str, str | None]:
    """Return the version that each is compared with; None for the first.

    This is the version before it, or the one that its header names: `From: v12`.
    """
    names = {version.name: name for name, version in versions.items()}
    found: dict[str, str | None] = {}
    last: str | None = None
    for name, version in versions.items():
        found[name] = names.get(version.start) if version.start else last
        last = name
    return found


def sections(family: str, measured: Sequence[File]) -> str:
    """Return a section for each version of a ladder: its header, then the measurements.

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
        change = f"From `{before}`: {change}" if version.start else _capital(change)
        words = [f"#### `{name}`: {_capital(title)}", change]
        words += [
            f"*{word}:* {text}"
            for word, text in zip(("Why", "Cost", "Expected"), rest, strict=True)
        ]
        facts = [fact for one in measured for fact in _FACTS[one.study["kind"]](one, name, before)]
        words += [f"**Measured:** {'; '.join(facts)}."] if facts else []
        texts.append("\n\n".join(words))
    return "\n\n".join(texts) + "\n"


def _prose(text: str) -> str:
    """Mark identifiers as code and escape Markdown's special characters."""
    text = re.sub(r"__\w+__|\w+<[^>]*>", lambda name: f"`{name[0]}`", text)
    return text.replace("*", "\\*")


def _capital(text: str) -> str:
    return text if "_" in text.split(maxsplit=1)[0] else text[0].upper() + text[1:]


def _chosen(file: File, name: str) -> list[Row]:
    """Return the rows of a backend's representative cell, the backend's own row first.

    The cell has the first shape the backend was measured in, and detail_length().
    """
    for group in group_by(main_rows(file), cell_name).values():
        if mine := [row for row in group if row.contender == name]:
            at = detail_length(mine)
            found = [row for row in group if length(row) == at]
            return sorted(found, key=lambda row: row.contender != name)
    return []


def _compared(group: Sequence[Row], before: str | None, what: str, form: str) -> str:
    """Return a median with its spread, and the speedup over another version."""
    row = group[0]
    if not row.samples:
        return f"{what.rsplit(' ', 1)[0]}: {row.status}, {row.reason}"
    middle, low, high = (form.format(value) for value in (row.median, *row.spread))
    text = f"{what} {middle} {row.unit} ({low} .. {high})"
    times = ratio(row, group[1:], before or "")
    if times is None:
        return text
    if math.isnan(times):
        return f"{text}, the same as `{before}` within the spread"
    return f"{text}, {times:.2f} times as fast as `{before}`"


def _kernel_facts(file: File, name: str, before: str | None) -> list[str]:
    if not (group := _chosen(file, name)):
        return []
    what = f"the kernel alone at N={length(group[0])} takes"
    return [_compared(group, before, what, "{:.1f}")]


def _generation_facts(file: File, name: str, before: str | None) -> list[str]:
    if not (group := _chosen(file, name)):
        return []
    what = f"{length(group[0])} tokens take"
    text, share = _compared(group, before, what, "{:.3f}"), attention_share(group[0], group)
    if share is None:
        return [text]
    part = "within the spread" if math.isnan(share) else f"{share:.0%} of that"
    return [f"{text}; attention is {part}"]


def _counts(file: File, name: str | None) -> dict[str, float]:
    mine = (row for row in file.rows if row.contender == name and row.samples)
    return {row.metric: row.samples[0] for row in mine}


def _profile_facts(file: File, name: str, before: str | None) -> list[str]:
    texts = []
    for metric, (form, words) in PROFILED.items():
        now, then = (_counts(file, one).get(metric) for one in (name, before))
        if now is not None:
            texts.append(f"{form.format(now)} {words}")
            texts[-1] += f" (`{before}`: {form.format(then)})" if then is not None else ""
    return texts


def _inspection_facts(file: File, name: str, before: str | None) -> list[str]:
    """Return all figures of a first version, and of another those that changed."""
    mine, others = _counts(file, name), _counts(file, before)
    if not any(metric in mine for metric in INSPECTED):
        return []
    words = []
    for metric, what in INSPECTED.items():
        now, then = mine.get(metric), others.get(metric)
        if now is not None and now != then:
            words.append(f"{what} {now:,.0f}" + (f" after {then:,.0f}" if then is not None else ""))
    what = f"by inspection at N={length(file.rows[0])}"
    return [f"{what}, {', '.join(words) or f'nothing differs from `{before}`'}"]


_FACTS: dict[str, Callable[[File, str, str | None], list[str]]] = {
    "kernel": _kernel_facts,
    "generation": _generation_facts,
    "profile": _profile_facts,
    "inspection": _inspection_facts,
}
