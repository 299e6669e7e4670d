"""Benchmark results as JSON: raw samples and where they come from, checked on write and on read."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpt2_infer.errors import GPT2InferError

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("schema.json")
OUT_HELP = "JSON to write; a file that is there is never written over"
ROUNDS_HELP = "kept, after one that is not (default: %(default)s)"


class ResultsError(GPT2InferError):
    """A results file that cannot be used."""


@dataclass
class Series:
    """Samples of one thing, in the order of the rounds.

    status: "ok"; "failed", its check failed; "refused", it does not take this; "emulated", it was
    checked, and a time would mean nothing. All but "ok" have a reason and no samples.
    """

    name: str
    labels: dict[str, Any]
    unit: str
    samples: list[float] = field(default_factory=list)
    status: str = "ok"
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest sample."""
        return min(self.samples), max(self.samples)


@dataclass
class Results:
    """One run of one task."""

    task: str
    provenance: dict[str, Any]
    settings: dict[str, Any]
    series: list[Series]

    def write(self, path: Path) -> None:
        """Validate and write, whole or not at all."""
        value = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        _validate(value, path)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", "utf-8")
        os.replace(temporary, path)


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def count(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"must be {minimum} or more, not {value}")
        return value

    return count


def task_name(text: str) -> str:
    """The type of --name: what the schema takes for a task."""
    if not re.fullmatch("[a-z0-9_-]+", text):
        raise argparse.ArgumentTypeError(f"must be of a-z, 0-9, _ and -, not {text!r}")
    return text


def output_file(text: str) -> Path:
    """The type of a benchmark's --out: what would lose a finished run is found before it begins.

    Nothing that is there is written over, and no folder is made. Raises
    argparse.ArgumentTypeError, also where nothing can be written or checked.
    """
    path = Path(text)
    try:
        importlib.import_module("jsonschema")
        SCHEMA_FILE.read_bytes()
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (ImportError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}") from error
    if path.exists():
        if not _is_results(path):
            raise argparse.ArgumentTypeError(f"{text} exists and is no results file")
        raise argparse.ArgumentTypeError(
            f"{text} holds a finished run; name another file, or delete it"
        )
    return path


def read(path: Path) -> Results:
    """Read and validate; raises ResultsError, in one line, for a file not whole and current."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is truncated or not JSON: {error}") from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultsError(f"{path} has schema version {version!r}, not {SCHEMA_VERSION}")
    _validate(value, path)
    series = [Series(**entry) for entry in value["series"]]
    return Results(value["task"], value["provenance"], value["settings"], series)


def read_finished(path: Path) -> Results:
    """As read(), but not what an interrupted run has left: every series has all its samples."""
    results = read(path)
    rounds = results.settings.get("rounds", 1)
    short = sum(s.status == "ok" and len(s.samples) < rounds for s in results.series)
    if results.series and not short:
        return results
    lack = "it has no series"
    if short:
        what = f"fewer samples than its {rounds} rounds" if rounds > 1 else "no samples"
        lack = f"{short} of its {len(results.series)} series have {what}"
    raise ResultsError(f"{path} is of a run that is not finished: {lack}")


def _is_results(path: Path) -> bool:
    try:
        return path.is_file() and bool(read(path))
    except ResultsError:
        return False


def newest(folder: Path) -> dict[str, tuple[Path, Results]]:
    """The newest results file of each task, by the date in its provenance; raises ResultsError."""
    if not folder.is_dir():
        raise ResultsError(f"there is no folder {folder}")
    found: dict[str, tuple[Path, Results]] = {}
    for path in sorted(folder.glob("*.json")):
        results = read_finished(path)
        if (
            results.task not in found
            or results.provenance["date"] > found[results.task][1].provenance["date"]
        ):
            found[results.task] = (path, results)
    return found


def _validate(value: dict[str, Any], path: Path) -> None:
    import jsonschema

    try:
        jsonschema.validate(value, json.loads(SCHEMA_FILE.read_text("utf-8")))
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path)) or "the top level"
        raise ResultsError(f"{path} does not fit the schema at {where}: {error.message}") from error
