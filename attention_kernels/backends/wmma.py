"""The WMMA FlashAttention-2 ladder: the files in csrc/wmma_fa2 are the list."""

from __future__ import annotations

from attention_kernels import build
from attention_kernels.ladder import register_ladder

register_ladder(
    build.CSRC / "wmma_fa2",
    family="wmma-fa2",
    name=lambda file: f"WMMA_FLASH_ATTENTION_2_VERSION_{build.version_number(file)}",
    op_prefix="wmma_fa2_",
)
