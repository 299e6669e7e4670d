"""FlashAttention-2's forward pass in Triton; K is loaded as stored, or transposed.

This package has the same name as the one it imports, so attention_kernels.backends uses absolute
imports only.
"""

from __future__ import annotations

import importlib.util
import os

from attention_kernels.contract import Kernels
from attention_kernels.registry import register


def _probe(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs the Python package triton"
    interpreting = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    if device_type == "cuda" and interpreting:
        return "TRITON_INTERPRET is set: Triton would run every kernel on the CPU"
    return None


def _register(name: str, summary: str, op: str) -> None:
    @register(
        name=name,
        family="triton",
        summary=summary,
        precisions={"float32": "ieee-fp32", "float16": "fp16", "bfloat16": "bf16"},
        head_dims=(32, 64, 128),
        min_compute_capability=(8, 0),
        probe=_probe,
        emulated_on=("cpu",),
        compiles_per_shape_on=("cuda",),
    )
    def load() -> Kernels:
        import torch

        from attention_kernels.backends.triton import flash_attention  # noqa: F401 (defines the ops)

        return Kernels(getattr(torch.ops.attention_kernels, op).default)


_register(
    "TRITON_FLASH_ATTENTION",
    "FlashAttention-2 in Triton, tuned on first use; each tile of K is loaded, then transposed.",
    "triton_flash_attention",
)
_register(
    "TRITON_FLASH_ATTENTION_TRANSPOSED_K",
    "The same kernel with each tile of K loaded transposed.",
    "triton_flash_attention_transposed_k",
)
