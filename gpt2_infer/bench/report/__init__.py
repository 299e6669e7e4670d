"""A page on kernels and results: one file that works from disk, with no network.

It needs the extra `report`: Jinja2, and Pygments for the colours of the source. Nothing on it
depends on when or where it is made, so the same input gives the same bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from tqdm import tqdm

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import Access, Turn, record
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.ladders import predecessors
from gpt2_infer.bench.report import source, svg
from gpt2_infer.bench.report.measured import Chart, File
from gpt2_infer.bench.report.predicted import prediction
from gpt2_infer.bench.report.source import Comparison, Kernel
from gpt2_infer.bench.results import KernelCell, Shape, read
from gpt2_infer.bench.tables import TIE, Table, are_numbers, group_by

__all__ = ["make_page"]


def make_page(
    versions: Mapping[str, VersionHeader],
    files: Sequence[Path],
    shape: Shape,
    *,
    gpu: str | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Return the page, as HTML, of versions by name and of results files.

    shape: what the versions are run with in the emulator. gpu: a name of predict.gpus(), to predict
    times for; None for no prediction. A version whose accesses cannot be counted is shown with the
    reason. Raises ResultsError, or BuildError where a version does not compile.
    """
    measured = [File(path, read(path)) for path in files]
    kernels = _record(versions, shape, timeout_s)
    predictions = _predict(versions, measured, shape, gpu) if gpu else {}
    by_version = {kernel.name: kernel for kernel in kernels}
    comparisons = [
        Comparison(by_version[before], by_version[name])
        for name, before in predecessors(versions).items()
        if before
    ]
    short = [kernel.version.name for kernel in kernels]
    text = {name: _text(f"page.{name}") for name in ("css", "js")}
    policy = "; ".join(
        f"{kind}-src 'sha256-{_digest(text[name])}'"
        for kind, name in (("style", "css"), ("script", "js"))
    )
    maps = _Maps()
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
        maps=maps,
        runs=source.runs,
        turns=_turns,
        tie=TIE,
        counts=_download(_counts(kernels, shape)),
        json_of=lambda file: _download(msgspec.json.encode(file.results)),
    )
    return page.replace("<!-- maps -->", maps.symbols())


def _record(versions: Mapping[str, VersionHeader], shape: Shape, timeout_s: float) -> list[Kernel]:
    def run(named: tuple[str, VersionHeader]) -> Kernel:
        name, version = named
        head_dims = version.head_dims
        try:
            recording = record(
                version,
                seqlen=shape.seqlen,
                head_dim=shape.head_dim if shape.head_dim in head_dims else head_dims[0],
                batch=shape.batch,
                num_heads=shape.heads,
                is_causal=not shape.full,
                timeout_s=timeout_s,
            )
        except UnsupportedError as error:
            return Kernel(name, version, None, "; ".join(error.reasons))
        return Kernel(name, version, recording)

    # The bar comes first, so that it stands above those of the runs.
    bar = tqdm(desc="counting accesses", total=len(versions), unit="", disable=None)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = []
        for kernel in pool.map(run, versions.items()):
            kernels.append(kernel)
            bar.update()
    return kernels


def _predict(
    versions: Mapping[str, VersionHeader], files: Sequence[File], shape: Shape, gpu: str
) -> dict[str, Chart | str]:
    """Predict each version in GPT-2's shape, at the length that stands for a kernel."""
    found = {}
    for name, version in tqdm(versions.items(), "predicting", unit="", disable=None):
        head_dim = shape.head_dim if shape.head_dim in version.head_dims else version.head_dims[0]
        dtype, is_causal = version.dtypes[0], not shape.full
        cell = KernelCell(1024, head_dim=head_dim, dtype=dtype, is_causal=is_causal)
        found[name] = prediction(name, version, gpu, cell, [file.results for file in files])
    return found


class _Maps:
    """The maps of requests: each drawing is on the page once, however often it is shown."""

    def __init__(self) -> None:
        self._drawn: dict[str, tuple[str, int, int]] = {}

    def __call__(self, access: Access) -> Markup:
        width, height, drawing = svg.lane_map(access)
        name, *_ = self._drawn.setdefault(drawing, (f"m{len(self._drawn)}", width, height))
        what = "bank" if access.memory == "shared" else "sector"
        label = f"lane by {what}, {access.memory} {'store' if access.is_store else 'load'}"
        return Markup(
            f'<svg role="img" width="{width}" height="{height}" aria-label="{escape(label)}">'
            f'<use href="#{name}"/></svg>'
        )

    def symbols(self) -> str:
        return "".join(
            f'<symbol id="{name}" viewBox="0 0 {width} {height}">{drawing}</symbol>'
            for drawing, (name, width, height) in self._drawn.items()
        )


def _turns(kernel: Kernel) -> Chart | None:
    """Chart the turns of the busiest block's warps."""
    found = kernel.recording.turns if kernel.recording else []
    if not found:
        return None
    title = (
        f"Block {kernel.recording.block}: its warps between barriers" if kernel.recording else ""
    )
    rows = []
    for barriers, mine in group_by(found, lambda turn: turn.barriers).items():
        warps = [turn.warp for turn in mine]
        by_warp = [sum(turn.accesses for turn in of) for of in group_by(mine, _warp_of).values()]
        order = f"{warps[0]} \u2026 {warps[-1]}" if len(warps) > 1 else f"{warps[0]}"
        rows.append(
            (f"{barriers}", order, f"{len(warps)}", f"{min(by_warp):,}", f"{max(by_warp):,}")
        )
    head = ["barriers before", "order of warps", "turns", "least accesses", "most accesses"]
    return Chart(title, svg.turns(found, title), Table(title, head, rows, {}))


def _warp_of(turn: Turn) -> int:
    return turn.warp


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
    return f"data:application/json;base64,{base64.b64encode(content).decode()}"


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
