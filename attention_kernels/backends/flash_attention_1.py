"""FlashAttention-1, FLASH_ATTENTION_1_BASELINE and on: the files in csrc/fa1 are the list."""

from __future__ import annotations

from attention_kernels import build
from attention_kernels.ladder import register_ladder

register_ladder(
    build.CSRC / "fa1",
    family="flash-attention-1",
    name=lambda file: f"FLASH_ATTENTION_1_{file.stem.split('_', 1)[1].upper()}",
    op_prefix="fa1_",
)
