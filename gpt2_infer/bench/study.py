"""Studies: data that say what is measured, where and how often. run() runs any of them.

Contenders are timed cell by cell in interleaved rounds, A B C A B C, so that drift of the machine
affects all of them alike. Nothing is written between two samples; each finished cell is appended as
a JSON line to OUT.partial, from which an interrupted run resumes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec
from tqdm import tqdm

from attention_kernels.errors import RejectedTimeError
from gpt2_infer.bench import record
from gpt2_infer.bench.record import AtLeastOne, File, GenerationCell, KernelCell, Row, Shape
from gpt2_infer.config import ProductsName
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels import BackendSpec

STUDIES = Path(__file__).with_name("studies.toml")
DEFAULT_PROMPT = "Hello, I'm a language model,"  # as in the case study
# A comparison takes minutes at these lengths; on a CPU it would take hours at a GPU's.
LENGTHS = {
    "cpu": {"max_tokens": [32, 64], "seqlens": [64, 128, 256, 512]},
    "cuda": {
        "max_tokens": [32, 64, 128, 256, 512],
        "seqlens": [64, 128, 256, 512, 1024, 2048, 4096],
    },
}
Rounds: TypeAlias = Annotated[int, msgspec.Meta(ge=2)]  # one sample has no spread
Mode: TypeAlias = Literal["recompute", "kv-cache"]
Cell = TypeVar("Cell", bound=msgspec.Struct)
Result = TypeVar("Result")


class Study(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The settings of a study; each kind has a Subject, which prepares and measures it."""

    subject: ClassVar[str]
    """The kind's Subject, as "module.Class"."""


class BackendStudy(Study, kw_only=True):
    """The settings of a study that compares backends."""

    backends: list[str] = []
    """Names or version files, *.cu; without backends and families, every backend that runs."""
    families: list[str] = []
    baseline: str = record.BASELINE
    device: Literal["cpu", "cuda"] | None = None
    """None selects cuda if available, else cpu."""
    dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32"])
    batch_sizes: list[AtLeastOne] = msgspec.field(default_factory=lambda: [1])
    rounds: Rounds = 5


class KernelStudy(BackendStudy, kw_only=True, tag="kernel"):
    """Kernels alone, in the given cells, else in every combination of the lists."""

    subject = "kernels.Kernels"
    cells: list[KernelCell] = []
    seqlens: list[AtLeastOne] = []
    """Sequence lengths; empty selects LENGTHS for the device."""
    heads: AtLeastOne = 12
    head_dims: list[AtLeastOne] = msgspec.field(default_factory=lambda: [64])
    full: bool = False
    """Whether to omit the causal mask."""
    decode: bool = False
    """Whether to time decode(); all rows are as long as the cache, which has no mask."""
    rounds: Rounds = 8
    """Timed rounds; each of eight has a kind of numbers of its own."""


class GenerationStudy(BackendStudy, kw_only=True, tag="generation"):
    """End-to-end generation in the given cells, else in every combination of the lists."""

    subject = "generation.Texts"
    cells: list[GenerationCell] = []
    model: str = "demo"
    random_weights: bool = False
    prompt: str | list[int] = DEFAULT_PROMPT
    modes: list[Mode] = msgspec.field(default_factory=lambda: ["recompute"])
    max_tokens: list[AtLeastOne] = []
    """Total tokens, prompt included; empty selects LENGTHS for the device."""
    decoder: str = ""
    """The backend that decodes for those without a decode kernel; "" refuses them."""
    examine: bool = False
    """Whether to examine all texts, after a single check, and record how their logits differ."""
    energy: bool = False
    """Whether to measure energy, too, on a GPU, in the first cell."""


class ProfileStudy(Study, kw_only=True, tag="profile"):
    """A ladder under Nsight Compute; needs a GPU and ncu on PATH."""

    subject = "profile.Profile"
    family: str = "fp32"
    shape: Shape = Shape(1024)


class InspectionStudy(Study, kw_only=True, tag="inspection"):
    """Compiler and emulator figures for a ladder; needs no GPU."""

    subject = "counting.Counting"
    family: str = "fp32"
    shape: Shape = Shape(128, num_heads=1)
    arch: str = "90"


class PredictionStudy(Study, kw_only=True, tag="prediction"):
    """Predicted times of a ladder on a GPU that need not be present."""

    subject = "prediction.Predictions"
    family: str = "fp32"
    batch: AtLeastOne = 1
    heads: AtLeastOne = 12
    head_dim: AtLeastOne = 64
    full: bool = False
    """Whether to omit the causal mask."""
    gpu: str = "h200"
    seqlens: list[AtLeastOne] = msgspec.field(default_factory=lambda: [*LENGTHS["cuda"]["seqlens"]])


class DecodeStudy(Study, kw_only=True, tag="decode"):
    """Generation with each engine, and with peers."""

    subject = "decoding.Decoding"
    device: Literal["cpu", "cuda"] = "cuda"
    models: list[str] = msgspec.field(default_factory=lambda: ["gpt2"])
    dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32", "bfloat16"])
    batch_sizes: list[AtLeastOne] = msgspec.field(default_factory=lambda: [1])
    prompt_tokens: AtLeastOne = 8
    new_tokens: list[AtLeastOne] = msgspec.field(default_factory=lambda: [504])
    """New tokens per row; with one, the time is that of the prompt."""
    engines: list[Literal["eager", "graph", "fused"]] = msgspec.field(
        default_factory=lambda: ["eager", "graph", "fused"]
    )
    """The first engine's text is the reference for the others."""
    mode: Mode = "kv-cache"
    guesses: list[Literal[0, 1, 3, 7]] = msgspec.field(default_factory=lambda: [0])
    """Guesses that a pass may read, each number with every engine; see generate()."""
    pieces: list[int] = msgspec.field(default_factory=lambda: [0])
    """Prompts; see DecodeCell."""
    energy: bool = True
    backends: list[str] = []
    """Attention backends, each with every engine; empty selects the default backend."""
    products: list[ProductsName] = msgspec.field(default_factory=lambda: ["ieee-fp32"])
    """Matrix products, each with every backend and engine."""
    peers: bool = False
    """Whether transformers is a contender."""
    rounds: Rounds = 5


class BatchStudy(Study, kw_only=True, tag="batch"):
    """Continuous batching at several batch sizes, and transformers as a peer."""

    subject = "batches.Batches"
    model: str = "gpt2"
    device: str = "cuda"
    dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32", "bfloat16"])
    batch_sizes: list[AtLeastOne] = msgspec.field(
        default_factory=lambda: [8, 32, 64, 128, 256, 512]
    )
    prompts: AtLeastOne = 4096
    new_tokens: AtLeastOne = 64
    peer_batch_sizes: list[AtLeastOne] = []
    """Batch sizes of transformers, whose batches are sorted by length and padded on the left."""
    generate_batch_sizes: list[AtLeastOne] = []
    """Batch sizes of transformers' continuous batching, generate_batch(), which needs CUDA."""
    rounds: Rounds = 2


AnyStudy: TypeAlias = (
    KernelStudy
    | GenerationStudy
    | ProfileStudy
    | InspectionStudy
    | PredictionStudy
    | DecodeStudy
    | BatchStudy
)


def load(path: Path = STUDIES) -> dict[str, AnyStudy]:
    """Read a file of studies; by default those behind the documents, most important first.

    Raises RequestError.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, AnyStudy])
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"{path} is not a file of studies: {error}") from error


# ---- Running a study -----------------------------------------------------------------------------


@dataclass
class Contender:
    """Something to measure in a cell."""

    row: Row
    sample: Callable[[], Mapping[str, float]] | None = None
    """Takes one sample of each metric; None if the contender is not timed.

    The row's own metric is one of them; the others become further rows. May raise
    RejectedTimeError: the contender then gets no figure and does not run again.
    """
    recheck: Callable[[], None] | None = None
    """Checks the output again after all samples; may raise RejectedTimeError."""
    beside: list[Row] = field(default_factory=list)
    """Further rows."""
    taken: list[Mapping[str, float]] = field(default_factory=list)
    """The samples of the timed rounds."""

    def attempt(self, call: Callable[[], Result] | None) -> Result | None:
        """Return call()'s result; None without a call, or if the contender is or gets rejected."""
        if call is None or self.row.status != "ok":
            return None
        try:
            return call()
        except RejectedTimeError as error:
            self.row.status, self.row.reason = "failed", str(error)
            return None


class Subject(Generic[Cell]):
    """A study, ready to run; the constructor raises RequestError if it cannot run here."""

    cells: Sequence[Cell]
    rounds: int = 1
    warm_up: int = 1
    """Initial rounds whose samples are dropped."""
    measures_energy_of: Sequence[Cell] = ()
    """The cells in which the energy of a sample is measured, too, after the timed rounds."""
    processes: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    """Those that the study starts."""
    device: str = "cpu"
    specs: Sequence[BackendSpec] = ()
    """The backends; their kernels are built before anything is measured."""
    facts: Mapping[str, Any] = {}
    """Facts that the results file records besides the settings."""

    @functools.cached_property
    def sources(self) -> dict[str, str | None]:
        """Digests of each backend's source files."""
        from gpt2_infer.bench.environment import backend_digest

        return {spec.name: backend_digest(spec) for spec in self.specs}

    def limits(self, *, is_recorded: bool) -> dict[str, float]:
        """Measure the limits of the device. is_recorded: all of them, for a results file."""
        return {}

    def contenders(self, cell: Cell) -> Iterable[Contender]:
        """Check and yield the contenders of a cell."""
        raise NotImplementedError


def run(study: AnyStudy, task: str = "", out: Path | None = None) -> File:
    """Measure and write `out`; after an interruption the same call resumes.

    Raises RequestError, ResultsError or an AttentionError.
    """
    from attention_kernels import ladder
    from gpt2_infer.bench.environment import provenance

    task = task or type(study).__struct_config__.tag  # type: ignore[assignment]
    try:
        msgspec.convert(task, record.TaskName)
    except msgspec.ValidationError as error:
        raise RequestError(f"{task!r} cannot be a task's name: {error}") from error
    if out:
        record.check_output(out)
    module, _, name = study.subject.partition(".")
    subject: Subject[Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)(study)
    settings = msgspec.to_builtins(study) | {"rounds": subject.rounds, **subject.facts}
    about = provenance()
    if subject.device == "cuda":
        about.prebuilt = [spec.name for spec in subject.specs if ladder.is_prebuilt(spec)]
    file = File(task=task, study=settings, provenance=about, rows=[])
    with subject.processes:
        progress = Progress(out, file, subject) if out else None
        ladder.build_all(subject.device, subject.specs)
        file.provenance.limits = subject.limits(is_recorded=out is not None)
        file.rows = time_cells(subject, progress)
    if progress:
        file.write(progress.out)
        progress.path.unlink(missing_ok=True)
    return file


def interleave(subject: Subject[Any], contenders: Sequence[Contender], bar: tqdm[Any]) -> None:
    """Sample all contenders in turn, for the subject's warm-up rounds and those that count.

    A rejected contender does not run again.
    """
    for index in range(-subject.warm_up, subject.rounds):
        bar.set_postfix_str(f"round {index + 1} of {subject.rounds}")
        for contender in contenders:
            figures = contender.attempt(contender.sample)
            if figures and index >= 0:
                contender.taken.append(figures)


def time_cells(subject: Subject[Any], progress: Progress | None = None) -> list[Row]:
    """Check and time the contenders of each cell that `progress` does not have yet."""
    found = dict(progress.cells) if progress else {}
    with tqdm(total=len(subject.cells), unit="cell", disable=None) as bar:
        for cell in subject.cells:
            bar.set_description(str(cell))
            if str(cell) not in found:
                found[str(cell)] = _time_cell(subject, cell, bar)
                if progress:
                    progress.add(str(cell), found[str(cell)])
            bar.update()
    return [row for cell in subject.cells for row in found[str(cell)]]


def _time_cell(subject: Subject[Any], cell: Any, bar: tqdm[Any]) -> list[Row]:
    contenders = []
    bar.set_postfix_str("checking")
    for contender in subject.contenders(cell):
        contenders.append(contender)
        bar.set_postfix_str(f"{contender.row.contender}: {contender.row.status}")
    interleave(subject, contenders, bar)
    if cell in subject.measures_energy_of:
        _measure_energy(contenders, subject.device, bar)
    for contender in contenders:
        contender.sample = None  # release captured graphs before the rechecks
    for contender in contenders:
        if contender.taken:
            _note(contender)
    rows = [row for contender in contenders for row in (contender.row, *contender.beside)]
    for row in rows:
        row.cell = msgspec.to_builtins(cell)
    return rows


def _measure_energy(contenders: Sequence[Contender], device: str, bar: tqdm[Any]) -> None:
    from gpt2_infer.bench import energy

    bar.set_postfix_str("energy")
    for contender in contenders:
        if contender.sample:
            name = contender.row.contender
            measure = functools.partial(energy.measure, name, contender.sample, device)
            if row := contender.attempt(measure):
                contender.beside.append(row)


def _note(contender: Contender) -> None:
    """Check the contender again, and record its samples."""
    row = contender.row
    contender.attempt(contender.recheck)
    if row.status != "ok":
        return
    for metric in contender.taken[0]:
        samples = [float(f"{figures[metric]:.6g}") for figures in contender.taken]
        if metric == row.metric:
            row.samples = samples
        else:
            contender.beside.append(
                Row(contender=row.contender, metric=metric, unit=row.unit, samples=samples)
            )


# ---- Resuming ------------------------------------------------------------------------------------


class Progress:
    """The finished cells of a run, one JSON line each in OUT.partial.

    The first line is the run's plan: everything that must be the same for the run to resume.
    Raises ResultsError if OUT.partial belongs to a different run or cannot be read.
    """

    def __init__(self, out: Path, file: File, subject: Subject[Any]) -> None:
        self.cells: dict[str, list[Row]] = {}
        """The rows of the cells that an earlier run finished."""
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        about, gpu = file.provenance, file.provenance.gpu
        plan = {
            "settings": {"task": file.task, **file.study, "cells": [*map(str, subject.cells)]},
            "commit": about.commit,
            "source digest": about.source_digest,
            "sources": subject.sources,
            "machine": [gpu.name, gpu.driver_version] if gpu else [about.cpu, about.cpu_threads],
            "packages": about.packages,
            "precision": about.precision,
            "build flags": about.build_flags,
            "prebuilt": about.prebuilt,
        }
        self._header = msgspec.json.encode((about.date, plan))
        if self.path.exists():
            about.resumed_from = [self._read(self.path)]

    def add(self, cell: str, rows: list[Row]) -> None:
        """Write a finished cell; raises ResultsError if it cannot be written."""
        line = msgspec.json.encode((cell, rows))
        try:
            with self.path.open("ab") as file:
                if file.tell() == 0:
                    file.write(self._header + b"\n")
                file.write(line + b"\n")
        except OSError as error:
            why = f"{error.strerror}; rerun to resume"
            raise record.ResultsError(f"{self.path} cannot be written: {why}") from error

    def _read(self, path: Path) -> str:
        """Load the cells that an earlier run finished and return its date."""
        _, plan = msgspec.json.decode(self._header)
        try:
            header, *lines = path.read_bytes().splitlines(keepends=True)
            date, earlier = msgspec.json.decode(header, type=tuple[str, dict[str, Any]])
            lines = [line for line in lines if line.endswith(b"\n")]  # the last may be cut off
            cells = [msgspec.json.decode(line, type=tuple[str, list[Row]]) for line in lines]
        except (OSError, ValueError) as error:
            raise record.ResultsError(f"{path} cannot be read, delete it: {error}") from error
        if differ := [name for name in plan if earlier.get(name) != plan[name]]:
            raise record.ResultsError(
                f"{path} belongs to another run ({', '.join(differ)} differ): delete it or name "
                "another output"
            )
        self.cells |= cells
        path.write_bytes(header + b"".join(lines))
        return date
