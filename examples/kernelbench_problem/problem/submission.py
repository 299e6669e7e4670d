"""A stranger's answer: attention of (batch, num_heads, seqlen, head_dim)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ModelNew(nn.Module):
    """Causal self-attention, in which the sum of the weights divides the output."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, in the shape of q."""
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
        weights = (scores - scores.amax(3, keepdim=True)).exp()
        return torch.div(weights @ v, weights.sum(3, keepdim=True))
