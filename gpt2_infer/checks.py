"""Checks of a caller's arguments; each error is one sentence."""

from __future__ import annotations

import math

from gpt2_infer.errors import RequestError


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise RequestError unless `value` is an integer from `low` to `high`."""
    allowed = f"of {low} or more" if high is None else f"from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer {allowed}, not {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be an integer {allowed}, not {value}")


def check_number(name: str, value: object) -> None:
    """Raise RequestError unless `value` is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, not {value!r}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise RequestError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a {kind.__name__}, not {value!r}")
