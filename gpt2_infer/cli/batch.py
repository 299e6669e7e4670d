"""The command `gpt2-infer batch`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from gpt2_infer.cli.console import EXIT_NO_ROW, print_error
from gpt2_infer.cli.generate import ATTENTION
from gpt2_infer.cli.options import Count, Model, Text, wrong
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from cyclopts import Token

INPUT = (
    "prompts: JSON Lines (.jsonl) or Parquet (.parquet) with the columns prompt and, optionally, "
    "id; or text (.txt), one prompt per line"
)
DECODE = (
    "attention backend for decoding (default: the same as generate's, but NAIVE_PYTORCH on cpu)"
)
ENGINE = "engine: eager, graph, or auto, the faster one that supports the request"
SHARD = "I/N: complete only output files I, I + N, I + 2N and so on, with I from 0 to N - 1"
RAY = "run on the Ray cluster at ADDRESS; without an address, on this machine"
WORKERS = "Ray workers, each with a GPU or, on cpu, a core (default: as many as the cluster has)"
SIZE = "rows per batch, or auto (default): 32 on cpu; on cuda up to 512, by memory"


def _shard(_: object, tokens: Sequence[Token]) -> tuple[int, int]:
    text = tokens[0].value
    if not re.fullmatch(r"\d{1,9}/\d{1,9}", text):
        raise wrong(tokens, f"must be a shard such as 0/4, not {text[:40]!r}")
    index, count = map(int, text.split("/"))
    return index, count


@dataclass(frozen=True)
class Completed:
    """How much of a job was completed, and where."""

    rows: int
    errors: int
    files: int
    out: str


def batch(
    inputs: Annotated[tuple[Path, ...], Parameter(name="INPUT", help=INPUT)],
    /,
    *,
    out: Annotated[Path, Parameter(help="output folder")],
    file_format: Annotated[
        Literal["jsonl", "parquet"], Parameter(name="--format", help="format of the output files")
    ] = "jsonl",
    resume: Annotated[bool, Parameter(help="resume the job in the output folder, if any")] = False,
    strict: Annotated[
        bool, Parameter(help="stop at the first row that cannot be completed")
    ] = False,
    backend: Annotated[str | None, Parameter(help=ATTENTION)] = None,
    decode_backend: Annotated[str | None, Parameter(help=DECODE)] = None,
    engine: Annotated[str, Parameter(help=ENGINE)] = "auto",
    shard: Annotated[
        tuple[int, int] | None, Parameter(converter=_shard, n_tokens=1, help=SHARD)
    ] = None,
    ray: Annotated[tuple[str, ...] | None, Parameter(consume_multiple=(0, 1), help=RAY)] = None,
    workers: Annotated[Count | None, Parameter(help=WORKERS)] = None,
    batch_size: Annotated[Count | Literal["auto"], Parameter(help=SIZE)] = "auto",
    part_rows: Annotated[Count, Parameter(help="approximate rows per output file")] = 1000,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
    text: Annotated[Text, Parameter(name="*", group="Text")] = Text(),
) -> Completed:
    """Complete files of prompts; a killed job resumes where it stopped.

    ray: an address, or none to start a cluster on this machine. Raises the errors of batch.run().
    """
    from tqdm import tqdm

    from gpt2_infer import batch as job

    if workers and ray is None:
        raise RequestError("--workers needs --ray")
    if shard and ray is not None:
        raise RequestError("--shard and --ray exclude each other")
    where = asdict(model)
    how: dict[str, Any] = {"device": where.pop("device"), "resume": resume, "strict": strict}
    settings = job.Settings(
        **where,
        **text.settings(model),
        backend=backend,
        decode_backend=decode_backend,
        engine=engine,
        format=file_format,
        part_rows=part_rows,
        batch_size=None if batch_size == "auto" else batch_size,
    )
    started = time.perf_counter()
    with tqdm(unit="row", disable=None) as bar:
        how |= {"on_rows": bar.update}
        if ray is not None:
            (address,) = ray or ("local",)
            entries = job.run_on_ray(inputs, out, settings, address=address, workers=workers, **how)
        else:
            entries = job.run(inputs, out, settings, shard=shard or (0, 1), **how)
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    rows, errors = sum(e.rows for e in entries), sum(e.errors for e in entries)
    return Completed(rows, errors, len(entries), str(out))


def text(found: Completed, **_: object) -> str:
    """Return the counts."""
    return f"rows: {found.rows}, errors: {found.errors}, files: {found.files}, in {found.out}"


def exit_status(found: Completed) -> int:
    """Return whether there were rows, and none could be completed: a shard may have no file."""
    if found.errors < found.rows or not found.rows:
        return 0
    print_error("gpt2-infer", "no row could be completed: see the column error")
    return EXIT_NO_ROW
