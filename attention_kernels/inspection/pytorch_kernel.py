"""Predict PyTorch's memory-efficient attention, whose kernels are in libtorch_cuda.so.

The parameters are those of AttentionKernel::Params in PyTorch's header
ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h, as of PyTorch 2.10 to 2.13.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import binary
from attention_kernels.inspection.binary import Request
from attention_kernels.inspection.blocks import WARP
from attention_kernels.inspection.explain import Explanation
from attention_kernels.inspection.gpus import GpuModel
from attention_kernels.inspection.predict import Case, Prediction

BACKEND = "PYTORCH_SDPA_EFFICIENT_ATTENTION"
LIBRARY = "ATTENTION_TORCH_LIBRARY"
"""The environment variable that names another libtorch_cuda.so than the installed one."""
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_QUERIES = 64  # per block
_Pointer, _Int, _Long = ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64


class _Params(ctypes.Structure):
    """The parameters of the kernel, those that stay zero without their names."""

    _fields_: ClassVar = [
        *((name, _Pointer) for name in ("query", "key", "value")),
        ("bias_and_lengths", _Pointer * 4),
        ("causal_diagonal_offset", _Int),
        ("output", _Pointer),
        ("accumulator_and_logsumexp", _Pointer * 2),
        ("window_size", _Int),
        ("scale", ctypes.c_float),
        *((name, _Int) for name in ("head_dim", "head_dim_value")),
        *((name, _Int) for name in ("num_queries", "num_keys", "num_keys_absolute")),
        ("custom_mask_type", ctypes.c_uint8),
        *((f"{name}_row", _Int) for name in ("query", "key", "value", "bias", "output")),
        *((f"{name}_head", _Int) for name in ("query", "key", "value")),
        ("bias_head", _Long),
        *((f"{name}_batch", _Long) for name in ("query", "key", "value", "bias")),
        *((name, _Int) for name in ("num_batches", "num_heads")),
        ("use_dropout", ctypes.c_bool),
        ("dropout_offset", ctypes.c_uint64),
        ("dropout", ctypes.c_float),
        ("random_state", ctypes.c_uint64 * 3),
        ("is_captured", ctypes.c_bool),
        ("random_pointers", _Pointer * 2),
    ]


def library() -> Path:
    """Return the path of libtorch_cuda.so; raises UnsupportedError if the file does not exist."""
    given = os.environ.get(LIBRARY)
    path = Path(given) if given else Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not path.is_file():
        reason = f"its kernels are in libtorch_cuda.so, and there is no {path}; {LIBRARY} names one"
        raise UnsupportedError(BACKEND, [reason])
    return path


def parameters(case: Case) -> bytes:
    """Return the bytes of the parameters of self-attention over contiguous tensors."""
    batch, seqlen, num_heads, head_dim, is_causal = case
    row = num_heads * head_dim
    found = _Params(
        **{name: address << 40 for address, name in enumerate(("query", "key", "value"), 8)},
        **{f"{name}_row": row for name in ("query", "key", "value", "output")},
        **{f"{name}_head": head_dim for name in ("query", "key", "value")},
        **{f"{name}_batch": seqlen * row for name in ("query", "key", "value")},
        output=11 << 40,
        scale=head_dim**-0.5,
        head_dim=head_dim,
        head_dim_value=head_dim,
        num_queries=seqlen,
        num_keys=seqlen,
        num_keys_absolute=seqlen,
        custom_mask_type=int(is_causal),  # from the top left
        num_batches=batch,
        num_heads=num_heads,
    )
    return bytes(found)


def request_of(gpu: GpuModel, case: Case, dtype: str) -> Request:
    """Return PyTorch's launch; raises UnsupportedError for a GPU or shape with unknown kernels."""
    batch, seqlen, num_heads, head_dim, _ = case
    reasons = []
    if int(gpu.arch) < 80:
        reasons.append(f"only its kernels for sm_80 are known, and {gpu.name} is sm_{gpu.arch}")
    if dtype not in _DTYPES:
        reasons.append(f"dtype {dtype} (it takes {', '.join(_DTYPES)})")
    if head_dim % 8 or head_dim > 128:
        reasons.append(f"head_dim {head_dim} (predictions take multiples of 8 up to 128)")
    if reasons:
        raise UnsupportedError(BACKEND, reasons)
    keys = 64 if head_dim <= 64 else 128
    kernel = f"fmha_cutlassF_{_DTYPES[dtype]}_aligned_{_QUERIES}x{keys}_rf_sm80"
    grid = -(-seqlen // _QUERIES), num_heads, batch
    block = WARP, _QUERIES * keys // WARP**2, 1
    arguments = [f"hex:{parameters(case).hex()}"]
    min_bytes = 4 * batch * seqlen * num_heads * head_dim * getattr(torch, dtype).itemsize
    return Request(library(), kernel, grid, block, arguments=arguments, min_bytes=min_bytes)


def predict_backend(gpu: GpuModel, cases: Sequence[Case], dtype: str) -> list[Prediction]:
    """Predict a call in each case; they differ only in length.

    Raises the errors of request_of(), binary.read() and binary.predict_kernel().
    """
    requests = [request_of(gpu, case, dtype) for case in cases]
    with tempfile.TemporaryDirectory() as folder:  # the library is large: read it once
        symbol = binary.extract(requests[0], gpu, Path(folder))
        cubin = Path(folder, binary.CUBIN)
        return [
            _named(binary.predict_kernel(replace(one, path=cubin, kernel=symbol), gpu), case)
            for one, case in zip(requests, cases, strict=True)
        ]


def explain_backend(gpu: GpuModel, case: Case, dtype: str) -> Explanation:
    """Predict and explain a call; see predict_backend()."""
    found = binary.explain_kernel(request_of(gpu, case, dtype), gpu)
    return replace(found, prediction=_named(found.prediction, case))


def _named(found: Prediction, case: Case) -> Prediction:
    return replace(found, version=BACKEND, seqlen=case.seqlen)
