"""The report on kernels and results: one HTML file that works from disk, without a network.

It needs the extra `report`: Jinja2, and Pygments for highlighting. The page does not depend on when
or where it is made, so the same input gives the same bytes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from attention_kernels.errors import describe
from attention_kernels.inspection.accesses import BY_LANE
from attention_kernels.judge.suite import Report
from gpt2_infer.bench.prediction import find_gpu, timed_on
from gpt2_infer.bench.record import File, ResultsError, Row, Shape, read, timings_of
from gpt2_infer.bench.show import charts
from gpt2_infer.bench.show.figures import TIE, beneath, main_rows
from gpt2_infer.bench.show.page import lanes, source
from gpt2_infer.bench.show.page.source import Kernel
from gpt2_infer.bench.show.pivot import Table, are_numbers
from gpt2_infer.bench.show.tables import tables


def render(
    kernels: Sequence[Kernel],
    files: Sequence[Measured],
    shape: Shape,
    *,
    predictions: Mapping[str, Bars | str],
    verdicts: Mapping[str, Report | str],
) -> str:
    """Return the HTML page; predictions and verdicts, or the reasons against them, by version."""
    short = [kernel.version.name for kernel in kernels]
    labels = {
        k.name: k.name if short.count(k.version.name) > 1 else k.version.name for k in kernels
    }
    text = {name: _text(f"page.{name}") for name in ("css", "js")}
    environment = Environment(
        loader=PackageLoader(__name__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "code": _code,
        "right": _is_right,
        "figure": "{:,}".format,
        "percent": _percent,
        "line_links": _line_links,
    }
    return environment.get_template("page.html").render(
        policy="default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(text['css'])}'; script-src '{_digest(text['js'])}'",
        css=Markup(text["css"]),
        js=Markup(text["js"]),
        shape=shape,
        kernels=kernels,
        predictions=predictions,
        labels=labels,
        verdicts=verdicts,
        most_failures=SHOWN_FAILURES,
        files=files,
        counters=source.COUNTERS,
        lane_map=lanes.lane_map,
        by_lane=BY_LANE,
        runs=source.runs,
        tie=TIE,
    )


SHOWN_FAILURES = 5


class Bar(NamedTuple):
    """One time of a prediction."""

    name: str
    note: str
    us: float
    kind: str
    """"need", "lost", "predicted" or "measured"."""


@dataclass(frozen=True)
class Bars:
    """A prediction, its parts, and the measurements of the same version file."""

    title: str
    bars: list[Bar]

    @property
    def longest(self) -> float:
        """The longest time in microseconds."""
        return max(bar.us for bar in self.bars)


@dataclass(frozen=True)
class Picture:
    """A chart, drawn as in the documents."""

    title: str
    svg: bytes

    @property
    def url(self) -> str:
        """The chart as a data URL: as an image it shares no ids or styles with the page."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class Measured:
    """A results file on the page."""

    path: Path
    file: File

    @property
    def slug(self) -> str:
        """The identifier in the page's URL fragments."""
        return re.sub(r"[^a-z0-9]+", "-", self.path.stem.lower())

    @functools.cached_property
    def tables(self) -> list[Table]:
        """The same tables as in the documents."""
        return tables(self.path.name, self.file)

    @functools.cached_property
    def pictures(self) -> list[Picture]:
        """The charts of the file."""
        drawn = charts.render(self.file).items()
        return [Picture(f"{self.file.task}, {name}", svg) for name, svg in drawn]

    @property
    def warnings(self) -> Iterator[str]:
        """Warnings about samples that are faster than the GPU can be."""
        for row in main_rows(self.file) if self.file.study["kind"] == "kernel" else ():
            count, floor = beneath(row, self.file.provenance.limits) or (0, 0.0)
            if count:
                yield (
                    f"\u2691 {row.contender}, N={row.cell['seqlen']}: {count} of "
                    f"{len(row.samples)} samples are below {floor:.2f} us, the minimum at the "
                    "copy bandwidth and arithmetic rate of that run."
                )

    @property
    def provenance(self) -> Iterator[tuple[str, str]]:
        """The provenance of the results, as labels and texts."""
        for name, value in msgspec.to_builtins(self.file.provenance).items():
            if value is not None:
                yield name.replace("_", " "), _words(value)


def measured(path: Path) -> Measured:
    """Read and draw a file before minutes of counting.

    Raises ResultsError, also if it lacks what other files of its kind have.
    """
    found = Measured(path, read(path))
    try:
        _ = found.tables, found.pictures, [*found.warnings]
    except Exception as error:
        kind, reason = found.file.study["kind"], describe(error)
        raise ResultsError(f"{path} is not as studies of kind {kind} are: {reason}") from error
    return found


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def bars(row: Row, gpu: str, files: Sequence[File]) -> Bars | str:
    """Return the parts of a prediction, or the reason against it."""
    if not row.samples:
        return row.reason
    card, found = find_gpu(gpu), row.extra
    notes = {"load-store unit": "shared memory, L1 and shuffles together"}
    needs = sorted(found["needs_us"].items(), key=lambda need: -need[1])
    bars = [Bar(name, notes.get(name, ""), us, "need") for name, us in needs if us >= 0.05]
    bars += [
        Bar(name, note, found[key], "lost")
        for name, note, key in (
            ("latency", "warps wait for results, barriers and each other", "waiting_us"),
            ("uneven blocks", "multiprocessors without work", "uneven_us"),
            ("launch", "", "launch_us"),
        )
        if found.get(key)
    ]
    bars.append(Bar("predicted", f"bound by {found['bound']}", row.median, "predicted"))
    for file in timed_on(card, files):
        for one in timings_of(row, main_rows(file)):
            note = f"{file.task}; predicted {row.median / one.median:.2f} times"
            bars.append(Bar("measured", note, one.median, "measured"))
    return Bars(f"Predicted for {card.name}, microseconds, {row.kernel}", bars)


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _code(text: str) -> Markup:
    """Convert a text with code in backquotes to HTML."""
    return Markup("").join(_spans(text))


def _spans(text: str) -> Iterator[Markup]:
    for i, part in enumerate(re.split(r"`([^`]*)`", text)):
        yield Markup("<code>{}</code>").format(part) if i % 2 else escape(part)


def _line_links(text: str, kernel: Kernel) -> Markup:
    """Return a text in which each line of the kernel's source is a link to it."""
    link = rf'<a href="#{kernel.slug}:\1">\g<0></a>'
    return Markup(kernel.place.sub(link, str(escape(text))))


def _percent(share: float, digits: int = 1) -> str:
    rounded = round(100 * share, digits) + 0.0  # not -0
    return f"{rounded:.{digits}f}\u00a0%"


def _is_right(table: Table, column: int) -> bool:
    return are_numbers(row[column].lstrip("+\u2212") for row in table.rows)
