"""Ladders: folders of version files, each of which is a backend.

header reads a version file, compilers finds nvcc and g++, build makes the shared library, prebuilt
finds the one in the wheel, and op, which imports torch, loads it as a backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_kernels.ladder.op import *

__all__ = [
    "backend",
    "build_all",
    "families",
    "is_prebuilt",
    "known",
    "predecessors",
    "race_checked",
    "register_ladder",
    "resolve",
    "resolve_all",
    "versions",
]


def __getattr__(name: str) -> Any:
    """Return a name of op, which imports torch."""
    if name in __all__:
        return getattr(importlib.import_module("attention_kernels.ladder.op"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
