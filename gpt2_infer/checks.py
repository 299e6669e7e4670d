"""Checks of a caller's arguments; each error is one sentence."""

from __future__ import annotations

import math

from gpt2_infer.errors import RequestError


def check_integer(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise RequestError unless `value` is an integer from `low` to `high`."""
    if error := integer_error(value, low, high):
        raise RequestError(f"{name} {error}")


def integer_error(value: object, low: int, high: float = math.inf) -> str | None:
    """Return what `value` must be, unless it is an integer from `low` to `high`."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return None
    allowed = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
    return f"must be an integer {allowed}, not {value!r}"


def check_number(name: str, value: object) -> None:
    """Raise RequestError unless `value` is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, not {value!r}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise RequestError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a {kind.__name__}, not {value!r}")
