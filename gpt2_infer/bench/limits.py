"""Measure a GPU's limits: bandwidth, matrix products and multiply-adds."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from ctypes import c_int, c_void_p
from pathlib import Path
from typing import Any

import torch

from attention_kernels.judge.caller import clocked
from attention_kernels.ladder import compilers
from attention_kernels.ladder.op import c_struct
from gpt2_infer.product import own_op

SOURCE = Path(__file__).parent / "csrc" / "v01_instruction_rates.cu"
KINDS = ("ffma", "mma_float16", "mma_tf32")  # the kernel numbers them in this order
THREADS = 256
ITERATIONS = 4096  # takes about a millisecond


def read_bandwidth() -> float:
    """Return the GPU's read bandwidth in GB/s: the median of 20 sums over 4 GiB."""
    data = torch.empty(2**30, device="cuda").normal_()
    return data.nbytes / median_seconds(data.sum, 20) / 1e9


def median_seconds(work: Callable[[], Any], calls: int = 5) -> float:
    """Return the median GPU time of some calls of work() in seconds, after a first one."""
    return statistics.median([clocked(work, on_gpu=True)[0] for _ in range(calls + 1)][1:])


def gpu_limits(dtypes: Iterable[str], *, instructions: bool) -> dict[str, float]:
    """Measure the GPU's limits: copy_gbps and, per dtype, matmul_<dtype>_tflops.

    Medians of 5: a copy of 1 GiB, counting bytes read and written, and an 8192^3 product.
    instructions: also those of instruction_tflops(), which are built first; with nvcc and compute
    capability 8.0 or higher only. Raises BuildError.
    """
    source, target = torch.zeros(2, 2**30, dtype=torch.uint8, device="cuda")
    limits = {"copy_gbps": 2 * 2**30 / median_seconds(lambda: target.copy_(source)) / 1e9}
    for dtype in sorted(dtypes):
        x = torch.randn(8192, 8192, device="cuda").to(getattr(torch, dtype))
        out = torch.empty_like(x)
        work = functools.partial(torch.mm, x, x, out=out)
        limits[f"matmul_{dtype}_tflops"] = 2 * 8192**3 / median_seconds(work) / 1e12
    can_build = not compilers.missing_compiler("cuda")
    if instructions and can_build and torch.cuda.get_device_capability() >= (8, 0):
        limits |= instruction_tflops()
    return {key: float(f"{value:.4g}") for key, value in limits.items()}


RateParams = c_struct((c_void_p, "counts"), (c_int, "blocks iterations kind"))
"""The C struct StructParams of the kernel."""


def rate(
    kind: str, blocks: int, iterations: int, device: str
) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a function in which every thread of some blocks repeats a kind of instruction.

    The tensor gets the multiply-adds of each thread. Raises BuildError.
    """
    counts = torch.empty(blocks * THREADS, device=device)
    params = RateParams(counts.data_ptr(), blocks, iterations, KINDS.index(kind))
    packed = torch.frombuffer(bytearray(params), dtype=torch.uint8)
    op = own_op(SOURCE, "instruction_rates_", device)
    return functools.partial(op, counts, packed), counts


def instruction_tflops() -> dict[str, float]:
    """Measure <kind>_tflops of each kind on this GPU, medians of 5; raises BuildError."""
    found = {}
    blocks = 8 * torch.cuda.get_device_properties().multi_processor_count
    for kind in KINDS:
        run, counts = rate(kind, blocks, ITERATIONS, "cuda")
        seconds = median_seconds(run)  # first, as it fills counts
        found[f"{kind}_tflops"] = 2 * counts.double().sum().item() / seconds / 1e12
    return found
