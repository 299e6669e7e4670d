"""Measure a GPU's peak rate of multiply-adds in registers, with csrc/v01_*.cu."""

from __future__ import annotations

import ctypes
import statistics
from pathlib import Path

import torch

from attention_kernels.ladder import header
from attention_kernels.ladder.op import load_op
from gpt2_infer.device_time import device_seconds

SOURCE = Path(__file__).parent / "csrc" / "v01_instruction_rates.cu"
KINDS = ("ffma", "mma_float16", "mma_tf32")  # the kernel numbers them in this order
THREADS = 256
ITERATIONS = 4096  # takes about a millisecond


class RateParams(ctypes.Structure):
    """The C struct StructParams of the kernel."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        ("blocks", ctypes.c_int),
        ("iterations", ctypes.c_int),
        ("kind", ctypes.c_int),
    )


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
