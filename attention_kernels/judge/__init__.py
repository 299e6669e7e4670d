"""Judge kernels: the test inputs, the reference and its budgets, the suite and its process.

Importing the package does not import torch; using a name of __all__ does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_kernels.errors import RejectedTimeError
    from attention_kernels.judge.inputs import Case, DecodeCase
    from attention_kernels.judge.suite import verify
    from attention_kernels.judge.timing import time_kernel

__all__ = ["Case", "DecodeCase", "RejectedTimeError", "time_kernel", "verify"]


def __getattr__(name: str) -> Any:
    """Return a name of __all__ from its module."""
    for module in ("inputs", "suite", "timing") if name in __all__ else ():
        found = importlib.import_module(f"attention_kernels.judge.{module}")
        if name in vars(found):
            return vars(found)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
