"""A job on Ray: each worker is a task of Ray that completes a shard, as one process would.

Every node needs gpt2-infer[ray] and the folders of the inputs, of the job and of the weights.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attention_kernels import AttentionError
from gpt2_infer.batch.folder import BatchError
from gpt2_infer.batch.job import Entry, Settings, run
from gpt2_infer.errors import RequestError


def run_on_ray(
    inputs: Sequence[str | Path],
    out: str | Path,
    settings: Settings,
    *,
    address: str = "local",
    device: str | None = None,
    workers: int | None = None,
    resume: bool = False,
    on_rows: Callable[[int], object] = lambda _: None,
) -> list[Entry]:
    """Complete the inputs' prompts into the folder `out` on Ray; return the manifest's entries.

    address: a cluster's, or "local" to start one on this machine. device: "cpu" or "cuda"; None is
    cuda if the cluster has GPUs. workers: how many, each with a GPU or a core to itself; None is as
    many as the cluster has. The other arguments and errors are those of run(). Raises BatchError if
    Ray loses a worker, after the others have finished.
    """
    if device not in (None, "cuda", "cpu"):
        raise RequestError(f"device {device}: Ray itself chooses the GPU of each worker")
    try:
        import ray
    except ImportError:
        raise RequestError("Ray is not installed: install gpt2-infer[ray]") from None
    entries: list[Entry] = []
    lost: list[str] = []
    try:
        cluster = ray.init(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RequestError(f"Ray cannot be used at {address}: {error}") from error
    with cluster:
        resources = ray.cluster_resources()
        kind = "GPU" if device == "cuda" or (device is None and "GPU" in resources) else "CPU"
        available = int(resources.get(kind, 0))
        count = available if workers is None else workers
        if not 0 < count <= available:
            raise RequestError(f"a cluster with {available} {kind}s cannot run {count} workers")
        needs = {"num_cpus": int(kind == "CPU"), "num_gpus": int(kind == "GPU")}
        complete = ray.remote(max_retries=0, **needs)(_shard)
        how = {"device": "cuda" if kind == "GPU" else "cpu", "resume": resume}
        files = ([Path(path).absolute() for path in inputs], Path(out).absolute(), settings)
        shards = {complete.remote(*files, shard=(i, count), **how): i for i in range(count)}
        while shards:
            for shard in ray.wait([*shards])[0]:
                try:
                    result = ray.get(next(shard))
                except StopIteration:
                    del shards[shard]
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError:
                    lost.append(f"{shards.pop(shard)}/{count}")
                else:
                    on_rows(result) if isinstance(result, int) else entries.extend(result)
    if lost:
        raise BatchError(f"Ray lost shard {', '.join(lost)}; --resume completes the job")
    return sorted(entries, key=lambda entry: entry.file)


def _shard(*arguments: Any, **options: Any) -> Iterator[int | list[Entry]]:
    """Complete a shard; yield the number of rows completed in each second, then its entries."""
    numbers: deque[int] = deque()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        shard = pool.submit(run, *arguments, on_rows=numbers.append, **options)
        while not shard.done():
            concurrent.futures.wait([shard], timeout=1)
            yield sum(numbers.popleft() for _ in range(len(numbers)))
    try:
        yield shard.result()
    except (AttentionError, OSError, torch.OutOfMemoryError) as error:
        raise BatchError(str(error)) from error  # these may not survive the way to the driver
