"""The exceptions that attention_kernels raises on purpose."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path


class AttentionError(Exception):
    """Base of every error that this package raises on purpose."""


class UnknownBackendError(AttentionError, LookupError):
    """No backend of that name is registered."""

    def __init__(self, name: str, nearest: Iterable[str]) -> None:
        self.nearest = list(nearest)
        """The registered names most similar to it, if any."""
        hint = f": did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(f"unknown attention backend {repr(name)[:1000]}{hint}")


class UnavailableBackendError(AttentionError, RuntimeError):
    """The backend exists but cannot run on this machine."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"attention backend {name} is not available here: {reason}")
        self.reason = reason


class UnsupportedError(AttentionError, ValueError):
    """The backend does not support this call."""

    def __init__(self, name: str, reasons: Iterable[str]) -> None:
        self.reasons = list(reasons)
        """Every reason, not only the first."""
        super().__init__(
            f"attention backend {name} cannot take this call: {'; '.join(self.reasons)}"
        )


class KernelError(AttentionError, RuntimeError):
    """A backend's kernel failed; the kernel's own exception is the cause."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"attention backend {name} {what}")


class OutputError(AttentionError, RuntimeError):
    """A backend's kernel returned something that breaks the contract."""

    def __init__(self, name: str, got: str, wanted: str) -> None:
        super().__init__(f"attention backend {name} returned {got} instead of {wanted}")


class ArgumentError(AttentionError, ValueError):
    """The arguments break the attention contract, whatever the backend."""


class RejectedTimeError(AttentionError):
    """A measured time that does not count; the text is the rule that it broke, with its figures."""


def describe(error: BaseException) -> str:
    """Return an exception's type, first line and place: "KeyError: 'x' (file.py:3)".

    The place is the innermost frame outside torch and the registry.
    """
    import torch

    ours = (str(Path(torch.__file__).parent), str(Path(__file__).with_name("registry.py")))
    lines = str(error).strip().splitlines() or ["no message"]
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(ours)]
    place = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {lines[0]}{place}"
