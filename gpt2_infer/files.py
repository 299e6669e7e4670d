"""Reading of files that may be missing or malformed."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gpt2_infer.errors import RequestError, WeightsError


def check_regular(path: Path) -> None:
    """Raise OSError for a missing file and for one that may never end, such as a FIFO."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder raises a clear error
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def check_writable(path: Path) -> None:
    """Raise RequestError, before the work and not after it, if no file can be written there."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise RequestError(f"there is no folder {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from error


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; raises OSError."""
    check_regular(path)
    return path.read_bytes()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises WeightsError if the file is missing or malformed."""
    try:
        return msgspec.json.decode(read_file(path), type=dict[str, Any])
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
