"""Results files: typed records, validated when they are read and when they are written.

A file holds one of the kinds of `Results`; its field `kind` says which. `python -m
gpt2_infer.bench.results` prints the JSON schema of all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from gpt2_infer.errors import GPT2InferError
from gpt2_infer.files import read_file

BASELINE = "NAIVE_PYTORCH"
FREE_ATTENTION = "FREE_ATTENTION"
"""Not a real backend: it skips attention, which shows the most that any kernel could save."""
_ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

TaskName: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_-]+$")]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Dtype: TypeAlias = Annotated[str, msgspec.Meta(pattern="^(float16|bfloat16|float32|float64)$")]
Status: TypeAlias = Literal["ok", "failed", "refused", "emulated"]
"""failed: its check failed; refused: it does not take this; emulated: checked, but not timed."""


class ResultsError(GPT2InferError):
    """A results file cannot be used."""


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A record that takes no field it does not know, and leaves out what has its default."""


# ---- Where results come from ---------------------------------------------------------------------


class Gpu(_Record, kw_only=True):
    """A GPU, its driver and its clocks, as nvidia-smi gives them."""

    name: str
    compute_capability: str
    multiprocessors: AtLeastOne
    memory_bytes: AtLeastOne
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
    """git's, or where there is no checkout that of the variable SOURCE_COMMIT."""
    dirty: bool | None
    """Whether the checkout had uncommitted changes; None where there is no checkout."""
    source_digest: str = ""
    """SHA-256 over the source files of both packages."""
    python: str
    platform: str
    cpu: str
    cpu_threads: Count = 0
    gpu: Gpu | None
    build_flags: dict[str, str] = {}
    packages: dict[str, str]
    precision: dict[str, bool | str] = {}
    """TF32 and matmul settings during the run."""
    limits: dict[str, Positive] = {}
    """What the GPU reached in this run: copy_gbps and matmul_<dtype>_tflops."""
    resumed_from: list[str] = []
    """Dates of the interrupted runs that this one completed."""

    @property
    def machine(self) -> str:
        """The GPU, or the CPU and its threads."""
        return self.gpu.name if self.gpu else f"{self.cpu}, {self.cpu_threads} threads"


# ---- What was timed ------------------------------------------------------------------------------


class KernelCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of attention() over (batch, seqlen, num_heads, head_dim)."""

    seqlen: AtLeastOne
    batch: AtLeastOne = 1
    num_heads: AtLeastOne = 12
    head_dim: AtLeastOne = 64
    dtype: Dtype = "float32"
    is_causal: bool = True

    def __str__(self) -> str:
        return f"{self.shape}, N={self.seqlen}"

    @property
    def length(self) -> int:
        """What varies within a table or a picture."""
        return self.seqlen

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


class GenerationCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Greedy text of max_tokens, the prompt included, for a batch of equal prompts."""

    max_tokens: AtLeastOne
    batch: AtLeastOne = 1
    dtype: Dtype = "float32"
    mode: Literal["recompute", "kv-cache"] = "recompute"

    def __str__(self) -> str:
        return f"{self.shape}, {self.max_tokens} tokens"

    @property
    def length(self) -> int:
        """What varies within a table or a picture."""
        return self.max_tokens

    @property
    def shape(self) -> str:
        """Everything but the length."""
        return f"{self.mode}, {self.dtype}, batch {self.batch}"


class Check(_Record, kw_only=True):
    """How far a backend was from float64 before it was timed; None for what is not finite."""

    error: NotNegative | None
    """The largest absolute error."""
    budget: NotNegative | None
    naive_error: NotNegative | None
    """The error of plain PyTorch in the same dtype."""
    relative_error: NotNegative | None
    row_error: NotNegative | None = None
    """The relative error of a row, of the row nearest to its budget."""
    row_budget: NotNegative | None = None


class Sampled(_Record, kw_only=True):
    """The samples of one contender in one cell, in the order of the rounds."""

    name: str
    unit: Literal["s", "us"]
    status: Status = "ok"
    reason: str = ""
    """Why there are no samples; empty where status is "ok"."""
    samples: list[Positive] = []

    @property
    def median(self) -> float:
        """The median sample."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest sample."""
        return min(self.samples), max(self.samples)


class Series(Sampled, kw_only=True):
    """What kernels and generation have in common."""

    family: str = ""
    precision: str
    """The precision class of the backend in this dtype."""
    change: str = ""
    """What a rung of a ladder changed: its header's title."""
    flags: str = ""
    source_digest: str | None = None
    """SHA-256 over the files that the backend is made of."""
    version_digest: str | None = None
    """SHA-256 of the version file's code; None in older files, and for what has none."""
    check: Check | None = None


class KernelSeries(Series, kw_only=True):
    """Microseconds per call of a kernel."""

    unit: Literal["us"] = "us"
    cell: KernelCell
    workspace_bytes: Count | None = None
    """Device memory that a call took beyond inputs and output; None on the CPU."""
    checked_again: bool | None = None
    """Whether it passed once more after it was timed; None in files older than that check."""

    @property
    def tflops(self) -> float:
        """What the median sample reaches."""
        return self.cell.flops / self.median / 1e6


class GenerationSeries(Series, kw_only=True):
    """Seconds to generate a text; see GenerationTiming.timed."""

    unit: Literal["s"] = "s"
    cell: GenerationCell
    program: Literal["gpt2-infer", "transformers"] = "gpt2-infer"
    attention: str = ""
    """The backend of the prompt, and of each step where nothing is cached."""
    decode_attention: str | None = None
    """The backend of each step with a cache."""
    token_digest: str | None = None
    text_compared: bool | None = None
    """Whether its text was compared with the baseline's."""
    diverges: str | None = None
    """What diverge.examine() says of a text other than the baseline's."""
    peak_memory_bytes: Count | None = None
    call_s: list[NotNegative] = []
    """The whole call, warm-up included."""
    warm_up_s: list[NotNegative] = []
    """Capturing CUDA graphs, once before the first token."""
    prefill_s: list[NotNegative] = []
    generation_s: list[NotNegative] = []
    """From the prompt to the last token."""


class DecodeCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A greedy text with random weights."""

    model: str
    dtype: Dtype
    batch: AtLeastOne
    prompt_tokens: AtLeastOne
    new_tokens: AtLeastOne
    mode: Literal["kv-cache", "recompute"] = "kv-cache"


class DecodeSeries(Sampled, kw_only=True):
    """Seconds from the start of the prompt to the last token, by an engine or a peer.

    With a cache what is done once, such as capturing graphs, comes before; in recompute it counts.
    """

    unit: Literal["s"] = "s"
    cell: DecodeCell
    program: Literal["gpt2-infer", "transformers", "recipe"]
    weight_bytes: AtLeastOne
    """What a step must read of the weights."""
    same_text: bool | None = None
    """In float32: whether its text is the first engine's."""
    marks: list[list[Positive]] = []
    """Of each sample, seconds to every 64th token and the last; a peer's to the last alone."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over the median sample."""
        return self.cell.batch * self.cell.new_tokens / self.median

    @property
    def step_us(self) -> float | None:
        """Microseconds of one step, the prompt's share included."""
        return 1e6 * self.median / self.cell.new_tokens if self.samples else None

    @property
    def gb_per_second(self) -> float | None:
        """Bytes of weights over time, in GB/s: what of the memory's bandwidth is used."""
        if self.step_us is None or self.cell.mode == "recompute":  # arithmetic is what takes time
            return None
        return self.weight_bytes / self.step_us / 1e3


class BatchSeries(Sampled, kw_only=True):
    """Seconds to complete many prompts."""

    unit: Literal["s"] = "s"
    program: Literal["gpt2-infer", "transformers"]
    dtype: Dtype
    batch: Count
    """Rows at a time; 0: what the program chose."""
    prompts: AtLeastOne
    tokens: AtLeastOne
    """All new ones."""
    same_rows: NotNegative | None = None
    """The part of the rows that are the same, bit for bit, in another order; for transformers,
    whose tokens are ours."""
    start_s: NotNegative = 0.0
    """What a job of two rows takes, one for each process, where whole commands are timed."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the median sample, less what a job takes to start."""
        return self.tokens / (self.median - self.start_s)


class PerplexitySeries(_Record, kw_only=True):
    """How well a model predicts a text with one backend; see gpt2_infer.perplexity.Score."""

    name: str
    dtype: Dtype
    precision: str
    reason: str = ""
    """Why there is no score."""
    bits_per_byte: NotNegative = 0.0
    perplexity: NotNegative = 0.0
    difference: float = 0.0
    standard_error: NotNegative = 0.0


class BuildSeries(Sampled, kw_only=True):
    """Seconds to build a ladder from nothing with one compiler."""

    unit: Literal["s"] = "s"
    versions: AtLeastOne


# ---- Files ---------------------------------------------------------------------------------------


class _File(_Record, kw_only=True, tag_field="kind"):
    task: TaskName
    provenance: Provenance

    def write(self, path: Path) -> None:
        """Validate and write, whole or not at all; raises ResultsError."""
        content = encode(self)
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ResultsError(f"{path} cannot be written: {error.strerror}") from error


class KernelTiming(_File, kw_only=True, tag="kernel"):
    """Kernels alone."""

    device: str
    baseline: str
    rounds: AtLeastOne
    backends: list[str]
    cells: list[KernelCell]
    series: list[KernelSeries]


class GenerationTiming(_File, kw_only=True, tag="generation"):
    """Generation end to end."""

    device: str
    baseline: str
    rounds: AtLeastOne
    backends: list[str]
    cells: list[GenerationCell]
    model: str
    prompt_tokens: AtLeastOne
    timed: Literal["generation", "call"] = "generation"
    """What a sample is: from the prompt to the last token, or the whole call with its warm-up."""
    prompt_digest: str | None = None
    weights_digest: str | None = None
    dtype_of_digest: Dtype | None = None
    """The dtype of the weights that weights_digest is of."""
    graph_length_step: AtLeastOne | None = None
    series: list[GenerationSeries]


class DecodeTiming(_File, kw_only=True, tag="decode"):
    """Our engines, and peers beside them."""

    rounds: AtLeastOne
    read_gb_s: Positive
    """The GPU's bandwidth for reading, measured in the same run."""
    series: list[DecodeSeries]


class BuildTiming(_File, kw_only=True, tag="build"):
    """A cold build of the float32 ladder, by compiler."""

    rounds: AtLeastOne
    jobs: AtLeastOne
    series: list[BuildSeries]


class BatchTiming(_File, kw_only=True, tag="batch"):
    """Many prompts, by batch size or by the devices of a job."""

    rounds: AtLeastOne
    model: str
    new_tokens: AtLeastOne
    series: list[BatchSeries]


class Perplexity(_File, kw_only=True, tag="perplexity"):
    """The score of every backend on the bundled model's held-out books."""

    model: str
    tokens: AtLeastOne
    bytes: AtLeastOne
    window: AtLeastOne
    series: list[PerplexitySeries]


class Shape(_Record, kw_only=True):
    """The one shape in which the versions of a ladder were profiled or inspected."""

    batch: AtLeastOne
    heads: AtLeastOne
    seqlen: AtLeastOne
    head_dim: AtLeastOne
    full: bool

    def __str__(self) -> str:
        kind = "full" if self.full else "causal"
        return f"B={self.batch} H={self.heads} N={self.seqlen} head_dim={self.head_dim}, {kind}"


class Profiled(_Record, kw_only=True):
    """What Nsight Compute counted in one call of a version."""

    name: str
    kernels: AtLeastOne
    """How many kernels the version launches."""
    metrics: dict[str, NotNegative]


class Profile(_File, kw_only=True, tag="profile"):
    """The profile of a ladder."""

    shape: Shape
    counters: dict[str, str]
    """Nsight Compute's name of each metric."""
    not_on_this_gpu: list[str]
    """Metrics that the GPU has no counter for."""
    versions: list[Profiled]


class Inspected(_Record, kw_only=True):
    """What the compiler and the emulator say of one version."""

    name: str
    change: str
    metrics: dict[str, NotNegative]
    refused: str = ""
    """Why its accesses were not counted."""


class Inspection(_File, kw_only=True, tag="inspection"):
    """The inspection of a ladder."""

    family: str
    shape: Shape
    arch: str
    """Compute capability that ptxas compiled for, e.g. "90"."""
    nvcc: str
    versions: list[Inspected]


class Predicted(_Record, kw_only=True):
    """A prediction of one version in one cell; see attention_kernels.inspection.predict."""

    name: str
    cell: KernelCell
    version_digest: str
    """SHA-256 of the version file's code, without comments."""
    measured_digests: list[str] = []
    """The source_digest of earlier series that git says were made from the same code."""
    refused: str = ""
    """Why there is no prediction."""
    time_us: NotNegative = 0.0
    bound: str = ""
    needs_us: dict[str, NotNegative] = {}
    waiting_us: NotNegative = 0.0
    uneven_us: NotNegative = 0.0
    launch_us: NotNegative = 0.0
    load_wavefronts: Count = 0
    store_wavefronts: Count = 0

    def is_of(self, series: KernelSeries) -> bool:
        """Return whether a series timed the same version file in the same cell."""
        digests = {self.version_digest, *self.measured_digests}
        same_file = bool({series.version_digest, series.source_digest} & digests)
        return series.name == self.name and series.cell == self.cell and same_file


class Predictions(_File, kw_only=True, tag="prediction"):
    """What a ladder should take on a GPU, from the code alone."""

    gpu: str
    series: list[Predicted]


class TestTime(_Record, kw_only=True):
    """How long a test took, with its setup and teardown."""

    test: str
    seconds: float


class TestFailure(_Record, kw_only=True):
    """A test that failed."""

    test: str
    message: list[str]
    """The last lines."""


class GpuTests(_File, kw_only=True, tag="tests"):
    """A run of the tests that need a GPU."""

    workers: AtLeastOne
    passed: int
    failed: int
    skipped: int
    duration_s: float
    """With the build of all kernels."""
    slowest: list[TestTime]
    failures: list[TestFailure]


class Published(_File, kw_only=True, tag="published"):
    """Somebody else's published seconds, which were not measured here."""

    note: str
    seconds: dict[str, dict[str, Positive]]
    """By implementation, then by card."""


Timing: TypeAlias = KernelTiming | GenerationTiming
Results: TypeAlias = (
    Timing
    | DecodeTiming
    | BatchTiming
    | Perplexity
    | BuildTiming
    | Profile
    | Inspection
    | Predictions
    | GpuTests
    | Published
)

_decoder = msgspec.json.Decoder(Results)


def _lack(results: Results) -> str | None:
    """Say what an unfinished run left out; None for a finished one. Samples have their check."""
    if isinstance(results, (Published, GpuTests)):
        return None
    if isinstance(results, (Profile, Inspection)):
        return None if results.versions else "it has no versions"
    if isinstance(results, (Predictions, Perplexity)):
        return None if results.series else "it has no series"
    series, rounds = results.series, results.rounds
    if not series:
        return "it has no series"
    short = sum(one.status == "ok" and len(one.samples) < rounds for one in series)
    if short:
        return f"{short} of its {len(series)} series have fewer samples than its {rounds} rounds"
    unchecked = sum(
        isinstance(one, KernelSeries) and bool(one.samples) and one.check is None for one in series
    )
    return f"{unchecked} of its {len(series)} series were not checked" if unchecked else None


def encode(record: msgspec.Struct) -> bytes:
    """Return the JSON of a record; raises ResultsError for a value of the wrong type."""
    content = msgspec.json.encode(record)
    try:
        msgspec.json.decode(content, type=type(record))
    except msgspec.ValidationError as error:
        raise ResultsError(f"the results are not valid: {error}") from error
    return msgspec.json.format(content, indent=1) + b"\n"


def read(path: Path) -> Results:
    """Read and validate a finished run's file; raises ResultsError, in one line."""
    try:
        results: Results = _decoder.decode(read_file(path))
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ResultsError(f"{path} is not a results file: {error}") from error
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path} is truncated or not JSON: {error}") from error
    if lack := _lack(results):
        raise ResultsError(f"{path} is of a run that is not finished: {lack}")
    return results


def newest(folder: Path) -> dict[str, tuple[Path, Results]]:
    """Return the newest file of each task, by the date in its provenance; raises ResultsError."""
    if not folder.is_dir():
        raise ResultsError(f"there is no folder {folder}")
    found: dict[str, tuple[Path, Results]] = {}
    for path in sorted(folder.glob("*.json")):
        results = read(path)
        older = found.get(results.task)
        if older is None or results.provenance.date > older[1].provenance.date:
            found[results.task] = (path, results)
    return found


def check_output(path: Path) -> None:
    """Raise ResultsError if a run could not write there; an existing file is never overwritten."""
    if path.exists():
        raise ResultsError(f"{path} exists: name another file, or delete it")
    if not path.parent.is_dir():
        raise ResultsError(f"there is no folder {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    print(json.dumps(msgspec.json.schema(Results), indent=1))
