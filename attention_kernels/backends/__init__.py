"""The built-in backends, one module per family; importing this package registers them all."""

from __future__ import annotations

import importlib
import pkgutil

_FOUND = sorted(module.name for module in pkgutil.iter_modules(__path__))
# PyTorch's own and the ladders come first in listings.
for _name in dict.fromkeys(("pytorch", "cuda", *_FOUND)):
    importlib.import_module(f"{__name__}.{_name}")
