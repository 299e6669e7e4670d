"""The float32 ladder, CUSTOM_CUDA_VERSION_1 and up: the files in csrc/fp32 are the list."""

from __future__ import annotations

from attention_kernels import build
from attention_kernels.ladder import register_ladder

register_ladder(
    build.CSRC / "fp32",
    family="custom-cuda",
    name=lambda file: f"CUSTOM_CUDA_VERSION_{build.version_number(file)}",
)
