"""Reading of files that may be missing, malformed or hostile."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from typing import Any

from gpt2_infer.errors import WeightsError


def check_regular(path: Path) -> None:
    """Raise OSError for a missing file and for one that may never end, such as a FIFO."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder raises a clear error
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; raises OSError."""
    check_regular(path)
    return path.read_bytes()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises WeightsError if the file is missing, malformed or hostile."""
    try:
        value = json.loads(read_file(path).decode("utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}") from None
    except RecursionError:
        raise WeightsError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # bad JSON, bad UTF-8, an integer of 5,000 digits
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return value
