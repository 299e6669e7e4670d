"""A kernel's source with the memory accesses and the stalls of each line."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from markupsafe import Markup, escape
from pygments.lexers.c_cpp import CppLexer
from pygments.token import Comment, Keyword, Literal

from attention_kernels.inspection.accesses import Access
from attention_kernels.inspection.sass.explain import StalledLine, Stalls
from attention_kernels.inspection.sass.predict import Prediction
from attention_kernels.judge.suite import Failure, Report
from attention_kernels.ladder.header import VersionHeader

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
    """One line of the source, its accesses and its stalls."""

    number: int
    text: str
    html: Markup
    accesses: list[Access] = field(default_factory=list)
    heat: dict[str, int] = field(default_factory=dict)
    """The line's figure relative to the largest of any line, 0 to 8, by column."""
    stalls: StalledLine | None = None
    fault: str = ""
    """The first thing that the judge found wrong there."""

    @cached_property
    def counts(self) -> dict[str, int]:
        """Sums over the line's accesses, by counter."""
        return {c: sum(getattr(a, c) for a in self.accesses) for c in COUNTERS}


@dataclass
class Kernel:
    """A version: its source, its counts, prediction and verdict, or why it has none of them."""

    name: str
    version: VersionHeader
    recording: list[Access] | str
    prediction: Prediction | str | None = None
    verdict: Report | str | None = None

    @property
    def stalls(self) -> Stalls | None:
        """Why its warps stall, if that is predicted."""
        return self.prediction.stalls if isinstance(self.prediction, Prediction) else None

    @property
    def slug(self) -> str:
        """The identifier in the page's URL fragments."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @cached_property
    def failures(self) -> list[Failure]:
        """The judge's failures, one per reason; those that name a line, such as a race, first."""
        by_reason: dict[str, Failure] = {}
        for failure in self.verdict.failures if isinstance(self.verdict, Report) else ():
            by_reason.setdefault(failure.why, failure)
        return sorted(by_reason.values(), key=lambda one: not self.place.search(one.why))

    @property
    def place(self) -> re.Pattern[str]:
        """The pattern by which a message names a line of the source."""
        return re.compile(rf"\b{re.escape(self.version.listing.name)}:(\d+)")

    @cached_property
    def lines(self) -> list[Line]:
        """The source, with the accesses and the stalls of each line."""
        text = self.version.source
        pairs = zip(text.split("\n"), _highlight(text), strict=True)
        found = [Line(number, plain, html) for number, (plain, html) in enumerate(pairs, 1)]
        for access in self.recording if isinstance(self.recording, list) else ():
            found[access.lines[0] - 1].accesses.append(access)
        for counter in COUNTERS:
            _heat(found, counter, [line.counts[counter] for line in found])
        for one in self.stalls.lines if self.stalls else ():
            if 0 < one.line <= len(found):
                found[one.line - 1].stalls = one
        for failure in self.failures:
            for number in {int(at[1]) for at in self.place.finditer(failure.why)}:
                # Several cases may fail at a line; a kernel's own message may name any number.
                if 0 < number <= len(found) and not found[number - 1].fault:
                    found[number - 1].fault = failure.why
        _heat(found, "stalls", [line.stalls.share if line.stalls else 0.0 for line in found])
        while found and not found[-1].text:
            found.pop()
        return found

    @cached_property
    def body(self) -> list[Line]:
        """The source without the opening comment, which differs in every version."""
        return [*itertools.dropwhile(lambda line: line.text[:2] in ("", "//"), self.lines)]

    def stall_us(self, line: Line) -> float:
        """Return the part of the predicted time that warps stall at a line."""
        return round(self.stalls.us(line.stalls.share), 3) if self.stalls and line.stalls else 0.0


def _heat(lines: Sequence[Line], column: str, values: Sequence[float]) -> None:
    most = max(values)
    for line, value in zip(lines, values, strict=True):
        line.heat[column] = math.ceil(_LEVELS * value / most) if most else 0


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
