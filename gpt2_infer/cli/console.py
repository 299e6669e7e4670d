"""The command line's terminal output and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from gpt2_infer.errors import GPT2InferError

EXIT_FAILED = 1  # verify found a failure, or diverge a bug
EXIT_BAD_INPUT = 2
EXIT_NO_ROW = 3  # batch completed no row
EXIT_BUG = 70  # sysexits.h: an internal software error
EXIT_INTERRUPTED = 130


class StandardOutputError(GPT2InferError):
    """Standard output cannot be written."""


def show(text: object = "", *, end: str = "\n") -> None:
    """Write to standard output and flush it.

    Raises BrokenPipeError if the reader has gone, else StandardOutputError.
    """
    if sys.stdout is None:
        raise StandardOutputError("standard output is closed")
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StandardOutputError(f"standard output cannot be written: {error.strerror}") from error


def plain(value: Any) -> Any:
    """Return a result as JSON values, from its to_json() if it has that; null if not finite."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    value = value.to_json() if hasattr(value, "to_json") else value
    return msgspec.json.decode(msgspec.json.encode(value))


def prepare_streams() -> None:
    """Replace a closed standard error; print unencodable characters as a placeholder."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def discard_output() -> None:
    """Discard buffered standard output, whose reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(program: str, message: str) -> None:
    """Write one line to standard error, with control characters escaped."""
    line = " ".join(message.split())
    # A message may quote a file, whose escape sequences must not reach the terminal.
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    print(f"{program}: error: {safe}", file=sys.stderr)


def message_of(error: Exception) -> str | None:
    """Return an expected error in words, with a hint at what helps; None for a bug."""
    import torch

    from attention_kernels import AttentionError, UnknownBackendError

    expected = (GPT2InferError, AttentionError, OSError, MemoryError, torch.OutOfMemoryError)
    # PyTorch has no exception class for running out of memory on a CPU.
    if not isinstance(error, expected) and "DefaultCPUAllocator" not in str(error):
        return None
    if isinstance(error, OSError) and error.strerror:  # leave out the error number
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error) or type(error).__name__
    if isinstance(error, UnknownBackendError) and not error.nearest:
        return f"{text}; see `gpt2-infer backends`"
    return text
