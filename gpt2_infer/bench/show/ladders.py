"""The versions of a ladder in documents: their headers and their measurements."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from attention_kernels import ladder
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show import figures
from gpt2_infer.bench.show.pivot import markdown

TIMED = {
    "kernel": ("the kernel alone at N={} takes", "{:.1f}"),
    "generation": ("{} tokens take", "{:.3f}"),
}


def _is_tensor(version: VersionHeader) -> bool:
    """Return whether tensor cores multiply; they have a precision class of their own."""
    return version.precisions.get("float32") != "ieee-fp32"


# The chapters of the float32 ladder. A reader meets each on a page of its own.
CHAPTERS: dict[str, Callable[[VersionHeader], bool]] = {
    "study": lambda version: version.number <= STUDY,
    "cuda-cores": lambda version: version.number > STUDY and not _is_tensor(version),
    "tensor-cores": _is_tensor,
}
STUDY = 12  # the case study's versions


def chapter(family: str, name: str) -> dict[str, VersionHeader]:
    """Return the versions of a ladder, or of one of its CHAPTERS; "" is all."""
    return {
        version: header
        for version, header in ladder.versions(family).items()
        if not name or CHAPTERS[name](header)
    }


def overview(family: str, kernels: Sequence[File], generation: File, shown: str = "") -> str:
    """Return a table of a ladder's versions: change, kernel times and end-to-end time.

    The kernel's times are those in the shape of the first of the kernel files, each from the first
    file that has it. The share of its roof is the one at the longest length. shown: a regular
    expression that the names of the shown versions contain.
    """
    rows = figures.main_rows(kernels[0])
    lengths = (figures.detail_length(rows), max(map(figures.length, rows)))
    timed: dict[tuple[str, int], tuple[Row, File]] = {}
    for file in kernels:
        for row in figures.main_rows(file):
            if row.samples and row.kernel.shape == rows[0].kernel.shape:
                timed.setdefault((row.contender, figures.length(row)), (row, file))

    def cells(name: str) -> Iterator[str]:
        share = None
        for at in lengths:
            row, file = timed.get((name, at), (None, kernels[0]))
            yield f"{row.median:.1f}" if row else ""
            share = figures.roof_share(row, file.provenance.limits) if row else None
        yield f"{share:.0%}" if share else ""
        whole = next(iter(_chosen(generation, name)), None)
        yield f"{whole.median:.3f}" if whole and whole.samples else ""

    table = [
        [f"`{name}`", _prose(version.title), *cells(name)]
        for name, version in ladder.versions(family).items()
        if re.search(shown, name)
    ]
    alone = (f"alone, N={lengths[0]}, us", f"N={lengths[1]}, us")
    seconds = f"{figures.detail_length(figures.main_rows(generation))} tokens, s"
    return markdown(["backend", "change", *alone, "of its roof", seconds], table)


def sections(family: str, measured: Sequence[File], part: str = "") -> str:
    """Return a section for each version of a ladder: its header, then the measurements.

    A version is compared with its predecessor. part: the chapter, by default all.
    """
    texts = []
    versions = ladder.versions(family)
    predecessors = ladder.predecessors(versions)
    for name, version in chapter(family, part).items():
        before = predecessors[name]
        change = _prose(version.change)
        facts: list[str] = []
        for files in figures.group_by(measured, lambda file: file.study["kind"]).values():
            # The first file with the version; preferably one with its predecessor, too.
            files.sort(key=lambda file: not _has(file, name, before))
            found = (_times(file, name, before) for file in files)
            facts += next(filter(None, found), [])
        texts.append(
            f"#### `{name}`: {_capital(_prose(version.title))}\n"
            + (f"From `{before}`: {change}" if version.start else _capital(change))
            + f" *Why:* {_prose(version.why)} *Cost:* {_prose(version.cost)}"
            + f" *Expected:* {_prose(version.expect)}"
            + f" *Tile:* {_prose(version.tile)}."
            + (f" **Measured:** {'; '.join(facts)}." if facts else "")
        )
    return "\n\n".join(texts) + "\n"


def changes(*titles: str) -> str:
    """Return a table of the lines of code that each version adds and removes.

    titles: of the columns, a family and perhaps one of its CHAPTERS. A version is compared with its
    predecessor, whose number is shown unless it is in the cell above.
    """
    columns = (_changes(*title.split()) for title in titles)
    return markdown(titles, [*itertools.zip_longest(*columns, fillvalue="")])


def _changes(family: str, part: str = "") -> Iterator[str]:
    versions, above = ladder.versions(family), None
    predecessors = ladder.predecessors(versions)
    for name, version in chapter(family, part).items():
        before = versions.get(predecessors[name] or "")
        old, new = _code(before) if before else [], _code(version)
        blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        other = f" ({before.number})" if before and before is not above else ""
        yield f"{version.number}{other} +{len(new) - same} -{len(old) - same}"
        above = version


def _code(version: VersionHeader) -> list[str]:
    """Return a version's lines without comments and blank lines, with single spaces."""
    text = re.sub("//.*", "", version.path.read_text("utf-8"))
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _has(file: File, *names: str | None) -> bool:
    return {*filter(None, names)} <= {row.contender for row in file.rows}


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
    for group in figures.group_by(figures.main_rows(file), figures.cell_name).values():
        if mine := [row for row in group if row.contender == name]:
            at = figures.detail_length(mine)
            found = [row for row in group if figures.length(row) == at]
            return sorted(found, key=lambda row: row.contender != name)
    return []


def _times(file: File, name: str, before: str | None) -> list[str]:
    """Return a median with its spread, the speedup over another version and attention's share."""
    if not (group := _chosen(file, name)):
        return []
    row = group[0]
    words, form = TIMED[file.study["kind"]]
    words = words.format(figures.length(row))
    if not row.samples:
        return [f"{words.rpartition(' ')[0]}: {row.status}, {row.reason}"]
    text = f"{words} {figures.with_spread(row, form, f' {row.unit}')}"
    speedup = figures.ratio(row, group[1:], before or "")
    if speedup is not None and math.isnan(speedup):
        text += f", the same as `{before}` within the spread"
    elif speedup is not None:
        text += f", {speedup:.2f} times as fast as `{before}`"
    share = figures.attention_share(row, group)
    if share is None:
        return [text]
    part = "within the spread" if math.isnan(share) else f"{share:.0%} of that"
    return [text, f"attention is {part}"]
