"""A job's folder: locking, reading, and writing, so that a kill leaves no half-written file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock, Timeout

from gpt2_infer.errors import GPT2InferError, RequestError
from gpt2_infer.files import read_file

T = TypeVar("T")


class BatchError(GPT2InferError):
    """A job has stopped; `resume` completes it."""


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of the folder `out`.

    Raises RequestError if another process holds it, or if the folder cannot be written.
    """
    lock = FileLock(out / ".lock", blocking=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RequestError(f"another process is completing the job in {out}") from None
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def read(file: Path, kind: type[T]) -> T:
    """Read one of the folder's JSON files; raises RequestError if it is damaged."""
    try:
        return msgspec.json.decode(read_file(file), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{file} is damaged: {error}") from error


def write(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, even if the power fails.

    Raises BatchError if that is impossible.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or error
        raise BatchError(
            f"{path} cannot be written: {reason}; --resume completes the job"
        ) from error


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        found = hashlib.sha256()
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()
