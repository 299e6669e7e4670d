"""A job: its rows, parts and manifest, and how a process completes its share of them.

Rows are assigned to parts by a hash of their ids. A part is one file: it is written under a
temporary name, synced, renamed, and then entered in the manifest with its digest. A killed job
resumes with the parts missing from the manifest. A job's folder:

    _job.json            the request: settings, digests of the inputs, number of parts
    part-00000.jsonl     a part's rows in input order; or .parquet
    _manifest/00000.json the part's digest, number of rows, and number of error rows
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import torch

from attention_kernels import ladder
from gpt2_infer import __version__
from gpt2_infer.batch import folder
from gpt2_infer.batch.folder import BatchError
from gpt2_infer.batch.rows import InputRow, pyarrow_parquet, read_rows
from gpt2_infer.checkpoint import Checkpoint, open_checkpoint
from gpt2_infer.checks import check_integer, check_type
from gpt2_infer.config import GPT2Config, ProductsName
from gpt2_infer.engines.continuous import Completion, Continuous
from gpt2_infer.errors import RequestError
from gpt2_infer.model import GPT2
from gpt2_infer.request import Request
from gpt2_infer.sampling import Sampling

Format = Literal["jsonl", "parquet"]
CPU_BATCH = 32
MAX_BATCH = 512
LARGEST_BATCH = 2**16
BATCHES_AT_ONCE = 16  # complete about this many batches, then write their parts
# torch's flash kernel, the usual decoder on a CPU, rounds by its number of threads.
CPU_DECODE = "NAIVE_PYTORCH"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What determines a row's bytes; a job can only be resumed with equal settings."""

    model: str
    revision: str | None = None
    random_weights: bool = False
    dtype: str = "float32"
    products: ProductsName = "ieee-fp32"
    backend: str | None = None
    decode_backend: str | None = None
    engine: str = "auto"
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    """How to choose tokens; row i of the input samples from seed + i."""
    format: Format = "jsonl"
    part_rows: int = 1000
    """Approximate number of rows per part."""
    batch_size: int | None = None
    """Rows per batch; None for 32 on a CPU, and on a GPU what its memory holds, up to 512."""

    def __post_init__(self) -> None:
        check_type("sampling", self.sampling, Sampling)
        check_type("stop", self.stop, tuple)
        if self.format not in get_args(Format):
            raise RequestError(
                f"format must be {' or '.join(get_args(Format))}, not {self.format!r}"
            )
        check_integer("part-rows", self.part_rows, 1)
        if self.batch_size is not None:
            check_integer("batch-size", self.batch_size, 1, LARGEST_BATCH)


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job's request as stored in _job.json; a job can only be resumed with an equal one."""

    settings: Settings
    """The settings, without batch_size, which is a separate field."""
    inputs: tuple[tuple[str, str], ...]
    """The name and digest of each input."""
    weights: tuple[str, ...]
    """The digests of the weights, or their commit on the hub."""
    kernels: tuple[str, ...]
    """The digests of the backends' version files."""
    rows: int
    parts: int
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_BATCH)]
    device: str
    on_ray: bool
    versions: dict[str, str]

    def differences(self, other: Asked) -> list[str]:
        """Return the names of the fields that differ."""
        a, b = map(msgspec.to_builtins, (self, other))
        a, b = ({**asked.pop("settings"), **asked} for asked in (a, b))
        return [name for name in a if a[name] != b[name]]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A completed part, as stored in the manifest."""

    file: str
    sha256: str
    rows: Annotated[int, msgspec.Meta(ge=0)]
    errors: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Job:
    """A planned job: what its processes must agree on."""

    settings: Settings
    inputs: tuple[Path, ...]
    out: Path
    parts: int
    batch: int
    missing: tuple[int, ...]
    """The parts missing from the manifest."""
    strict: bool = False

    def part_of(self, row_id: str) -> int:
        """Return the part that a row belongs to."""
        digest = hashlib.blake2b(row_id.encode("utf-8"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.parts


def plan(
    inputs: Sequence[Path],
    out: Path,
    settings: Settings,
    *,
    device: torch.device,
    resume: bool = False,
    strict: bool = False,
    on_ray: bool = False,
) -> Job:
    """Read the inputs once, write or check _job.json, and find the missing parts.

    Raises RequestError for invalid settings, for two rows with the same id, for a folder with other
    files, for a job with rows if not `resume`, and for a damaged or different job. Raises
    UnknownBackendError.
    """
    if settings.format == "parquet":
        pyarrow_parquet()
    names = (settings.backend, settings.decode_backend)
    backends = ladder.resolve_all(name for name in names if name)
    checkpoint = open_checkpoint(
        settings.model, revision=settings.revision, random_weights=settings.random_weights
    )
    _request(settings, checkpoint, InputRow(0, "", {"prompt": [0]}))  # rejects bad settings
    ids: set[str] = set()
    for row in read_rows(inputs):
        if row.id in ids:
            raise RequestError(f"two rows have the id {row.id!r}")
        ids.add(row.id)
    if not ids:
        raise RequestError("the inputs have no rows")
    batch = settings.batch_size or _batch_size(checkpoint.config, device, len(ids))
    parts = -(-len(ids) // settings.part_rows)
    asked = Asked(
        settings=replace(settings, batch_size=None),
        inputs=tuple((path.name, folder.digest(path)) for path in inputs),
        weights=_weights(checkpoint),
        kernels=tuple(folder.digest(spec.version.path) for spec in backends if spec.version),
        rows=len(ids),
        parts=parts,
        batch_size=batch,
        device=device.type,
        on_ray=on_ray,
        versions={"gpt2-infer": __version__, "torch": str(torch.__version__)},
    )
    file = out / "_job.json"
    begun = next((path for path in out.rglob("*") if _is_output(path)), None)
    if begun is None:
        folder.write(file, msgspec.json.format(msgspec.json.encode(asked)))
    elif not file.exists():
        raise RequestError(
            f"{out} holds {begun.name}, which belongs to no job: name an empty folder"
        )
    elif not resume:
        raise RequestError(f"{out} already has a job: --resume completes it")
    else:
        known = folder.read(file, Asked)
        if settings.batch_size is None:
            batch = known.batch_size
            asked = msgspec.structs.replace(asked, batch_size=batch)
        if changed := asked.differences(known):
            raise RequestError(f"the job in {out} differs in {', '.join(changed)}")
    for temporary in out.rglob(".*.writing"):
        temporary.unlink()
    (out / "_manifest").mkdir(exist_ok=True)
    job = Job(settings, tuple(inputs), out, parts, batch, (), strict)
    return replace(job, missing=tuple(p for p in range(parts) if not _is_done(job, p)))


def _is_output(path: Path) -> bool:
    """Return whether a path is a file other than those of a job that has written no rows."""
    is_early = path.name in (".lock", "_job.json") or path.suffix == ".writing"
    return not (is_early or path.is_dir())


def _weights(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what identifies the weights: digests, or the commit on the hub."""
    if checkpoint.random_weights:
        return ()
    if checkpoint.hub_id is not None:
        return (checkpoint.folder.name,)
    return tuple(folder.digest(path) for path in sorted(checkpoint.folder.glob("*.safetensors*")))


def _batch_size(config: GPT2Config, device: torch.device, rows: int) -> int:
    """Return the batch size; on a GPU, the longest rows' caches and logits take half its memory."""
    if device.type != "cuda":
        return min(CPU_BATCH, rows)
    numel = 2 * config.n_layer * config.n_embd * config.n_positions + 8 * config.vocab_size
    fits = torch.cuda.mem_get_info(device)[0] // 2 // (4 * numel)
    return max(1, min(MAX_BATCH, rows, fits))


def _part_file(job: Job, part: int) -> Path:
    return job.out / f"part-{part:05d}.{job.settings.format}"


def _entry_file(job: Job, part: int) -> Path:
    return job.out / "_manifest" / f"{part:05d}.json"


def entries(job: Job) -> list[Entry]:
    """Return the manifest's entries; raises RequestError for a damaged one."""
    files = [_entry_file(job, part) for part in range(job.parts)]
    return [folder.read(file, Entry) for file in files if file.exists()]


def _is_done(job: Job, part: int) -> bool:
    """Return whether the part is in the manifest and its file has the digest given there."""
    file, entry = _part_file(job, part), _entry_file(job, part)
    if not entry.exists():
        return False
    digest = folder.read(entry, Entry).sha256
    return file.is_file() and folder.digest(file) == digest


def load(settings: Settings, device: torch.device) -> GPT2:
    """Return the model with the job's backends."""
    decode_backend = settings.decode_backend
    if device.type == "cpu" and decode_backend is None:
        backend = settings.backend and ladder.resolve(settings.backend)
        decode_backend = None if backend and backend.has_decode("cpu") else CPU_DECODE
    return GPT2.from_pretrained(
        settings.model,
        revision=settings.revision,
        device=device,
        dtype=settings.dtype,
        products=settings.products,
        attention=settings.backend,
        decode_attention=decode_backend,
        random_weights=settings.random_weights,
        seed=settings.sampling.seed,
    )


def work(
    job: Job,
    device: torch.device,
    *,
    rank: int = 0,
    world: int = 1,
    on_rows: Callable[[int], object] = lambda _: None,
) -> None:
    """Complete the missing parts at positions rank, rank + world, rank + 2 * world and so on.

    on_rows: called with the number of rows just completed. Raises BatchError at an error row if the
    job is strict.
    """
    rows: dict[int, list[InputRow]] = {part: [] for part in job.missing[rank::world]}
    if not rows:
        return
    for row in read_rows(job.inputs):
        if (part := job.part_of(row.id)) in rows:
            rows[part].append(row)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = load(job.settings, device)
    engine = Continuous(model, batch=job.batch, engine=job.settings.engine)
    # Several parts are completed together: the batch stays full from one part to the next.
    at_once = max(1, BATCHES_AT_ONCE * job.batch // job.settings.part_rows)
    while rows:
        parts = {part: rows.pop(part) for part in [*rows][:at_once]}
        output = complete(job, engine, [row for part in parts.values() for row in part], on_rows)
        for part, part_rows in parts.items():
            _write_part(job, part, [output[row.index] for row in part_rows])


def _write_part(job: Job, part: int, written: list[dict[str, Any]]) -> None:
    """Write a part's file and enter it in the manifest."""
    file, data = _part_file(job, part), _as_bytes(written, job.settings.format)
    folder.write(file, data)
    errors = sum(row["error"] is not None for row in written)
    entry = Entry(file.name, hashlib.sha256(data).hexdigest(), len(written), errors)
    folder.write(_entry_file(job, part), msgspec.json.encode(entry))


def complete(
    job: Job,
    engine: Continuous,
    rows: Sequence[InputRow],
    on_rows: Callable[[int], object] = lambda _: None,
) -> dict[int, dict[str, Any]]:
    """Complete rows and return the output rows by index.

    Raises BatchError at an error row if the job is strict.
    """
    output = {}
    with _one_thread():
        for row, result in _results(job.settings, engine, rows):
            if isinstance(result, str) and job.strict:
                raise BatchError(f"row {row.id}: {result}")
            output[row.index] = _output_row(job.settings, engine, row, result)
            on_rows(1)
    return output


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the number of threads changes how a CPU rounds products of few rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _results(
    settings: Settings, engine: Continuous, rows: Sequence[InputRow]
) -> Iterator[tuple[InputRow, Completion | str]]:
    """Yield each row with its completion, or the reason why it failed, in any order."""
    requests = []
    for row in rows:
        try:
            requests.append((row.index, _request(settings, engine.model, row)))
        except RequestError as error:
            yield row, str(error)
    by_index = {row.index: row for row in rows}
    for index, result in engine.run(requests):
        yield by_index[index], result


def _request(settings: Settings, model: GPT2 | Checkpoint, row: InputRow) -> Request:
    if row.error is not None or row.fields is None:
        raise RequestError(row.error)
    return Request(
        config=model.config,
        tokenizer=model.tokenizer,
        prompts=[row.fields["prompt"]],
        max_new_tokens=settings.max_new_tokens,
        mode="kv-cache",
        sampling=_sampling(settings, row),
        stop=settings.stop,
        ignore_eos=settings.ignore_eos,
    )


def _sampling(settings: Settings, row: InputRow) -> Sampling:
    one = settings.sampling
    return replace(one, seed=(one.seed + row.index) % 2**63)


def _output_row(
    settings: Settings, engine: Continuous, row: InputRow, result: Completion | str
) -> dict[str, Any]:
    done = None if isinstance(result, str) else result
    return {
        "id": row.id,
        "input": row.fields,
        "text": done and done.text,
        "tokens": done and done.tokens,
        "finish_reason": done and done.finish_reason,
        "logprob": done and done.logprob,
        "backend": done.backend if done else engine.model.attention.name,
        "decode_backend": engine.model.decode_attention.name,
        "engine": engine.engine,
        "seed": _sampling(settings, row).seed,
        "error": None if done else result,
    }


def as_table(rows: Sequence[dict[str, Any]], kind: Format) -> Any:
    """Return a pyarrow table with the columns id and line, or those of a Parquet file."""
    import pyarrow as pa

    if kind == "jsonl":
        return pa.table({"id": [row["id"] for row in rows], "line": [*map(_as_line, rows)]})
    text = ("id", "input", "text", "finish_reason", "backend", "decode_backend", "engine", "error")
    types = {name: pa.string() for name in text}
    types |= {"tokens": pa.list_(pa.int32()), "logprob": pa.float64(), "seed": pa.int64()}
    # The inputs become JSON, because rows may differ in fields.
    rows = [row | {"input": _as_line(row["input"]).rstrip()} for row in rows]
    return pa.Table.from_pylist(rows, schema=pa.schema(types))


def _as_line(value: object) -> str:
    """Return a line of JSON; values without a JSON form become text, NaN and infinity null."""
    return f"{msgspec.json.encode(value, enc_hook=str).decode()}\n"


def _as_bytes(rows: Sequence[dict[str, Any]], kind: Format) -> bytes:
    """Return the content of an output file."""
    if kind == "jsonl":
        return "".join(map(_as_line, rows)).encode()
    file = io.BytesIO()
    pyarrow_parquet().write_table(as_table(rows, kind), file)
    return file.getvalue()
