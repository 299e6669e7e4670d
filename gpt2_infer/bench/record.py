"""Results files. A file consists of rows; a row holds one metric of one contender in one cell.

Every study writes this kind of file. Fields specific to one study are in a row's `extra` and are
typed where they are read. results.schema.json is the JSON schema of File.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from gpt2_infer.errors import GPT2InferError
from gpt2_infer.files import check_writable, read_file

BASELINE = "NAIVE_PYTORCH"
DEVICES = ("h200", "h100", "cpu")
"""Devices in the names of results files, those that documents show by default first."""
FREE_ATTENTION = "FREE_ATTENTION"
"""Not a real backend: it skips attention, to show the most that any kernel could save."""
SCHEMA = Path(__file__).with_name("results.schema.json")
TIMES = ("time", "generation", "call", "predicted time")
"""Metrics used as divisors, which must be positive."""
_ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

TaskName: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_-]+$")]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Dtype: TypeAlias = Annotated[str, msgspec.Meta(pattern="^(float16|bfloat16|float32|float64)$")]
_Error: TypeAlias = Annotated[float, msgspec.Meta(ge=0)] | None
Status: TypeAlias = Literal["ok", "failed", "refused", "emulated"]
"""failed: the check failed; refused: unsupported; emulated: checked but not timed."""


class ResultsError(GPT2InferError):
    """A results file cannot be used."""


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A record that refuses unknown fields and leaves out defaults."""


class _Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conditions shared by all contenders that are compared."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(self).items())


class Shape(_Cell, frozen=True):
    """The shape of one attention() call, without its dtype."""

    seqlen: AtLeastOne
    batch: AtLeastOne = 1
    num_heads: AtLeastOne = 12
    head_dim: AtLeastOne = 64
    is_causal: bool = True

    def __str__(self) -> str:
        return (
            f"B={self.batch} H={self.num_heads} N={self.seqlen} head_dim={self.head_dim}, "
            f"{'causal' if self.is_causal else 'full'}"
        )


class KernelCell(Shape, frozen=True):
    """One call of attention() in a dtype."""

    dtype: Dtype = "float32"

    def __str__(self) -> str:
        return f"{self.shape}, N={self.seqlen}"

    @property
    def shape(self) -> str:
        """Everything but the length."""
        kind = "causal" if self.is_causal else "full"
        return f"B={self.batch} H={self.num_heads} head_dim={self.head_dim}, {self.dtype}, {kind}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products; causal attention needs half of them."""
        full = 4 * self.batch * self.num_heads * self.seqlen**2 * self.head_dim
        return full // 2 if self.is_causal else full

    @property
    def min_bytes(self) -> int:
        """Bytes of q, k and v, read once, and of o, written once."""
        item_size = _ITEM_SIZES[self.dtype]
        return 4 * self.batch * self.num_heads * self.seqlen * self.head_dim * item_size


class GenerationCell(_Cell, frozen=True):
    """Greedy generation up to max_tokens, prompt included, for a batch of equal prompts."""

    max_tokens: AtLeastOne
    batch: AtLeastOne = 1
    dtype: Dtype = "float32"
    mode: Literal["recompute", "kv-cache"] = "recompute"


class DecodeCell(_Cell, frozen=True):
    """Greedy generation with random weights."""

    model: str
    dtype: Dtype
    batch: AtLeastOne
    prompt_tokens: AtLeastOne
    new_tokens: AtLeastOne
    mode: Literal["kv-cache", "recompute"] = "kv-cache"
    piece: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The piece of the first held-out book whose beginning is the prompt; 0 for a fixed prompt."""


class BatchCell(_Cell, frozen=True):
    """Many prompts with the same number of new tokens each."""

    model: str
    dtype: Dtype
    new_tokens: AtLeastOne


class Check(_Record, kw_only=True):
    """A backend's error against float64, before it was timed; None if not finite."""

    error: _Error
    """The largest absolute error."""
    budget: _Error
    naive_error: _Error
    """Plain PyTorch's error in the same dtype."""
    relative_error: _Error
    row_error: _Error = None
    """The relative error of the row closest to its budget."""
    row_budget: _Error = None


class Row(_Record, kw_only=True):
    """One metric of one contender in one cell."""

    contender: str
    cell: dict[str, str | int | bool] = {}
    metric: str
    unit: str
    samples: list[float] = []
    """One sample per round, in order; a count has a single sample."""
    status: Status = "ok"
    reason: str = ""
    """Why there are no samples."""
    check: Check | None = None
    extra: dict[str, Any] = {}

    @property
    def median(self) -> float:
        """The median sample."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest sample."""
        return min(self.samples), max(self.samples)

    @property
    def remarks(self) -> str:
        """What the clock says beside the time of a kernel, in words; usually nothing."""
        remarks = []
        if overlapping := self.extra.get("overlapping_us"):
            remarks.append(f"{overlapping:.1f} us if nothing comes between two calls")
        if "is_reproducible" in self.extra:
            remarks.append("its repeated calls prove nothing: it is not reproducible")
        if times := self.extra.get("depends_us"):
            told = ", ".join(f"{us:.1f} us ({kind} numbers)" for kind, us in times.items())
            remarks.append(f"its time depends on the data: {told}")
        return "; ".join(remarks)

    @property
    def kernel(self) -> KernelCell:
        """The cell as a KernelCell."""
        return msgspec.convert(self.cell, KernelCell)

    @property
    def tflops(self) -> float:
        """The arithmetic throughput of the median sample of a kernel, in TFLOP/s."""
        return self.kernel.flops / self.median / 1e6


class Gpu(_Record, kw_only=True):
    """A GPU, its driver and its clocks, as nvidia-smi gives them."""

    name: str
    compute_capability: str
    multiprocessors: int
    memory_bytes: int
    cuda: str
    driver_version: str | None = None
    clocks_max_sm: str | None = msgspec.field(default=None, name="clocks.max.sm")
    clocks_max_mem: str | None = msgspec.field(default=None, name="clocks.max.mem")
    clocks_sm: str | None = msgspec.field(default=None, name="clocks.sm")
    clocks_mem: str | None = msgspec.field(default=None, name="clocks.mem")
    power_limit: str | None = msgspec.field(default=None, name="power.limit")


class Provenance(_Record, kw_only=True):
    """Machine, software and source of a run."""

    date: str
    """UTC, ISO 8601."""
    command: str
    commit: str | None
    dirty: bool | None
    """Whether the checkout had uncommitted changes."""
    source_digest: str = ""
    """SHA-256 over the source files of both packages."""
    python: str
    platform: str
    cpu: str
    cpu_threads: int = 0
    gpu: Gpu | None
    build_flags: dict[str, str] = {}
    prebuilt: list[str] = []
    """The backends whose CUDA kernels were in the wheel; the others' were compiled here."""
    packages: dict[str, str]
    precision: dict[str, bool | str] = {}
    """TF32 and matmul settings during the run."""
    limits: dict[str, float] = {}
    """Measured in this run on the GPU: copy_gbps, read_gbps and matmul_<dtype>_tflops."""
    resumed_from: list[str] = []
    """Dates of the interrupted runs that this one completed."""


class File(_Record, kw_only=True):
    """The results of one study."""

    task: TaskName
    study: dict[str, Any]
    """The study's settings and facts about the run."""
    provenance: Provenance
    rows: list[Row]

    @property
    def machine(self) -> str:
        """The GPU, or the CPU and its threads if that is what was measured."""
        about = self.provenance
        if about.gpu and self.study.get("device") != "cpu":
            return about.gpu.name
        return f"{about.cpu}, {about.cpu_threads} threads"

    def of(self, metric: str) -> list[Row]:
        """Return the rows of one metric."""
        return [row for row in self.rows if row.metric == metric]

    def beside(self, row: Row, metric: str) -> Row | None:
        """Return the row of another metric for the same contender and cell."""
        same = (one for one in self.of(metric) if one.contender == row.contender)
        return next((one for one in same if one.cell == row.cell), None)

    def write(self, path: Path) -> None:
        """Validate and write the file atomically, one line per row. Raises ResultsError."""
        content = encode(self)
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ResultsError(f"{path} cannot be written: {error.strerror}") from error


def timings_of(prediction: Row, timed: Iterable[Row]) -> list[Row]:
    """Return the measurements of the same backend, and version file, in the same cell."""
    return [
        row
        for row in timed
        if row.samples
        and (row.contender, row.cell) == (prediction.contender, prediction.cell)
        and row.extra.get("version_digest") == prediction.extra.get("version_digest")
    ]


def encode(file: File) -> bytes:
    """Return the JSON of a file; raises ResultsError for a value of the wrong type."""
    try:
        msgspec.json.decode(msgspec.json.encode(file), type=File)
    except msgspec.ValidationError as error:
        raise ResultsError(f"the results are not valid: {error}") from error
    head = msgspec.json.encode({"task": file.task, "study": file.study})
    provenance = msgspec.json.format(msgspec.json.encode({"provenance": file.provenance}), indent=1)
    rows = b",\n".join(map(msgspec.json.encode, file.rows))
    return head[:-1] + b",\n" + provenance[2:-2] + b',\n"rows": [\n' + rows + b"\n]}\n"


def read(path: Path) -> File:
    """Read and validate a file; raises ResultsError with a one-line message."""
    try:
        file = msgspec.json.decode(read_file(path), type=File)
        if "kind" not in file.study:
            raise msgspec.ValidationError("its study has no kind")
        if not file.rows:
            raise msgspec.ValidationError("it has no rows")
        for row in file.rows:
            if "seqlen" in row.cell:
                msgspec.convert(row.cell, KernelCell if "dtype" in row.cell else Shape)
            if not (row.samples or row.reason):
                raise msgspec.ValidationError("a row has neither samples nor a reason")
            if row.metric in TIMES and min(row.samples, default=1.0) <= 0:
                raise msgspec.ValidationError("a time is not positive")
        return file
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ResultsError(f"{path} is not a results file: {error}") from error
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path} is truncated or not JSON: {error}") from error


def newest(folder: Path, task: str, device: str = "") -> Path:
    """Return the newest file of a task, <date>_<device>_<task>.json.

    device: by default the first of DEVICES that has one. Raises ResultsError.
    """
    for name in [device] if device else DEVICES:
        if found := sorted(folder.glob(f"*_{name}_{task}.json")):
            return found[-1]
    raise ResultsError(f"{folder} has no results of {task}" + (f" on {device}" if device else ""))


def check_output(path: Path) -> None:
    """Raise ResultsError if a file exists, or the errors of check_writable()."""
    check_writable(path)
    if path.exists():
        raise ResultsError(f"{path} exists: name another file, or delete it")
