"""A page on kernels and results: one file that works from disk, with no network.

It needs the extra `report`: Jinja2, and Pygments for the colours of the source. Nothing on it
depends on when or where it is made, so the same input gives the same bytes. Each line of source and
each map is on it once: the script puts two versions side by side from their line numbers.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from tqdm import tqdm

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import Access, Recording, record
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.ladders import predecessors
from gpt2_infer.bench.prediction import find_gpu
from gpt2_infer.bench.report import source, svg
from gpt2_infer.bench.report.measured import Bars, Chart, File
from gpt2_infer.bench.report.predicted import prediction
from gpt2_infer.bench.report.source import Comparison, Kernel
from gpt2_infer.bench.results import Shape, read
from gpt2_infer.bench.tables import TIE, Table, are_numbers, group_by

__all__ = ["make_page"]


def make_page(
    versions: Mapping[str, VersionHeader],
    files: Sequence[Path],
    shape: Shape,
    *,
    gpu: str | None = None,
    predict: Collection[str] = (),
    timeout_s: float = 600.0,
) -> str:
    """Return the page, as HTML, of versions by name and of results files.

    shape: what the versions are run with in the emulator. gpu: a name of predict.gpus(), to show
    predicted times for; None for no prediction. predict: the versions to predict where the results
    have no prediction of them. A version whose accesses cannot be counted is shown with the reason.
    Raises ResultsError, RequestError, or BuildError where a version does not compile.
    """
    if gpu:
        find_gpu(gpu)  # or refuse it, before minutes of counting
    measured = [File(path, read(path)) for path in files]
    kernels = _record(versions, shape, timeout_s)
    predictions: dict[str, Bars | str] = {}
    if gpu:
        results = [file.results for file in measured]
        for kernel in tqdm(kernels, "predicting", unit="", disable=None):
            found = prediction(kernel, gpu, shape.full, results, kernel.name in predict)
            predictions[kernel.name] = found
    by_version = {kernel.name: kernel for kernel in kernels}
    comparisons = [
        Comparison(by_version[before], by_version[name])
        for name, before in predecessors(versions).items()
        if before
    ]
    for step in comparisons:
        if kernels.index(step.old) < kernels.index(step.new):
            step.new.old = step.old
    short = [kernel.version.name for kernel in kernels]
    text = {name: _text(f"page.{name}") for name in ("css", "js")}
    policy = "; ".join(
        f"{kind}-src 'sha256-{_digest(text[name])}'"
        for kind, name in (("style", "css"), ("script", "js"))
    )
    drawings = _Names("m")
    environment = Environment(
        loader=PackageLoader(__name__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "right": _is_right, "figure": lambda n: f"{n:,}"}
    page = environment.get_template("page.html").render(
        policy=f"default-src 'none'; {policy}; base-uri 'none'; form-action 'none'",
        css=Markup(text["css"]),
        js=Markup(text["js"]),
        shape=shape,
        kernels=kernels,
        predictions=predictions,
        labels={
            k.name: k.name if short.count(k.version.name) > 1 else k.version.name for k in kernels
        },
        comparisons=comparisons,
        files=measured,
        counters=source.COUNTERS,
        map_of=functools.partial(_map, drawings),
        once=_Names("f"),
        runs=source.runs,
        turns=_turns,
        tie=TIE,
        counts=_download(_counts(kernels, shape)),
        json_of=lambda file: _download(msgspec.json.encode(file.results)),
    )
    once = {"lanes": svg.lanes()} | {name: drawing for drawing, name in drawings.items()}
    groups = "".join(f'<g id="{name}">{drawing}</g>' for name, drawing in once.items())
    return page.replace("<!-- maps -->", groups)


def _record(versions: Mapping[str, VersionHeader], shape: Shape, timeout_s: float) -> list[Kernel]:
    def run(named: tuple[str, VersionHeader]) -> Kernel:
        name, version = named
        head_dims = version.head_dims
        head_dim = shape.head_dim if shape.head_dim in head_dims else head_dims[0]
        try:
            recording = record(
                version,
                seqlen=shape.seqlen,
                head_dim=head_dim,
                batch=shape.batch,
                num_heads=shape.heads,
                is_causal=not shape.full,
                timeout_s=timeout_s,
            )
        except UnsupportedError as error:
            return Kernel(name, version, head_dim, None, "; ".join(error.reasons))
        return Kernel(name, version, head_dim, recording)

    # The bar comes first, so that it stands above those of the runs.
    bar = tqdm(desc="counting accesses", total=len(versions), unit="", disable=None)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = []
        for kernel in pool.map(run, versions.items()):
            kernels.append(kernel)
            bar.update()
    return kernels


class _Names(dict[str, str]):
    """Names of what is on the page once, however often it is shown."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self._letter = letter

    def __call__(self, content: str) -> tuple[str, bool]:
        """Return the name of a content, and whether it is new."""
        new = f"{self._letter}{len(self)}"
        name = self.setdefault(content, new)
        return name, name == new


def _map(drawings: _Names, access: Access) -> Markup:
    width, drawing = svg.lane_map(access)
    name, _ = drawings(drawing)
    return Markup(f'<svg class="map" width="{width}"><use href="#{name}"/></svg>')


def _turns(found: Recording) -> Chart:
    """Chart the turns of the busiest block's warps."""
    title = f"Block {found.block}: its warps between barriers"
    rows = []
    for barriers, mine in group_by(found.turns, lambda turn: turn.barriers).items():
        warps = [turn.warp for turn in mine]
        by_warp = Counter[int]()
        for turn in mine:
            by_warp[turn.warp] += turn.accesses
        order = f"{warps[0]} \u2026 {warps[-1]}" if len(warps) > 1 else f"{warps[0]}"
        least, most = min(by_warp.values()), max(by_warp.values())
        rows.append((f"{barriers}", order, f"{len(warps)}", f"{least:,}", f"{most:,}"))
    head = ["barriers before", "order of warps", "turns", "least accesses", "most accesses"]
    return Chart(title, svg.turns(found.turns, title), Table(title, head, rows, {}))


def _counts(kernels: Sequence[Kernel], shape: Shape) -> bytes:
    """Return what was counted, as JSON."""
    found = {
        kernel.name: {
            "source_digest": hashlib.sha256(kernel.version.path.read_bytes()).hexdigest(),
            "refused": kernel.refused,
            "accesses": [_count(a) for a in kernel.recording.accesses] if kernel.recording else [],
        }
        for kernel in kernels
    }
    return msgspec.json.encode({"shape": shape, "kernels": found})


def _count(access: Access) -> dict[str, Any]:
    """Return an access with the offsets as runs: first lane, last lane, offset, step."""
    found = dataclasses.asdict(access)
    found["costliest"]["offsets"] = source.runs(access.costliest.offsets)
    return found


def _download(content: bytes) -> str:
    packed = gzip.compress(content, mtime=0)
    return f"data:application/gzip;base64,{base64.b64encode(packed).decode()}"


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _code(text: str) -> Markup:
    """Return HTML of a text in which backquotes mark code."""
    return Markup("").join(_spans(text))


def _spans(text: str) -> Iterator[Markup]:
    for i, part in enumerate(re.split(r"`([^`]*)`", text)):
        yield Markup("<code>{}</code>").format(part) if i % 2 else escape(part)


def _is_right(table: Table, column: int) -> bool:
    return are_numbers(row[column].lstrip("+\u2212") for row in table.rows)
