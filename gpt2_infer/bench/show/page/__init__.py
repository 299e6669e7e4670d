"""The report on kernels: one HTML file that works from disk, without a network.

It needs the extra `report`: Jinja2, and Pygments for highlighting. The page does not depend on when
or where it is made, so the same input gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from attention_kernels.inspection.accesses import BY_LANE
from attention_kernels.judge.suite import Report
from gpt2_infer.bench.prediction import find_gpu
from gpt2_infer.bench.record import Row, Shape
from gpt2_infer.bench.show.page import lanes, source
from gpt2_infer.bench.show.page.source import Kernel


def render(
    kernels: Sequence[Kernel],
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
    environment.filters |= {"figure": "{:,}".format, "percent": _percent, "line_links": _line_links}
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
        counters=source.COUNTERS,
        lane_map=lanes.lane_map,
        by_lane=BY_LANE,
    )


SHOWN_FAILURES = 5


class Bar(NamedTuple):
    """One time of a prediction."""

    name: str
    note: str
    us: float
    kind: str
    """"need", "lost" or "predicted"."""


@dataclass(frozen=True)
class Bars:
    """A prediction and its parts."""

    title: str
    bars: list[Bar]

    @property
    def longest(self) -> float:
        """The longest time in microseconds."""
        return max(bar.us for bar in self.bars)


def bars(row: Row, gpu: str) -> Bars | str:
    """Return the parts of a prediction, or the reason against it."""
    if not row.samples:
        return row.reason
    found = row.extra
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
    return Bars(f"Predicted for {find_gpu(gpu).name}, microseconds, {row.kernel}", bars)


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _line_links(text: str, kernel: Kernel) -> Markup:
    """Return a text in which each line of the kernel's source is a link to it."""
    link = rf'<a href="#{kernel.slug}:\1">\g<0></a>'
    return Markup(kernel.place.sub(link, str(escape(text))))


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}\u00a0%"
