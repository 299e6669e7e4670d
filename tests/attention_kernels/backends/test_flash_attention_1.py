"""FlashAttention-1 (csrc/fa1): what the general suite of test_cuda.py does not ask of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_kernels import get_backend, ladder, list_backends
from attention_kernels.judge.conformance import Case
from attention_kernels.judge.reference import naive_attention, reference_attention
from tests.attention_kernels.backends.test_cuda import dtype_of, for_each
from tests.conftest import DEVICES, usable

on_every_device = pytest.mark.parametrize("device", DEVICES)

SQUARE = "kBlockM x kBlockN = 16 x 16"
# dtype and tile, in the order of the files
LADDER = {
    "FLASH_ATTENTION_1_BASELINE": ("float16", f"{SQUARE}, block 64"),
    "FLASH_ATTENTION_1_REGISTER_TILED": ("float16", "kBlockM x kBlockN = 32 x 32, block 64"),
    "FLASH_ATTENTION_1_WARP_REDUCTION": ("float16", f"{SQUARE}, block 64"),
    "FLASH_ATTENTION_1_TENSOR_CORE_SCORES": ("float16", f"{SQUARE}, block 32"),
    "FLASH_ATTENTION_1_TENSOR_CORE": ("float16", f"{SQUARE}, block 32"),
    "FLASH_ATTENTION_1_FP64": ("float64", f"{SQUARE}, block 64"),
    "FLASH_ATTENTION_1_CPU": ("float32", "kBlockM = 16 queries, whole rows of S"),
}
PRECISIONS = {"float16": "fp16", "float32": "ieee-fp32", "float64": "fp64"}
HALF = [name for name, (dtype, _) in LADDER.items() if dtype == "float16"]


def test_the_ladder_is_the_document_s():
    list_backends()
    assert list(ladder.versions("fa1")) == list(LADDER)


@pytest.mark.parametrize("name", LADDER)
def test_each_tells_its_dtype_and_tile(name):
    dtype, tile = LADDER[name]
    spec, version = get_backend(name), ladder.versions()[name]
    assert dict(spec.precisions) == {dtype: PRECISIONS[dtype]}
    assert version.tile == tile
    assert spec.head_dims == (32, 64, 128)
    assert not spec.needs_contiguous
    if name == "FLASH_ATTENTION_1_CPU":
        assert (spec.device_types, spec.emulated_on) == (("cpu",), ())
    else:
        assert (spec.device_types, spec.emulated_on) == (("cuda", "cpu"), ("cpu",))


def test_the_negative_experiments_are_told_as_such():
    list_backends()
    told = {
        name: version.expect.split(",")[0]
        for name, version in ladder.versions("fa1").items()
        if "negative" in version.title
    }
    assert told == {
        "FLASH_ATTENTION_1_REGISTER_TILED": "the document finds it slower",
        "FLASH_ATTENTION_1_WARP_REDUCTION": "slower",
    }


# The document's errors at its case, B=32 H=8 L=1024 head_dim=32: 3.66e-4 for half precision, 1.3e-7
# for double. It does not say what the inputs are, nor what the errors are against: taken to be
# normal, rounded to the kernel's dtype before either is computed, and float64. There is no causal
# mask: it lists that as future work. The emulator gets one head of the 256.
@on_every_device
@for_each([*HALF, "FLASH_ATTENTION_1_FP64"])
def test_the_error_is_below_the_document_s(name, device):
    spec = usable(name, device)
    batch, num_heads = (32, 8) if device == "cuda" else (1, 1)
    q, k, v = Case(1024, 32, batch=batch, num_heads=num_heads, dtype=dtype_of(spec)).inputs(device)
    o = spec.attention(q, k, v, is_causal=False)
    found = (o.double() - reference_attention(q, k, v, is_causal=False)).abs().max().item()
    assert 0 < found < (3.66e-4 if name in HALF else 1.3e-7)


@pytest.mark.slow
@on_every_device
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_double_precision_is_double_all_the_way(head_dim, device):
    """A float anywhere, the scale's included, would show in the ninth digit."""
    spec = usable("FLASH_ATTENTION_1_FP64", device)
    for is_causal in (True, False):
        for softmax_scale in (None, 0.3):
            q, k, v = Case(200, head_dim, batch=2, dtype=torch.float64).inputs(device)
            o = spec.attention(q, k, v, softmax_scale=softmax_scale, is_causal=is_causal)
            expected = reference_attention(q, k, v, softmax_scale, is_causal)
            torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)


@on_every_device
@for_each(HALF)
def test_half_precision_is_more_exact_than_plain_pytorch(name, device):
    """S and the running sums are float: as good as rounding the result alone, and a bit."""
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
from attention_kernels.judge.conformance import Case
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
    """A thread that waits does no work: the wait policy is passive."""
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
    # Whose processor time it was, not how much: no timing is asserted.
    assert float(part_alone) > 0.99
    assert float(part_shared) < 0.9
