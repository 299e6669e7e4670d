"""A job on a Ray cluster: Ray distributes the rows, keeps a checkpoint by id and writes the files.

The actors complete rows exactly as the processes of workers.py do. Every node needs gpt2-infer, and
access to the folders of the inputs and of the job.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import torch
from pyarrow import NativeFile
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import BlockBasedFileDatasink

from gpt2_infer.batch.folder import BatchError, locked
from gpt2_infer.batch.job import Job, Settings, as_table, complete, load, plan
from gpt2_infer.batch.rows import read_rows
from gpt2_infer.batch.workers import find_devices
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.errors import RequestError


def run_on_ray(
    inputs: Sequence[str | Path],
    out: str | Path,
    settings: Settings,
    *,
    address: str,
    devices: str | None,
    resume: bool = False,
    strict: bool = False,
) -> tuple[int, int]:
    """Complete the inputs' prompts into `out`; return the number of rows, and of errors.

    address: a cluster's, or "local" to start one. devices: "cpu:N" for N actors; None for one actor
    per GPU of the cluster. Raises RequestError for what plan() refuses or a cluster without GPUs,
    and BatchError if the job stops.
    """
    if devices is not None and not devices.startswith("cpu"):
        raise RequestError(f"with --ray, devices must be cpu or cpu:N, not {devices!r}")
    cpus = 0 if devices is None else len(find_devices(devices))
    # Reading and writing rows takes two CPUs more than the actors.
    local = {"num_cpus": cpus + 2, "include_dashboard": False} if address == "local" else {}
    ray.init(address=address, **local)
    try:
        actors = cpus or int(ray.cluster_resources().get("GPU", 0))
        device = torch.device("cpu" if cpus else "cuda")
        if not actors:
            raise RequestError("the cluster has no GPU: --devices cpu:N runs N processes on CPUs")
        if settings.batch_size is None and not cpus:
            raise RequestError("--batch-size is required on the GPUs of a cluster")
        files, out = [Path(path).absolute() for path in inputs], Path(out).absolute()
        with locked(out):
            job = plan(
                files, out, settings, device=device, resume=resume, strict=strict, on_ray=True
            )
            context = DataContext.get_current()
            context.checkpoint_config = CheckpointConfig(
                "id", str(out / "_checkpoint"), delete_checkpoint_on_success=False
            )
            dataset = ray.data.read_datasource(_Rows(job)).map_batches(
                _Actor,
                fn_constructor_args=(job, device),
                compute=ActorPoolStrategy(size=actors),
                batch_format="pyarrow",
                batch_size=settings.part_rows,
                num_cpus=1,
                num_gpus=0 if cpus else 1,
            )
            try:
                if settings.format == "parquet":
                    dataset.write_parquet(str(out))
                else:
                    dataset.write_datasink(_Lines(str(out), file_format="jsonl"))
            except ray.exceptions.RayError as error:
                raise BatchError(f"{error}; --resume completes the job") from error
    finally:
        ray.shutdown()
    written = read_rows(sorted(out.glob(f"*.{settings.format}")))
    errors = [(row.fields or {}).get("error") for row in written]
    return len(errors), len(errors) - errors.count(None)


class _Rows(Datasource):  # type: ignore[misc]
    """A job's rows, in blocks of part_rows."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def estimate_inmemory_data_size(self) -> int:
        """Return the size of the files."""
        return sum(path.stat().st_size for path in self.job.inputs)

    def get_read_tasks(self, *_: Any, **__: Any) -> list[ReadTask]:
        """Return a single task, because a row's seed depends on the number of rows before it."""
        return [ReadTask(self._read, BlockMetadata(None, None, None, None))]

    def _read(self) -> Iterator[pa.Table]:
        rows = read_rows(self.job.inputs)
        while some := list(itertools.islice(rows, self.job.settings.part_rows)):
            yield pa.table({"id": [row.id for row in some], "row": [*map(pickle.dumps, some)]})


class _Actor:
    """A model on a device, loaded once per job."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job = job
        self.engine = Continuous(
            load(job.settings, device), batch=job.batch, engine=job.settings.engine
        )

    def __call__(self, batch: pa.Table) -> pa.Table:
        rows = [pickle.loads(row) for row in batch["row"].to_pylist()]
        output = complete(self.job, self.engine, rows)
        return as_table([output[row.index] for row in rows], self.job.settings.format)


class _Lines(BlockBasedFileDatasink):  # type: ignore[misc]
    """Writes JSON Lines unchanged: Ray's own sink goes through pandas, which rounds."""

    def write_block_to_file(self, block: BlockAccessor, file: NativeFile) -> None:
        """Write a block's lines."""
        file.write("".join(block.to_arrow()["line"].to_pylist()).encode())
