"""An attention kernel of my own in plain PyTorch, as an entry point of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels import register
from attention_kernels.contract import Kernels

BLOCK_N = 64  # keys per tile


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool
) -> Tensor:
    """Compute softmax over tiles of keys (Flash Attention), without a seqlen x seqlen matrix.

    Shapes and arguments as in attention_kernels.contract, checked by the registry. The statistics
    and the sums are float32, or float64 for float64.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads before positions
    accumulator = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(q.shape[2], device=q.device)
    o = torch.zeros_like(q, dtype=accumulator)
    row_max = torch.full_like(o[..., :1], -torch.inf)
    row_sum = torch.zeros_like(row_max)
    for n_start in range(0, q.shape[2], BLOCK_N):
        tile = slice(n_start, n_start + BLOCK_N)
        s = (q @ k[:, :, tile].mT).to(accumulator) * softmax_scale
        if is_causal:
            s.masked_fill_(position[tile] > position[:, None], -torch.inf)
        # Finite from the first tile on: every row sees key 0.
        new_max = torch.maximum(row_max, s.amax(3, keepdim=True))
        rescale = torch.exp(row_max - new_max)
        p = torch.exp(s - new_max)
        row_sum = rescale * row_sum + p.sum(3, keepdim=True)
        o = rescale * o + (p.to(v.dtype) @ v[:, :, tile]).to(accumulator)
        row_max = new_max
    return (o / row_sum).to(q.dtype).transpose(1, 2).contiguous()


@register(
    name="MY_TILED_PYTORCH",
    family="my-backend",
    summary="Softmax over tiles of 64 keys in plain PyTorch.",
    precisions={"float32": "ieee-fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"},
)
def load() -> Kernels:
    """Import or compile what the kernel needs; this runs on first use."""
    return Kernels(attention=tiled_attention)
