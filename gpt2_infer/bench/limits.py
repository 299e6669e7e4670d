"""Measure a GPU's limits: bandwidth, matrix products and multiply-adds."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from ctypes import c_int, c_void_p
from pathlib import Path
from typing import Any

import torch

from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.op import c_struct, load_op

SOURCE = Path(__file__).parent / "csrc" / "v01_instruction_rates.cu"
KINDS = ("ffma", "mma_float16", "mma_tf32")  # the kernel numbers them in this order
THREADS = 256
ITERATIONS = 4096  # takes about a millisecond


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


def gpu_limits(dtypes: Iterable[str], *, instructions: bool) -> dict[str, float]:
    """Measure the GPU's limits: copy_gbps and, per dtype, matmul_<dtype>_tflops.

    Medians of 5: a copy of 1 GiB, counting bytes read and written, and an 8192^3 product.
    instructions: also those of instruction_tflops(), which are built first; with nvcc and compute
    capability 8.0 or higher only. Raises BuildError.
    """

    def seconds(work: Callable[[], Any]) -> float:
        return statistics.median([device_seconds(work) for _ in range(6)][1:])

    source, target = torch.zeros(2, 2**30, dtype=torch.uint8, device="cuda")
    limits = {"copy_gbps": 2 * 2**30 / seconds(lambda: target.copy_(source)) / 1e9}
    for dtype in sorted(dtypes):
        x = torch.randn(8192, 8192, device="cuda").to(getattr(torch, dtype))
        out = torch.empty_like(x)
        work = functools.partial(torch.mm, x, x, out=out)
        limits[f"matmul_{dtype}_tflops"] = 2 * 8192**3 / seconds(work) / 1e12
    can_build = not compilers.missing_compiler("cuda")
    if instructions and can_build and torch.cuda.get_device_capability() >= (8, 0):
        limits |= instruction_tflops()
    return {key: float(f"{value:.4g}") for key, value in limits.items()}


RateParams = c_struct((c_void_p, "counts"), (c_int, "blocks iterations kind"))
"""The C struct StructParams of the kernel."""


class Rate:
    """One kind of instruction, repeated by every thread of some blocks; raises BuildError."""

    def __init__(self, kind: str, blocks: int, iterations: int, device: str) -> None:
        version = header.parse_header(SOURCE, "instruction_rates_")
        self._op = load_op(version, device, "the instruction rates")
        self._counts = torch.empty(blocks * THREADS, device=device)
        params = RateParams(self._counts.data_ptr(), blocks, iterations, KINDS.index(kind))
        self._params = torch.frombuffer(bytearray(params), dtype=torch.uint8)

    def run(self) -> None:
        """Launch the kernel."""
        self._op(self._counts, self._params)

    def flops(self) -> float:
        """Return the operations of a run; a multiply-add counts as two."""
        return 2 * self._counts.double().sum().item()


def instruction_tflops() -> dict[str, float]:
    """Measure <kind>_tflops of each kind on this GPU, medians of 5; raises BuildError."""
    found = {}
    blocks = 8 * torch.cuda.get_device_properties().multi_processor_count
    for kind in KINDS:
        rate = Rate(kind, blocks, ITERATIONS, "cuda")
        seconds = statistics.median([device_seconds(rate.run) for _ in range(6)][1:])
        found[f"{kind}_tflops"] = rate.flops() / seconds / 1e12
    return found
