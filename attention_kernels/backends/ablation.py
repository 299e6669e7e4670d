"""The ablation, ABLATION_STEP_1 and up: the files in csrc/ablation are the list."""

from __future__ import annotations

from attention_kernels import build
from attention_kernels.ladder import register_ladder

register_ladder(
    build.CSRC / "ablation",
    family="ablation",
    name=lambda file: f"ABLATION_STEP_{build.version_number(file)}",
    op_prefix="ablation_",
)
