"""Models that the engines' tests share."""

from __future__ import annotations

import pytest
import torch

from gpt2_infer import GPT2
from gpt2_infer.config import GPT2Config

# With --dist loadgroup one worker runs all tests of the largest, which take up to 25 GB of a GPU.
XL = pytest.param("gpt2-xl", marks=pytest.mark.xdist_group("gpt2-xl"))
SIZES = ["gpt2", "gpt2-medium", "gpt2-large", XL]


def random_model(config: GPT2Config, dtype: torch.dtype = torch.float32) -> GPT2:
    """A model whose layers all matter, with random weights that are the same each time."""
    torch.manual_seed(0)
    model = GPT2(config).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model.to(dtype)
