"""Timing on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def device_seconds(work: Callable[[], Any]) -> float:
    """Return the GPU time of work() in seconds, between two events on its stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def read_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Return the GPU's read bandwidth in GB/s: the median of 20 sums over `size` bytes."""
    with torch.cuda.device(device):  # the events' device
        data = torch.empty(size // 4, device=device).normal_()
        data.sum()  # warm-up
        return size / statistics.median(device_seconds(data.sum) for _ in range(20)) / 1e9
