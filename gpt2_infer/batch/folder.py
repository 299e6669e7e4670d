"""A job's folder: locking, reading, and writing, so that a kill leaves no half-written file."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock, Timeout

from gpt2_infer.errors import GPT2InferError, RequestError
from gpt2_infer.files import check_regular, read_file

T = TypeVar("T")


class BatchError(GPT2InferError):
    """A job has stopped; `resume` completes it."""


def lock(out: Path) -> AbstractContextManager[object]:
    """Create the folder `out` and lock it, when no other process has it locked.

    Raises RequestError if the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return FileLock(out / ".lock").acquire()
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror or error}") from error


def shard_lock(out: Path, index: int, count: int) -> FileLock:
    """Return the lock of a shard of the locked folder `out`.

    Raises RequestError if another process completes some of the same parts: those of this shard, or
    of one in a different number of shards.
    """
    mine = out / f".shard-{index}-of-{count}"
    for path in out.glob(".shard-*"):
        is_apart = path != mine and path.name.endswith(f"-of-{count}")
        if not is_apart and _is_locked(path):
            shard = path.name[1:].replace("-", " ")
            raise RequestError(f"another process is completing {shard} of the job in {out}")
    return FileLock(mine)


def _is_locked(path: Path) -> bool:
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True


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
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_bytes(data)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = f"{error.strerror or error}; --resume completes the job"
        raise BatchError(f"{path} cannot be written: {reason}") from error


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """Return a file's SHA-256; raises RequestError if it cannot be read."""
    sha256 = hashlib.sha256()
    try:
        check_regular(path)
        with path.open("rb") as file:
            while block := file.read(2**20):
                sha256.update(block)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    return sha256.hexdigest()
