"""The report on kernels and results: one HTML file that works from disk, without a network.

It needs the extra `report`: Jinja2, and Pygments for highlighting. The page does not depend on when
or where it is made, so the same input gives the same bytes. Each line of source and each map is
stored once; the script puts two versions side by side from their line numbers.
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
from dataclasses import dataclass
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
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import find_gpu, predict_version, timed_on
from gpt2_infer.bench.record import File, KernelCell, Shape, read
from gpt2_infer.bench.show import charts
from gpt2_infer.bench.show.figures import TIE, beneath, group_by, main_rows
from gpt2_infer.bench.show.ladders import predecessors
from gpt2_infer.bench.show.page import lanes, source
from gpt2_infer.bench.show.page.source import Comparison, Kernel
from gpt2_infer.bench.show.pivot import Table, are_numbers
from gpt2_infer.bench.show.tables import is_of, tables

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
    """Return the HTML page on versions, by name, and results files.

    shape: the shape to run the versions with in the emulator. gpu: the GPU to show predicted times
    for, a name in gpus(); None for no predictions. predict: the versions to predict if the
    results have no prediction of them. If a version's accesses cannot be counted, the reason is
    shown. Raises ResultsError, RequestError, or BuildError if a version does not compile.
    """
    if gpu:
        find_gpu(gpu)  # fail on an unknown name before minutes of counting
    measured = [Measured(path, read(path)) for path in files]
    kernels = _record(versions, shape, timeout_s)
    predictions: dict[str, Picture | str] = {}
    if gpu:
        results = [one.file for one in measured]
        for kernel in tqdm(kernels, "predicting", unit="", disable=None):
            found = _prediction(kernel, gpu, shape, results, makes=kernel.name in predict)
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
        policy=f"default-src 'none'; img-src data:; {policy}; base-uri 'none'; form-action 'none'",
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
        json_of=lambda one: _download(msgspec.json.encode(one.file)),
    )
    once = {"lanes": lanes.lanes()} | {name: drawing for drawing, name in drawings.items()}
    groups = "".join(f'<g id="{name}">{drawing}</g>' for name, drawing in once.items())
    return page.replace("<!-- maps -->", groups)


@dataclass(frozen=True)
class Picture:
    """A chart as in the documents."""

    title: str
    svg: bytes
    words: Sequence[str] = ()
    """Further remarks, one sentence each."""

    @property
    def drawing(self) -> Markup:
        """The chart as a self-contained image, apart from the page's ids and styles."""
        content = base64.b64encode(self.svg).decode()
        source = f"data:image/svg+xml;base64,{content}"
        return Markup('<img class="chart" alt="{}" src="{}">').format(self.title, source)


@dataclass(frozen=True)
class Drawing:
    """A drawing in the page's own colours, and its data as a table."""

    title: str
    drawing: Markup
    table: Table
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Measured:
    """A results file on the page."""

    path: Path
    file: File

    @property
    def slug(self) -> str:
        """The identifier in the page's URL fragments."""
        return re.sub(r"[^a-z0-9]+", "-", self.path.stem.lower())

    @property
    def tables(self) -> list[Table]:
        """The same tables as in the documents."""
        return tables(self.path.name, self.file)

    @property
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
                    f"{len(row.samples)} samples are beneath {floor:.2f} us, which copy and roofs "
                    "allow."
                )

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """The provenance of the results, as labels and texts."""
        found = self.file.provenance
        facts = {
            "date": found.date,
            "command": found.command,
            "commit": found.commit or "unknown",
            "source digest": found.source_digest,
            "machine": found.machine,
            "driver": found.gpu.driver_version if found.gpu else None,
            "CUDA": found.gpu.cuda if found.gpu else None,
            "Python": found.python,
            "packages": _listed(found.packages),
            "precision": _listed(found.precision),
            "limits": _listed({name: f"{value:g}" for name, value in found.limits.items()}),
        }
        return [(name, text) for name, text in facts.items() if text]


def _listed(found: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _prediction(
    kernel: Kernel, gpu: str, shape: Shape, files: Sequence[File], *, makes: bool
) -> Picture | str:
    """Chart a version's prediction for 12 heads and 1,024 tokens.

    Returns the reason instead if there is no prediction. makes: whether to predict if the files
    have no prediction.
    """
    card, version = find_gpu(gpu), kernel.version
    cell = KernelCell(
        1024, head_dim=kernel.head_dim, dtype=version.dtypes[0], is_causal=shape.is_causal
    )
    digest = environment.version_digest(version.path.read_text("utf-8"))
    found = [
        row
        for file in files
        if file.study["kind"] == "prediction" and file.study["gpu"] == card.name
        for row in file.rows
        if (row.contender, row.kernel, row.extra["version_digest"]) == (kernel.name, cell, digest)
    ]
    if not found and not makes:
        return "no prediction committed"
    found = found or predict_version(kernel.name, version, [cell], gpu=gpu)
    if not found[-1].samples:
        return found[-1].reason
    measured = [
        (file.task, row)
        for file in timed_on(card, files)
        for row in main_rows(file)
        if row.samples and is_of(found[-1], row)
    ]
    title = f"Predicted for {card.name}, microseconds, {cell}"
    words = ["Grey is the time that a resource would need if it were always busy."]
    return Picture(title, charts.prediction_bars(found[-1], measured), words)


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
                num_heads=shape.num_heads,
                is_causal=shape.is_causal,
                timeout_s=timeout_s,
            )
        except UnsupportedError as error:
            return Kernel(name, version, head_dim, None, "; ".join(error.reasons))
        return Kernel(name, version, head_dim, recording)

    # Created first, so that it is shown above the bars of the runs.
    bar = tqdm(desc="counting accesses", total=len(versions), unit="", disable=None)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = []
        for kernel in pool.map(run, versions.items()):
            kernels.append(kernel)
            bar.update()
    return kernels


class _Names(dict[str, str]):
    """Names for contents that the page stores once and shows several times."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self._letter = letter

    def __call__(self, content: str) -> tuple[str, bool]:
        """Return the name of a content and whether it is new."""
        new = f"{self._letter}{len(self)}"
        name = self.setdefault(content, new)
        return name, name == new


def _map(drawings: _Names, access: Access) -> Markup:
    width, drawing = lanes.lane_map(access)
    name, _ = drawings(drawing)
    return Markup(f'<svg class="map" width="{width}"><use href="#{name}"/></svg>')


def _turns(found: Recording) -> Drawing:
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
    return Drawing(title, lanes.turns(found.turns, title), Table(title, head, rows))


def _counts(kernels: Sequence[Kernel], shape: Shape) -> bytes:
    """Return the counts as JSON."""
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
    """Return an access with its offsets as runs: first lane, last lane, offset, step."""
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
    """Convert a text with code in backquotes to HTML."""
    return Markup("").join(_spans(text))


def _spans(text: str) -> Iterator[Markup]:
    for i, part in enumerate(re.split(r"`([^`]*)`", text)):
        yield Markup("<code>{}</code>").format(part) if i % 2 else escape(part)


def _is_right(table: Table, column: int) -> bool:
    return are_numbers(row[column].lstrip("+\u2212") for row in table.rows)
