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
from gpt2_infer.bench.show.tables import Table, are_numbers, is_of, tables

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

    shape: what the versions are run with in the emulator. gpu: a name of gpus(), to show
    predicted times for; None for no prediction. predict: the versions to predict where the results
    have no prediction of them. A version whose accesses cannot be counted is shown with the reason.
    Raises ResultsError, RequestError, or BuildError where a version does not compile.
    """
    if gpu:
        find_gpu(gpu)  # or refuse it, before minutes of counting
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
    """A chart, as the documents have it."""

    title: str
    svg: bytes
    words: Sequence[str] = ()
    """What else there is to say, a sentence each."""

    @property
    def drawing(self) -> Markup:
        """The chart as an image in itself: its names and styles are not the page's."""
        content = base64.b64encode(self.svg).decode()
        source = f"data:image/svg+xml;base64,{content}"
        return Markup('<img class="chart" alt="{}" src="{}">').format(self.title, source)


@dataclass(frozen=True)
class Drawing:
    """A drawing in the page's own colours, and the same in figures."""

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
        """The name in an address of the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.path.stem.lower())

    @property
    def tables(self) -> list[Table]:
        """The tables that the documents show, too."""
        return tables(self.path.name, self.file)

    @property
    def pictures(self) -> list[Picture]:
        """The charts of the file."""
        drawn = charts.render(self.file).items()
        return [Picture(f"{self.file.task}, {name}", svg) for name, svg in drawn]

    @property
    def warnings(self) -> Iterator[str]:
        """The samples that no such GPU can take."""
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
        """Where the results come from."""
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
    """Chart a version's prediction, in GPT-2's shape at the length that stands for a kernel.

    Return why there is none, if so. makes: whether to make the one that the files do not have.
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
    timed = timed_on(card, files)
    found = found or predict_version(kernel.name, version, [cell], gpu=gpu, timed=timed)
    if not found[-1].samples:
        return found[-1].reason
    measured = [
        (file.task, row)
        for file in timed
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
