"""GPT-2 inference with causal self-attention that is swappable by name.

    from gpt2_infer import GPT2, generate
    model = GPT2.from_pretrained("demo", attention="NAIVE_PYTORCH")
    print(generate(model, "Once upon a time", max_new_tokens=64).texts[0])

Importing the package imports neither torch nor transformers; they load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2_infer.config import GPT2Config
    from gpt2_infer.errors import *
    from gpt2_infer.generation import Generation, generate
    from gpt2_infer.model import GPT2
    from gpt2_infer.request import Request
    from gpt2_infer.sampling import Sampling

__version__ = "0.2.0"
__all__ = [
    "GPT2",
    "ConfigError",
    "GPT2Config",
    "GPT2InferError",
    "Generation",
    "NotFiniteError",
    "Request",
    "RequestError",
    "Sampling",
    "WeightsError",
    "generate",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in ("errors", "config", "sampling", "request", "model", "generation"):
            module = importlib.import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
