"""A kernel's source with the memory accesses of each line, and the changes between versions."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from markupsafe import Markup, escape
from pygments.lexers.c_cpp import CppLexer
from pygments.token import Comment, Keyword, Literal

from attention_kernels.inspection.accesses import Access, Recording
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.show.figures import group_by
from gpt2_infer.bench.show.pivot import Table

COUNTERS = {
    "requests": "warps executing an access",
    "wavefronts": "deliveries of shared memory",
    "conflicts": "wavefronts lost to bank conflicts",
    "sectors": "of global memory, 32 bytes each",
}
_LEVELS = 8  # number of colours for hot lines
# HTML elements for kinds of token: their names are shorter than those of classes.
_TAGS = {
    Comment.Preproc: "em",
    Comment: "i",
    Keyword.Type: "",
    Keyword: "b",
    Literal.String: "samp",
}


@dataclass
class Line:
    """One line of the source and its accesses."""

    number: int
    text: str
    html: Markup
    accesses: list[Access] = field(default_factory=list)
    heat: dict[str, int] = field(default_factory=dict)
    """The line's count relative to the largest of any line, 0 to 8, by counter."""

    @cached_property
    def counts(self) -> dict[str, int]:
        """Sums over the line's accesses, by counter."""
        return {c: sum(getattr(a, c) for a in self.accesses) for c in COUNTERS}


@dataclass
class Kernel:
    """A version: its source and its counts, or why it could not be counted."""

    name: str
    version: VersionHeader
    head_dim: int
    recording: Recording | None
    refused: str = ""

    @property
    def slug(self) -> str:
        """The identifier in the page's URL fragments."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @cached_property
    def lines(self) -> list[Line]:
        """The source, with the accesses of each line."""
        text = self.version.source
        pairs = zip(text.split("\n"), _highlight(text), strict=True)
        found = [Line(number, plain, html) for number, (plain, html) in enumerate(pairs, 1)]
        for access in self.recording.accesses if self.recording else ():
            found[access.lines[0] - 1].accesses.append(access)
        for counter in COUNTERS:
            most = max(line.counts[counter] for line in found)
            for line in found:
                line.heat[counter] = -(-_LEVELS * line.counts[counter] // most) if most else 0
        while found and not found[-1].text:
            found.pop()
        return found

    @cached_property
    def body(self) -> list[Line]:
        """The source without the opening comment, which differs in every version."""
        return [*itertools.dropwhile(lambda line: line.text[:2] in ("", "//"), self.lines)]

    @cached_property
    def totals(self) -> dict[tuple[str, str], int]:
        """Sums over all accesses, by kind of access, such as "shared load", and counter."""
        accesses = self.recording.accesses if self.recording else []
        return {
            (f"{memory} {kind}", counter): sum(
                getattr(a, counter) for a in accesses if a.memory == memory and a.kind == kind
            )
            for memory in ("shared", "global")
            for kind in ("load", "store", "atomic")
            for counter in COUNTERS
        }


def _highlight(text: str) -> Iterator[Markup]:
    """Yield each line as HTML."""
    line = Markup()
    for kind, value in CppLexer(stripnl=False, ensurenl=False).get_tokens(text):
        tag = next((tag for of, tag in _TAGS.items() if kind in of), "")
        for i, part in enumerate(value.split("\n")):
            if i:
                yield _joined(line)
                line = Markup()
            marked = Markup("<{0}>{1}</{0}>").format(tag, part)
            line += marked if tag and part.strip() else escape(part)
    yield _joined(line)


def _joined(line: Markup) -> Markup:
    """Merge adjacent elements of the same kind."""
    return Markup(re.sub(r"</(\w+)>( *)<\1>", r"\2", line))


# ---- Two versions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hunk:
    """Lines of an older version and their replacement in a newer one."""

    places: tuple[str, str]
    """The lines of each: "61\u201364", "61", or "after 60" if it has no lines there."""
    changes: list[str]
    """Differences between the sums of the counters."""


@dataclass(frozen=True)
class VersionPair:
    """Two versions side by side."""

    old: Kernel
    new: Kernel

    @property
    def slug(self) -> str:
        """The identifier in the page's URL fragments."""
        return f"{self.old.slug}--{self.new.slug}"

    @property
    def totals(self) -> Table:
        """The counters of both versions."""
        rows = [
            (kind, counter, f"{before:,}", f"{after:,}", _difference(before, after))
            for (kind, counter), before in self.old.totals.items()
            for after in [self.new.totals[kind, counter]]
            if before or after
        ]
        head = ["access", "counter", self.old.version.name, self.new.version.name, "difference"]
        return Table("Memory traffic of the whole launch", head, rows)

    @property
    def hunks(self) -> Iterator[Hunk]:
        """The lines that differ, in the source or in a counter."""
        old, new = self.old.body, self.new.body
        for tag, a, b, c, d in _matcher(old, new).get_opcodes():
            if tag != "equal":
                yield _hunk(old, a, b, new, c, d)
                continue
            for i, j in zip(range(a, b), range(c, d), strict=True):
                if old[i].counts != new[j].counts:
                    yield _hunk(old, i, i + 1, new, j, j + 1)


def _matcher(old: list[Line], new: list[Line]) -> difflib.SequenceMatcher[str]:
    return difflib.SequenceMatcher(
        None, [line.text for line in old], [line.text for line in new], autojunk=False
    )


def _hunk(old: list[Line], a: int, b: int, new: list[Line], c: int, d: int) -> Hunk:
    sums = (
        (counter, *(sum(line.counts[counter] for line in of) for of in (old[a:b], new[c:d])))
        for counter in COUNTERS
    )
    changes = [f"{name} {one:,} \u2192 {other:,}" for name, one, other in sums if one != other]
    return Hunk((_place(old, a, b), _place(new, c, d)), changes)


def _place(lines: list[Line], first: int, end: int) -> str:
    number = lines[0].number + first
    if end == first:
        return f"after {number - 1}"
    return f"{number}\u2013{number + end - first - 1}" if end - first > 1 else f"{number}"


def _difference(before: int, after: int) -> str:
    return "0" if before == after else f"{after - before:+,}".replace("-", "\u2212")


# ---- One request ---------------------------------------------------------------------------------


def runs(offsets: Sequence[int | None]) -> list[tuple[int, int, int, int]]:
    """Return runs of lanes: first lane, last lane, first offset, step from lane to lane."""
    found: list[tuple[int, int, int, int]] = []
    for lane, offset in enumerate(offsets):
        if offset is None:
            continue
        if found:
            first, last, start, step = found[-1]
            now = offset - start - step * (last - first)
            if last == lane - 1 and (first == last or now == step):
                found[-1] = (first, lane, start, now)
                continue
        found.append((lane, lane, offset, 0))
    return found


def busy_banks(access: Access) -> set[tuple[int, int]]:
    """Return (lane, bank) pairs in conflict: lanes served together need different words."""
    group = 32 if access.bytes <= 4 else max(1, 128 // access.bytes)
    wanted = [
        (lane, (offset + byte) // 4)
        for lane, offset in enumerate(access.costliest.offsets)
        if offset is not None
        for byte in range(0, access.bytes, 4)
    ]
    found = set[tuple[int, int]]()
    for (_, bank), here in group_by(wanted, lambda one: (one[0] // group, one[1] % 32)).items():
        if len({word for _, word in here}) > 1:
            found |= {(lane, bank) for lane, _ in here}
    return found
