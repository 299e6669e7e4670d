"""PyTorch's memory-efficient attention gets the parameters of the call."""

from __future__ import annotations

import struct

import pytest

from attention_kernels import UnsupportedError
from attention_kernels.inspection import pytorch_kernel
from attention_kernels.inspection.gpus import gpus
from attention_kernels.inspection.predict import Case

GPUS = gpus()
CASE = Case(2, 1000, 12, 64, is_causal=True)
TERABYTE = 2**40


def test_the_parameters_are_those_of_the_struct_in_libtorch():
    """The kernel of PyTorch 2.11 has one parameter of 0x110 bytes."""
    found = pytorch_kernel.parameters(CASE)
    assert len(found) == 0x110
    assert struct.unpack_from("<3Q", found) == (8 * TERABYTE, 9 * TERABYTE, 10 * TERABYTE)
    assert struct.unpack_from("<Q", found, 64) == (11 * TERABYTE,)
    scale, *sizes, mask = struct.unpack_from("<f5iB", found, 92)
    assert (scale, sizes, mask) == (0.125, [64, 64, 1000, 1000, 1000], 1)
    strides = struct.unpack_from("<8i", found, 120)
    assert strides == (768, 768, 768, 0, 768, 64, 64, 64)
    assert struct.unpack_from("<3q", found, 160) == (768_000,) * 3
    assert struct.unpack_from("<2i", found, 192) == (2, 12)


def test_the_launch_is_that_of_pytorch(monkeypatch, tmp_path):
    library = tmp_path / "libtorch_cuda.so"
    monkeypatch.setenv(pytorch_kernel.LIBRARY, str(library))
    with pytest.raises(UnsupportedError, match=r"there is no .*libtorch_cuda\.so"):
        pytorch_kernel.request_of(GPUS["h200"], CASE, "float32")
    library.touch()
    found = pytorch_kernel.request_of(GPUS["h200"], CASE, "float32")
    assert found.kernel == "fmha_cutlassF_f32_aligned_64x64_rf_sm80"
    assert (found.grid, found.block) == ((16, 12, 2), (32, 4, 1))
    wide = pytorch_kernel.request_of(GPUS["a100"], CASE._replace(head_dim=128), "bfloat16")
    assert wide.kernel == "fmha_cutlassF_bf16_aligned_64x128_rf_sm80"
    assert wide.block == (32, 8, 1)


def test_what_is_not_known_of_pytorch_is_refused_with_every_reason():
    case = CASE._replace(head_dim=256)
    with pytest.raises(UnsupportedError, match=r"T4 is sm_75; dtype float64 .*; head_dim 256"):
        pytorch_kernel.request_of(GPUS["t4"], case, "float64")
