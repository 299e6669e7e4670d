"""Everything that measures: comparisons, results, and the tables and pictures made of them.

Importing the package imports no torch; using a function that measures does. `results`, `tables`
and `plots` never do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2_infer.bench.generation import compare_generation
    from gpt2_infer.bench.kernel import compare_kernels
    from gpt2_infer.bench.results import GenerationCell, KernelCell, read
    from gpt2_infer.bench.selection import select

_HOMES = {
    "GenerationCell": "results",
    "KernelCell": "results",
    "compare_generation": "generation",
    "compare_kernels": "kernel",
    "read": "results",
    "select": "selection",
}
__all__ = [
    "GenerationCell",
    "KernelCell",
    "compare_generation",
    "compare_kernels",
    "read",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
