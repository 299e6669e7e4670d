"""The shapes that the fused step is compiled for: what fits in a GPU's shared memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpt2_infer.config import GPT2Config
from gpt2_infer.engines.fused import StepShape

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("width", "dtype", "most_rows", "portable_most_rows"),
    [
        (768, F32, 4, 8),
        (1024, F32, 0, 4),  # FC2 takes 128 KB
        (768, BF16, 8, 8),
        (1280, F16, 8, 8),
        (1600, BF16, 0, 8),  # FC2 takes 100 KB
        (1600, F32, 0, 0),
    ],
)
def test_what_fits_in_99_kb(width, dtype, most_rows, portable_most_rows):
    """A block has 99 KB of shared memory on RTX 40 and 50."""
    config = GPT2Config(n_embd=width, n_head=width // 64)
    for is_portable, most in ((False, most_rows), (True, portable_most_rows)):
        shape = StepShape(config, dtype, 1, 128, 99 * 1024, is_portable=is_portable)
        shapes = [dataclasses.replace(shape, batch=batch) for batch in (1, 2, 4, 8)]
        assert [not shape.refusals for shape in shapes] == [shape.batch <= most for shape in shapes]
        assert len({tuple(shape.products.values()) for shape in shapes}) == 1  # packed once
