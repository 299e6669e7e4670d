"""FlashAttention-1 in NumPy: one backend per program, NUMPY_BASIC to NUMPY_GPU_LIKE_OPT2."""

from __future__ import annotations

import functools
import importlib

import numpy as np
import torch
from torch import Tensor

from attention_kernels.contract import AttentionFunction, Kernels
from attention_kernels.ladder.op import define_op
from attention_kernels.registry import register


def _register(program: str, summary: str, *, needs_contiguous: bool = False) -> None:
    @register(
        name=f"NUMPY_{program.upper()}",
        family="numpy",
        summary=summary,
        precisions={"float32": "ieee-fp32", "float64": "fp64"},
        device_types=("cpu",),
        needs_contiguous=needs_contiguous,
    )
    def load() -> Kernels:
        return Kernels(_op(program))


@functools.cache
def _op(program: str) -> AttentionFunction:
    """Return the program as an op, so that torch.compile runs it instead of tracing it."""
    run = importlib.import_module(f"attention_kernels.backends.numpy.{program}").attention

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        arrays = (x.detach().numpy() for x in (q, k, v))  # views, not copies
        with np.errstate(all="ignore"):  # an infinity or a NaN is a result, as in torch
            return torch.from_numpy(run(*arrays, softmax_scale, is_causal))

    name = f"numpy_{program}"
    define_op(name)
    torch.library.impl(f"attention_kernels::{name}", "cpu", attention)
    op: AttentionFunction = getattr(torch.ops.attention_kernels, name).default
    return op


_register("basic", "FlashAttention-1 in NumPy expressions, all heads at once.")
_register("gpu_like", "FlashAttention-1 in NumPy as a GPU runs it: blocks, rows, nine buffers.")
_register(
    "gpu_like_1d",
    "FlashAttention-1 in NumPy with all memory one-dimensional.",
    needs_contiguous=True,
)
_register(
    "gpu_like_opt1",
    "FlashAttention-1 in NumPy with buffers reused: five.",
    needs_contiguous=True,
)
_register(
    "gpu_like_opt2",
    "FlashAttention-1 in NumPy with operations fused and done in place: two buffers.",
    needs_contiguous=True,
)
