"""Rows of prompts from JSON Lines, Parquet and text files."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpt2_infer.errors import RequestError
from gpt2_infer.files import check_regular

BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class InputRow:
    """A row of the input, or the reason why it is invalid."""

    index: int
    id: str
    fields: dict[str, Any] | None
    error: str | None = None


def read_rows(paths: Sequence[Path]) -> Iterator[InputRow]:
    """Yield the rows of JSON Lines, Parquet and text files; skip empty lines.

    A row that cannot be read carries the reason. A row without an id gets the id FILE:LINE,
    with FILE as given if two files have the same name. Raises RequestError for any other kind of
    file.
    """
    index = 0
    names = Counter(path.name for path in paths)
    for path in paths:
        if path.suffix not in _READERS:
            raise RequestError(f"{path} must end in {', '.join(_READERS)}")
        file = path.name if names[path.name] == 1 else str(path)
        for number, value in _READERS[path.suffix](path):
            yield _input_row(index, f"{file}:{number}", value)
            index += 1


def _input_row(index: int, default: str, value: dict[str, Any] | str) -> InputRow:
    """Make a row from its fields, or from the reason why they cannot be read."""
    if isinstance(value, str):
        return InputRow(index, default, None, value)
    for name in ("id", "prompt"):
        if isinstance(value.get(name), bytes):  # text that Parquet does not mark as such
            try:
                value = value | {name: value[name].decode("utf-8")}
            except UnicodeDecodeError:
                return InputRow(index, default, None, f"its {name} is not UTF-8")
    row_id = default if value.get("id") is None else value["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, int | str):
        return InputRow(index, default, value, "its id is neither a text nor an integer")
    error = "it has no prompt" if value.get("prompt") is None else None
    return InputRow(index, str(row_id), value, error)


Line = tuple[int, "dict[str, Any] | str"]  # a row's number, and its fields or the error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        check_regular(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line := line.removeprefix(BOM if number == 1 else b"").strip(b"\r\n"):
                    yield number, line
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[Line]:
    for number, line in _lines(path):
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            value = f"it cannot be read as JSON: {error}"
        else:
            value = value if isinstance(value, dict) else "it is not a JSON object"
        yield number, value


def _read_text(path: Path) -> Iterator[Line]:
    for number, line in _lines(path):
        try:
            yield number, {"prompt": line.decode("utf-8")}
        except UnicodeDecodeError as error:
            yield number, f"it is not UTF-8: byte {error.start} is not valid"


def _read_parquet(path: Path) -> Iterator[Line]:
    parquet = pyarrow_parquet()
    from pyarrow import ArrowException

    number = 0
    try:
        check_regular(path)
        for batch in parquet.ParquetFile(path).iter_batches():
            try:
                rows = batch.to_pylist()
            except ValueError:  # one of the rows has a value that Python cannot hold
                rows = [_parquet_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
            for fields in rows:
                number += 1
                yield number, fields
    except (OSError, ArrowException) as error:
        raise RequestError(f"{path} cannot be read as Parquet: {error}") from error


def _parquet_row(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except ValueError as error:
        return f"it cannot be read: {error}"


def pyarrow_parquet() -> Any:
    """Return pyarrow.parquet; raises RequestError without pyarrow."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise RequestError("Parquet needs pyarrow: install gpt2-infer[parquet]") from None
    return pyarrow.parquet


_READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
