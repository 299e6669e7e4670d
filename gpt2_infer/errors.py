"""The exceptions that gpt2_infer raises on purpose, and the checks of arguments that raise them.

Each message is a sentence for the user.
"""

from __future__ import annotations

import math


class GPT2InferError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(GPT2InferError):
    """An invalid or unsupported model configuration."""


class WeightsError(GPT2InferError):
    """Weights that cannot be found, read or matched to the configuration."""


class UnavailableDeviceError(GPT2InferError):
    """A device that this machine does not have."""


class NotFiniteError(GPT2InferError, ArithmeticError):
    """The model computed NaN or infinity, from which no token can be chosen."""


class RequestError(GPT2InferError, ValueError):
    """A request that cannot be met: a wrong prompt, length or sampling value."""


def check_integer(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise RequestError unless `value` is an integer from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        allowed = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
        raise RequestError(f"{name} must be an integer {allowed}, not {value!r}")


def check_number(name: str, value: object) -> None:
    """Raise RequestError unless `value` is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, not {value!r}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise RequestError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a {kind.__name__}, not {value!r}")
