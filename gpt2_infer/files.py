"""JSON files that somebody else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpt2_infer.errors import WeightsError


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises WeightsError if the file is missing, malformed or hostile."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}") from None
    except RecursionError:
        raise WeightsError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # of JSON, of UTF-8, of an integer of 5,000 digits
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return value
