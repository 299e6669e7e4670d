"""The ladders of CUDA kernels: in each folder of csrc, the version files are the list."""

from __future__ import annotations

from attention_kernels.ladder import register_ladder
from attention_kernels.ladder.header import CSRC, version_number

register_ladder(
    CSRC / "fp32",
    name=lambda file: f"CUSTOM_CUDA_VERSION_{version_number(file)}",
    op_prefix="",  # the op of version 7 is attention_kernels::v07
)
register_ladder(
    CSRC / "wmma_fa2",
    name=lambda file: f"WMMA_FLASH_ATTENTION_2_VERSION_{version_number(file)}",
)
register_ladder(
    CSRC / "fa1",
    name=lambda file: f"FLASH_ATTENTION_1_{file.stem.split('_', 1)[1].upper()}",
)
register_ladder(
    CSRC / "ablation",
    name=lambda file: f"ABLATION_STEP_{version_number(file)}",
)
register_ladder(
    CSRC / "decode",
    name=lambda file: f"DECODE_SPLIT_KV_VERSION_{version_number(file)}",
)
