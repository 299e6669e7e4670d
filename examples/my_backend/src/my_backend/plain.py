"""An attention kernel of my own in plain PyTorch, as an entry point of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels import register
from attention_kernels.contract import Kernels


def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
    """Compute attention as two matrix products with a softmax between them.

    Shapes and arguments as in attention_kernels.contract, checked by the registry.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads before positions
    scores = q @ k.mT * softmax_scale
    if is_causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return (scores.softmax(3) @ v).transpose(1, 2).contiguous()


@register(
    name="MY_PYTORCH",
    family="my-backend",
    summary="Two products and a softmax in plain PyTorch.",
    precisions={"float32": "ieee-fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"},
)
def load() -> Kernels:
    """Import or compile what the kernel needs; this runs on first use."""
    return Kernels(attention=attention)
