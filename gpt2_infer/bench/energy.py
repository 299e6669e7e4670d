"""Measure a GPU's energy with the counter of its driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from gpt2_infer.bench.record import Row

MIN_SECONDS = 1.0  # of calls
WARM_UP_SECONDS = 0.3  # at their start, in which power is not read: the counter lags two advances
POLL_SECONDS = 2e-3  # it advances only ten times per second


def open_counter(device: str) -> Callable[[], float] | str:
    """Return a function that reads the joules this process's GPU has used, or why it cannot."""
    if device != "cuda":
        return "energy is measured on NVIDIA GPUs only"
    try:
        import pynvml
    except ImportError:
        return "NVML needs nvidia-ml-py: install gpt2-infer[energy]"
    try:
        pynvml.nvmlInit()
        # NVML numbers all GPUs of the machine; CUDA_VISIBLE_DEVICES does not change that.
        uuid = torch.cuda.get_device_properties(0).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def measure(contender: str, call: Callable[[], Any], device: str) -> Row:
    """Return a row with the joules per call, from at least MIN_SECONDS of calls.

    They are the mean power between the counter's first advance after WARM_UP_SECONDS and its last,
    times the mean seconds of all calls. call() must wait for the device. The row has a reason and
    no sample without a counter.
    """
    row = Row(contender=contender, metric="energy", unit="J")
    counter = open_counter(device)
    if isinstance(counter, str):
        row.status, row.reason = "refused", counter
        return row
    reads, ended = list[tuple[float, float]](), threading.Event()

    def watch() -> None:
        ended.wait(WARM_UP_SECONDS)
        while not ended.wait(POLL_SECONDS):
            reads.append((counter(), time.perf_counter()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    calls, started = 0, time.perf_counter()
    try:
        while (seconds := time.perf_counter() - started) < MIN_SECONDS:
            call()
            calls += 1
    finally:
        ended.set()
        watcher.join()
    advances = [now for last, now in pairwise(reads) if now[0] != last[0]]
    if len(advances) < 2:
        row.status, row.reason = "refused", "NVML: the counter of energy stands still"
        return row
    joules, passed = (last - first for first, last in zip(advances[0], advances[-1], strict=True))
    row.samples = [float(f"{joules / passed * seconds / calls:.6g}")]
    row.extra = {"calls": calls, "seconds": round(seconds, 3)}
    return row
