"""The command `gpt2-infer batch`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpt2_infer.cli.console import EXIT_NO_ROW, print_error
from gpt2_infer.cli.options import Count, Model, Text, matching
from gpt2_infer.errors import RequestError

SHARD = matching(
    r"\d{1,9}/\d{1,9}",
    "a shard such as 0/4",
    lambda text: tuple(map(int, text.split("/"))),
    n_tokens=1,
)


@dataclass(frozen=True)
class Completed:
    """How much of a job was completed, and where."""

    rows: int
    errors: int
    files: int
    out: str


def batch(
    inputs: Annotated[tuple[Path, ...], Parameter(name="INPUT")],
    /,
    *,
    out: Path,
    file_format: Annotated[Literal["jsonl", "parquet"], Parameter(name="--format")] = "jsonl",
    resume: bool = False,
    backend: str | None = None,
    decode_backend: str | None = None,
    engine: str = "auto",
    shard: Annotated[tuple[int, int] | None, SHARD] = None,
    ray: Annotated[tuple[str, ...] | None, Parameter(consume_multiple=(0, 1))] = None,
    workers: Count | None = None,
    batch_size: Count | Literal["auto"] = "auto",
    part_rows: Count = 1000,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
    text: Annotated[Text, Parameter(name="*", group="Text")] = Text(),
) -> Completed:
    """Complete files of prompts; a killed job resumes where it stopped.

    ray: an address, or none to start a cluster on this machine. Raises the errors of batch.run().

    Args:
        inputs: prompts: JSON Lines (.jsonl) or Parquet (.parquet) with the columns prompt and,
            optionally, id; or text (.txt), one prompt per line
        out: output folder
        file_format: format of the output files
        resume: resume the job in the output folder, if any
        backend: attention backend; see `gpt2-infer backends` (default: on cuda CUSTOM_CUDA if
            it is available and takes the model, else PYTORCH_SDPA_EFFICIENT_ATTENTION;
            PYTORCH_SDPA_FLASH_ATTENTION on cpu)
        decode_backend: attention backend for decoding (default: the same as generate's, but
            NAIVE_PYTORCH on cpu)
        engine: engine: eager, graph, or auto, the faster one that supports the request
        shard: I/N: complete only output files I, I + N, I + 2N and so on, with I from 0 to N -
            1
        ray: run on the Ray cluster at ADDRESS; without an address, on this machine
        workers: Ray workers, each with a GPU or, on cpu, a core (default: as many as the
            cluster has)
        batch_size: rows per batch, or auto (default): 32 on cpu; on cuda up to 512, by memory
        part_rows: approximate rows per output file
        model: the model
        text: where a text ends, and how tokens are chosen
    """
    from tqdm import tqdm

    from gpt2_infer import batch as job

    if workers and ray is None:
        raise RequestError("--workers needs --ray")
    if shard and ray is not None:
        raise RequestError("--shard and --ray exclude each other")
    where = asdict(model)
    how: dict[str, Any] = {"device": where.pop("device"), "resume": resume}
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
    with tqdm(unit="row", disable=None) as bar:
        how |= {"on_rows": bar.update}
        if ray is not None:
            (address,) = ray or ("local",)
            entries = job.run_on_ray(inputs, out, settings, address=address, workers=workers, **how)
        else:
            entries = job.run(inputs, out, settings, shard=shard or (0, 1), **how)
    rows, errors = sum(e.rows for e in entries), sum(e.errors for e in entries)
    return Completed(rows, errors, len(entries), str(out))


def text(completed: Completed, **_: object) -> str:
    """Return the counts."""
    rows, errors = completed.rows, completed.errors
    return f"rows: {rows}, errors: {errors}, files: {completed.files}, in {completed.out}"


def exit_status(completed: Completed) -> int:
    """Return whether there were rows, and none could be completed: a shard may have no file."""
    if completed.errors < completed.rows or not completed.rows:
        return 0
    print_error("gpt2-infer", "no row could be completed: see the column error")
    return EXIT_NO_ROW
