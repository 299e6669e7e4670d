"""The processes of a job: a single one, one per device, or those of torchrun.

concurrent.futures would end the other processes when one dies, would not say which one died and
how, would wait for running work after Ctrl-C, and would report progress only by task.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from attention_kernels import AttentionError
from attention_kernels.child import ending
from gpt2_infer.batch.folder import BatchError, locked
from gpt2_infer.batch.job import Job, Settings, plan, work
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.errors import GPT2InferError, RequestError

EXPECTED = (GPT2InferError, AttentionError, OSError, torch.OutOfMemoryError)
Workers = dict[Any, SpawnProcess]  # keys: our ends of the pipes


def run(
    inputs: Sequence[str | Path],
    out: str | Path,
    settings: Settings,
    *,
    devices: Sequence[torch.device],
    resume: bool = False,
    strict: bool = False,
    on_rows: Callable[[int], object] = lambda _: None,
) -> Job:
    """Complete the inputs' prompts into the folder `out`; with `resume`, the missing ones.

    devices: each gets one process. Under torchrun, or anything else that sets RANK and WORLD_SIZE,
    this process is one of those and has one device. strict: stop at the first error row.
    on_rows: called with the number of rows just completed on this machine.
    Raises RequestError for what plan() refuses, or if another process is working in `out`, and
    BatchError if the job stops.
    """
    if not devices:
        raise RequestError("there is no device to run on")
    files, out = [*map(Path, inputs)], Path(out)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and len(devices) > 1:
        raise RequestError("with WORLD_SIZE every process has one device: leave out --devices")

    with contextlib.ExitStack() as stack:

        def prepare() -> Job:
            stack.enter_context(locked(out))
            return plan(files, out, settings, device=devices[0], resume=resume, strict=strict)

        if len(devices) > 1:
            with _processes(devices) as workers:  # workers end before the lock is released
                job = prepare()
                _work_in_processes(job, workers, on_rows)
        else:
            job = stack.enter_context(_planned_by_rank_0(prepare)) if world > 1 else prepare()
            work(job, devices[0], rank=rank, world=world, on_rows=on_rows)
        return job


@contextlib.contextmanager
def _planned_by_rank_0(prepare: Callable[[], Job]) -> Iterator[Job]:
    """Have rank 0 plan the job for all ranks; at the end, wait for all of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))
    try:
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                box = [prepare()]
            except EXPECTED as error:
                box = [RequestError(str(error))]  # a backend's error may not be picklable
        dist.broadcast_object_list(box)
        (job,) = box
        if isinstance(job, RequestError):
            raise job
        yield job
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _processes(devices: Sequence[torch.device]) -> Iterator[Workers]:
    """Start one process per device; they import modules while the job is planned."""
    context = multiprocessing.get_context("spawn")
    workers: Workers = {}
    try:
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            arguments = (device, rank, len(devices), theirs)
            process = context.Process(target=_worker, args=arguments, name=f"worker {rank + 1}")
            with _without_interrupts():
                process.start()
            theirs.close()  # only the worker's end stays open: its death ends the pipe
            workers[ours] = process
        yield workers
    finally:
        for process in workers.values():
            process.terminate()
        for process in workers.values():
            process.join()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Make new processes ignore Ctrl-C, which reaches all of them: the parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets signals only in the main thread
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work_in_processes(job: Job, workers: Workers, on_rows: Callable[[int], object]) -> None:
    """Have the workers do the job; raise BatchError if one of them fails."""
    dead = []
    for pipe in workers:
        with contextlib.suppress(ConnectionError):  # the worker has died; recv() reports it
            pipe.send(job)
    while workers:
        ready: list[Any] = multiprocessing.connection.wait([*workers])
        for pipe in ready:
            try:
                message = pipe.recv()
            except (EOFError, ConnectionResetError):
                process = workers.pop(pipe)
                process.join()
                if process.exitcode:
                    dead.append(f"{process.name} {ending(process.exitcode)}")
                continue
            if isinstance(message, str):
                raise BatchError(message)
            on_rows(message)
    if dead:
        raise BatchError(f"{', '.join(dead)}; --resume completes the job")


def _worker(device: torch.device, rank: int, world: int, pipe: Any) -> None:
    """Run a worker process: report completed rows, and expected errors."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has died
        job = pipe.recv()
        try:
            work(job, device, rank=rank, world=world, on_rows=pipe.send)
        except EXPECTED as error:
            pipe.send(str(error))


def _end_with_parent() -> None:
    """End with the parent: no worker may keep writing to a job that may be resumed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def find_devices(names: str | None) -> list[torch.device]:
    """Return the devices of "all", "0,1" (of CUDA), "cpu", "cpu:2" (processes) or None.

    None is a single one: CUDA's, LOCAL_RANK's under torchrun, or the CPU without CUDA.
    Raises RequestError for any other name, UnavailableDeviceError for a missing device.
    """
    if names is None:
        local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        return [resolve_device(local)]
    if match := re.fullmatch(r"cpu(?::([1-9]\d{0,3}))?", names):
        return [torch.device("cpu")] * int(match[1] or 1)
    if not re.fullmatch(r"all|\d+(,\d+)*", names):
        raise RequestError(f"devices must be all, 0,1 or the like, cpu or cpu:N, not {names!r}")
    resolve_device("cuda")  # raises an error without CUDA
    every = range(torch.cuda.device_count())
    indices = [*every] if names == "all" else [int(index) for index in names.split(",")]
    if len({*indices}) < len(indices):
        raise RequestError(f"devices {names} names a device twice")
    return [resolve_device(f"cuda:{index}") for index in indices]
