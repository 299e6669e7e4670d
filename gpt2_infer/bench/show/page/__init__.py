"""The report on kernels: one HTML file that works from disk, without a network.

It needs the extra `report`: Jinja2, and Pygments for highlighting. The page does not depend on when
or where it is made, so the same input gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from attention_kernels.inspection.accesses import BY_LANE
from attention_kernels.inspection.sass.predict import Prediction
from gpt2_infer.bench.record import Shape
from gpt2_infer.bench.show.page import lanes, source
from gpt2_infer.bench.show.page.source import Kernel


def render(kernels: Sequence[Kernel], shape: Shape) -> str:
    """Return the HTML page on kernels that were counted at a shape."""
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
        bars_of=bars,
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


def bars(found: Prediction) -> list[Bar]:
    """Return the parts of a prediction, the needs first, and the predicted time."""
    notes = {
        "load-store unit": "shared memory, L1 and shuffles together",
        "latency": "warps wait for results, barriers and each other",
        "uneven blocks": "multiprocessors without work",
    }
    parts = sorted(found.parts.items(), key=lambda part: (part[0] not in found.needs_us, -part[1]))
    shown = [
        Bar(name, notes.get(name, ""), us, "need" if name in found.needs_us else "lost")
        for name, us in parts
        if us >= 0.05
    ]
    return [*shown, Bar("predicted", f"bound by {found.bound}", found.time_us, "predicted")]


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
