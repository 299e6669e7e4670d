"""What takes how long on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def device_seconds(work: Callable[[], Any]) -> float:
    """Time on the GPU what work() launches, between two events of its stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def read_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Measure how many GB/s the GPU reads while it sums `size` bytes; the median of 20 sums."""
    data = torch.empty(size // 4, device=device).normal_()
    data.sum()  # the first is slower
    return size / statistics.median(device_seconds(data.sum) for _ in range(20)) / 1e9
