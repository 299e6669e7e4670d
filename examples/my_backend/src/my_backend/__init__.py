"""Attention kernels of my own: every v*_*.cu here and in decode/.

Importing this module registers them and does nothing else: what takes time belongs in a loader.
"""

from __future__ import annotations

from pathlib import Path

from attention_kernels.ladder import header, register_ladder

register_ladder(
    Path(__file__).parent,
    family="my-backend",
    name=lambda file: f"MY_CUDA_VERSION_{header.version_number(file)}",
)
register_ladder(
    Path(__file__).parent / "decode",
    family="my-backend",
    name=lambda file: f"MY_DECODE_VERSION_{header.version_number(file)}",
    op_prefix="my_backend_decode_",
)
