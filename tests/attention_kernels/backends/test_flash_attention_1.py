"""FlashAttention-1 (csrc/fa1): the document's names and errors, and the kernel for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_kernels import list_backends
from attention_kernels.judge.suite import Case
from attention_kernels.judge.truth import naive_attention, reference_attention
from tests.attention_kernels.backends.common import dtype_of, for_each
from tests.conftest import on_every_device, usable

# The names are those of the document, in its order.
LADDER = {
    "FLASH_ATTENTION_1_BASELINE": "float16",
    "FLASH_ATTENTION_1_REGISTER_TILED": "float16",
    "FLASH_ATTENTION_1_WARP_REDUCTION": "float16",
    "FLASH_ATTENTION_1_TENSOR_CORE_SCORES": "float16",
    "FLASH_ATTENTION_1_TENSOR_CORE": "float16",
    "FLASH_ATTENTION_1_FP64": "float64",
    "FLASH_ATTENTION_1_CPU": "float32",
}
PRECISIONS = {"float16": "fp16", "float32": "ieee-fp32", "float64": "fp64"}
HALF = [name for name, dtype in LADDER.items() if dtype == "float16"]


def test_the_ladder_has_the_documents_names():
    specs = [spec for spec in list_backends() if spec.family == "fa1"]
    assert {spec.name: spec.dtypes for spec in specs} == {n: (d,) for n, d in LADDER.items()}
    for spec in specs:
        assert dict(spec.precisions) == {(d := spec.dtypes[0]): PRECISIONS[d]}
        assert spec.head_dims == (32, 64, 128)
        on_cpu_only = spec.name == "FLASH_ATTENTION_1_CPU"
        assert spec.device_types == (("cpu",) if on_cpu_only else ("cuda", "cpu"))
        assert spec.emulated_on == (() if on_cpu_only else ("cpu",))


# At B=32 H=8 L=1024 head_dim=32, without a causal mask, the document reports errors of 3.66e-4 for
# half precision and 1.3e-7 for double. It states neither inputs nor reference: here the inputs are
# normal and rounded to the kernel's dtype, and the reference is float64. The emulator gets one of
# the 256 heads.
@on_every_device
@for_each([*HALF, "FLASH_ATTENTION_1_FP64"])
def test_the_error_is_below_the_documents(name, device):
    spec = usable(name, device)
    batch, num_heads = (32, 8) if device == "cuda" else (1, 1)
    q, k, v = Case(1024, 32, batch=batch, num_heads=num_heads, dtype=dtype_of(spec)).inputs(device)
    o = spec.attention(q, k, v, is_causal=False)
    found = (o.double() - reference_attention(q, k, v, is_causal=False)).abs().max().item()
    assert 0 < found < (3.66e-4 if name in HALF else 1.3e-7)


@on_every_device
@for_each(HALF)
def test_half_precision_is_more_exact_than_plain_pytorch(name, device):
    """S and the running sums are float, so the error is little more than one rounding."""
    spec = usable(name, device)
    for scale in (0.02, 1.0, 8.0):
        q, k, v = Case(200, 64, scale, dtype=torch.float16).inputs(device)
        expected = reference_attention(q, k, v)
        error = (spec.attention(q, k, v).double() - expected).abs().max().item()
        naive = (naive_attention(q, k, v).double() - expected).abs().max().item()
        rounding = (expected.half().double() - expected).abs().max().item()
        assert error <= min(naive, 2 * rounding)


OPENMP = """
import ctypes, hashlib, time
from attention_kernels import get_backend
from attention_kernels.judge.suite import Case
from attention_kernels.ladder import build
spec = get_backend("FLASH_ATTENTION_1_CPU")
spec.prepare("cpu")
inputs = [(Case(500, 64, is_causal=is_causal).inputs("cpu"), is_causal) for is_causal in (0, 1)]
# The kernel's own OpenMP: torch may bring another.
openmp = ctypes.CDLL(str(build.build(spec.version, "emulator")))
for threads in (1, 2):
    openmp.omp_set_num_threads(threads)
    digest = hashlib.sha256()
    process, main = time.process_time(), time.thread_time()
    for qkv, is_causal in inputs * 3:
        digest.update(spec.attention(*qkv, is_causal=bool(is_causal)).numpy())
    process, main = time.process_time() - process, time.thread_time() - main
    print(digest.hexdigest(), main / process)
"""


@pytest.mark.slow
def test_the_cpu_kernel_shares_its_work_and_gives_the_same_bits():
    """The wait policy is passive, so that a waiting thread uses no processor time."""
    usable("FLASH_ATTENTION_1_CPU", "cpu")
    done = subprocess.run(
        [sys.executable, "-c", OPENMP],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=True,
    )
    alone, part_alone, shared, part_shared = done.stdout.split()
    assert alone == shared
    # The main thread's share of the processor time; no duration is asserted.
    assert float(part_alone) > 0.99
    assert float(part_shared) < 0.9
