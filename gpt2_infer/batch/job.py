"""A job: its rows, parts and manifest, and how a process completes a shard of it.

Rows are assigned to parts by a hash of their ids. Shard I of N is every N-th part, beginning with
part I; a job in one process is shard 0 of 1. Shards share the folder and nothing else. A part is
one file: it is written under a temporary name, synced, renamed, and then entered in the manifest
with its digest. A killed shard resumes with its parts missing from the manifest. A job's folder:

    _job.json            the request: settings, digests of the inputs, number of parts
    part-00000.jsonl     a part's rows in input order; or .parquet
    _manifest/00000.json the part's digest, number of rows, and number of error rows
    .lock                locked by the process that compares its request with _job.json
    .shard-0-of-1        locked by the process that completes the shard
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import torch

from attention_kernels import ladder
from gpt2_infer import __version__
from gpt2_infer.batch import folder, formats
from gpt2_infer.batch.formats import InputRow
from gpt2_infer.checkpoint import Checkpoint, open_checkpoint, resolve_device
from gpt2_infer.config import GPT2Config, ProductsName
from gpt2_infer.engines.continuous import Completion, Continuous, Result
from gpt2_infer.errors import RequestError, check_integer
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
        if self.format not in get_args(Format):
            raise RequestError(f"format must be jsonl or parquet, not {self.format!r}")
        check_integer("part-rows", self.part_rows, 1)
        if self.batch_size is not None:
            check_integer("batch-size", self.batch_size, 1, LARGEST_BATCH)


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job's request as stored in _job.json; every shard must ask for the same."""

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


class _Part(NamedTuple):
    """A part's file and its entry in the manifest."""

    file: Path
    entry: Path

    def is_done(self) -> bool:
        """Return whether the part is in the manifest and its file has the digest given there."""
        if not self.entry.exists():
            return False
        sha256 = folder.read(self.entry, Entry).sha256
        return self.file.is_file() and folder.digest(self.file) == sha256

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the part's file and enter it in the manifest."""
        data = formats.WRITERS[self.file.suffix](rows)
        errors = sum(row["error"] is not None for row in rows)
        entry = Entry(self.file.name, hashlib.sha256(data).hexdigest(), len(rows), errors)
        folder.write(self.file, data)
        folder.write(self.entry, msgspec.json.encode(entry))


def run(
    inputs: Sequence[str | Path],
    out: str | Path,
    settings: Settings,
    *,
    device: str | torch.device | None = None,
    shard: tuple[int, int] = (0, 1),
    resume: bool = False,
    on_rows: Callable[[int], object] = lambda _: None,
) -> list[Entry]:
    """Complete a shard of the inputs' prompts into the folder `out`; return its manifest entries.

    shard: I and N, with I from 0 to N - 1; by default the whole job. resume: complete the missing
    parts of a shard that has some. on_rows: called with the number of rows just completed.

    Raises RequestError for invalid inputs or settings, for two rows with the same id, for a folder
    with other files, for a damaged or different job, for a shard that has parts if not `resume`,
    and if another process completes some of the same parts. Raises UnavailableDeviceError,
    UnknownBackendError, and BatchError if a part cannot be written.
    """
    paths, out, (index, count) = [*map(Path, inputs)], Path(out), shard
    check_integer("the number of shards", count, 1)
    check_integer("the shard", index, 0, count - 1)
    device = resolve_device(device)
    with contextlib.ExitStack() as stack:
        with folder.lock(out):
            stack.enter_context(folder.shard_lock(out, index, count))
            job = _plan(paths, out, settings, device)
        numbers = range(index, job.parts, count)
        names = {n: (f"part-{n:05d}.{settings.format}", f"_manifest/{n:05d}.json") for n in numbers}
        parts = {n: _Part(out / file, out / entry) for n, (file, entry) in names.items()}
        if not resume and any(part.file.exists() for part in parts.values()):
            raise RequestError(f"{out} already has a job: --resume completes it")
        if missing := {n: part for n, part in parts.items() if not part.is_done()}:
            # The number of threads changes how a CPU rounds products of few rows.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            _complete(paths, job, missing, device, on_rows)
        return [folder.read(part.entry, Entry) for part in parts.values()]


def _plan(inputs: Sequence[Path], out: Path, settings: Settings, device: torch.device) -> Asked:
    """Return the request, after writing it to _job.json or comparing it with the one there."""
    if settings.format == "parquet":
        formats.import_pyarrow()
    file = out / "_job.json"
    known = folder.read(file, Asked) if file.exists() else None
    visible = (path for path in out.rglob("*") if path.is_file() and path.name[0] != ".")
    if known is None and (other := next(visible, None)):
        raise RequestError(
            f"{out} holds {other.name}, which belongs to no job: name an empty folder"
        )
    names = (settings.backend, settings.decode_backend)
    versions = [spec.version for spec in ladder.resolve_all(filter(None, names)) if spec.version]
    checkpoint = open_checkpoint(
        settings.model, revision=settings.revision, random_weights=settings.random_weights
    )
    _request(settings, checkpoint, InputRow(0, "", {"prompt": [0]}))  # rejects bad settings
    digests = tuple((path.name, folder.digest(path)) for path in inputs)
    rows = known.rows if known and known.inputs == digests else _count(inputs)
    batch_size = known.batch_size if known else _batch_size(checkpoint.config, device, rows)
    asked = Asked(
        settings=replace(settings, batch_size=None),
        inputs=digests,
        weights=_weights(checkpoint),
        kernels=tuple(folder.digest(each.slot or each.path) for each in versions),
        rows=rows,
        parts=-(-rows // settings.part_rows),
        batch_size=settings.batch_size or batch_size,
        device=device.type,
        versions={"gpt2-infer": __version__, "torch": str(torch.__version__)},
    )
    if known is None:
        (out / "_manifest").mkdir(exist_ok=True)
        folder.write(file, msgspec.json.format(msgspec.json.encode(asked)))
    elif changed := asked.differences(known):
        raise RequestError(f"the job in {out} differs in {', '.join(changed)}: name another folder")
    return asked


def _count(inputs: Sequence[Path]) -> int:
    """Return the number of rows; raises RequestError if there are none, or two with one id."""
    ids: set[str] = set()
    for row in formats.read_rows(inputs):
        if row.id in ids:
            raise RequestError(f"two rows have the id {row.id!r}")
        ids.add(row.id)
    if not ids:
        raise RequestError("the inputs have no rows")
    return len(ids)


def _weights(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the digests of the weights, or their commit on the hub; nothing for random ones."""
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


def _complete(
    inputs: Sequence[Path],
    job: Asked,
    parts: dict[int, _Part],
    device: torch.device,
    on_rows: Callable[[int], object],
) -> None:
    """Complete and write parts."""
    settings = job.settings
    waiting: dict[int, list[InputRow]] = {number: [] for number in parts}
    for row in formats.read_rows(inputs):
        digest = hashlib.blake2b(row.id.encode("utf-8"), digest_size=8).digest()
        if (number := int.from_bytes(digest, "big") % job.parts) in waiting:
            waiting[number].append(row)
    engine = Continuous(load(settings, device), batch=job.batch_size, engine=settings.engine)
    # Several parts are completed together: the batch stays full from one part to the next.
    at_once = max(1, BATCHES_AT_ONCE * job.batch_size // settings.part_rows)
    while waiting:
        some = {number: waiting.pop(number) for number in [*waiting][:at_once]}
        rows = {row.index: row for part_rows in some.values() for row in part_rows}
        written = {}
        for index, result in _results(settings, engine, rows):
            written[index] = _output_row(settings, engine, rows[index], result)
            on_rows(1)
        for number, part_rows in some.items():
            parts[number].write([written[row.index] for row in part_rows])


def _results(settings: Settings, engine: Continuous, rows: dict[int, InputRow]) -> Iterator[Result]:
    """Yield each row's completion, or the reason why it failed, by index and in any order."""
    requests = []
    for index, row in rows.items():
        try:
            requests.append((index, _request(settings, engine.model, row)))
        except RequestError as error:
            yield index, str(error)
    yield from engine.run(requests)


def _request(settings: Settings, model: GPT2 | Checkpoint, row: InputRow) -> Request:
    if row.error is not None or row.fields is None:
        raise RequestError(row.error)
    return Request(
        config=model.config,
        tokenizer=model.tokenizer,
        prompts=[row.fields["prompt"]],
        max_new_tokens=settings.max_new_tokens,
        mode="kv-cache",
        sampling=replace(settings.sampling, seed=_seed(settings, row)),
        stop=settings.stop,
        ignore_eos=settings.ignore_eos,
    )


def _seed(settings: Settings, row: InputRow) -> int:
    return (settings.sampling.seed + row.index) % 2**63


def _output_row(
    settings: Settings, engine: Continuous, row: InputRow, result: Completion | str
) -> dict[str, Any]:
    fields = {"id": row.id, "input": row.fields, "backend": engine.model.attention.name}
    fields |= {"decode_backend": engine.model.decode_attention.name, "engine": engine.engine}
    fields |= {"error": result} if isinstance(result, str) else vars(result)
    return dict.fromkeys(formats.COLUMNS) | fields | {"seed": _seed(settings, row)}
