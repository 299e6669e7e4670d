"""The exceptions that attention_kernels raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable


class AttentionError(Exception):
    """Base of every error that this package raises on purpose."""


class UnknownBackendError(AttentionError, LookupError):
    """No backend of that name is registered; `valid` holds the names that are, `nearest` a few."""

    def __init__(self, name: str, nearest: Iterable[str], valid: Iterable[str]) -> None:
        self.nearest, self.valid = list(nearest), list(valid)
        hint = f"did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(
            f"unknown attention backend {name!r}: {hint or 'see `gpt2-infer backends`'}"
        )


class UnavailableBackendError(AttentionError, RuntimeError):
    """The backend exists but cannot run on this machine."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"attention backend {name} is not available here: {reason}")
        self.reason = reason


class UnsupportedError(AttentionError, ValueError):
    """The backend does not take this call; `reasons` holds every reason, not only the first."""

    def __init__(self, name: str, reasons: Iterable[str]) -> None:
        self.reasons = list(reasons)
        super().__init__(
            f"attention backend {name} cannot take this call: {'; '.join(self.reasons)}"
        )


class OutputError(AttentionError, RuntimeError):
    """A backend's kernel returned something else than the contract says."""

    def __init__(self, name: str, got: str, wanted: str) -> None:
        super().__init__(f"attention backend {name} returned {got} instead of {wanted}")


class ArgumentError(AttentionError, ValueError):
    """The arguments break the attention contract, whatever the backend."""
