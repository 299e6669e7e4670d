"""Rows of JSON Lines, Parquet and text files: prompts, and their completions."""

from __future__ import annotations

import codecs
import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpt2_infer.errors import RequestError
from gpt2_infer.files import check_regular

BOM = codecs.BOM_UTF8
COLUMNS = (
    *("id", "input", "text", "tokens", "finish_reason", "logprob"),
    *("backend", "decode_backend", "engine", "seed", "error"),
)


@dataclass(frozen=True)
class InputRow:
    """A row of the input, or the reason why it is invalid."""

    index: int
    id: str
    fields: dict[str, Any] | None
    error: str | None = None


def read_rows(paths: Sequence[Path]) -> Iterator[InputRow]:
    """Yield the rows of JSON Lines, Parquet and text files; skip empty lines.

    A row that cannot be read carries the reason. A row without an id gets the id FILE:LINE. Raises
    RequestError for any other kind of file.
    """
    index = 0
    for path in paths:
        if path.suffix not in _READERS:
            raise RequestError(f"{path} must end in {', '.join(_READERS)}")
        for number, value in _READERS[path.suffix](path):
            yield _input_row(index, f"{path.name}:{number}", value)
            index += 1


def _input_row(index: int, default: str, value: Fields) -> InputRow:
    if isinstance(value, str):
        return InputRow(index, default, None, value)
    row_id = default if value.get("id") is None else value["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, int | str):
        return InputRow(index, default, value, "its id is neither a text nor an integer")
    error = "it has no prompt" if value.get("prompt") is None else None
    return InputRow(index, str(row_id), value, error)


Fields = dict[str, Any] | str
"""A row's fields, or the reason why they cannot be read."""


def _read_lines(parse: Callable[[bytes], Fields], path: Path) -> Iterator[tuple[int, Fields]]:
    try:
        check_regular(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line := line.removeprefix(BOM if number == 1 else b"").strip(b"\r\n"):
                    yield number, parse(line)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse_json(line: bytes) -> Fields:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"it cannot be read as JSON: {error}"
    return value if isinstance(value, dict) else "it is not a JSON object"


def _parse_text(line: bytes) -> Fields:
    try:
        return {"prompt": line.decode("utf-8")}
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: byte {error.start} is not valid"


def _read_parquet(path: Path) -> Iterator[tuple[int, Fields]]:
    pa, numbers = import_pyarrow(), itertools.count(1)
    try:
        check_regular(path)
        for batch in pa.parquet.ParquetFile(path).iter_batches():
            for fields in batch.to_pylist():
                yield next(numbers), fields
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RequestError(f"{path} cannot be read as Parquet: {error}") from error


def import_pyarrow() -> Any:
    """Return pyarrow, with pyarrow.parquet; raises RequestError without it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise RequestError("Parquet needs pyarrow: install gpt2-infer[parquet]") from None
    return pyarrow


def as_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return lines of JSON; values without a JSON form become text, NaN and infinity null."""
    return b"".join(msgspec.json.encode(row, enc_hook=str) + b"\n" for row in rows)


def as_parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return a Parquet file; inputs become JSON, because rows may differ in fields."""
    pa, file = import_pyarrow(), io.BytesIO()
    types = dict.fromkeys(COLUMNS, pa.string()) | {"tokens": pa.list_(pa.int32())}
    types |= {"logprob": pa.float64(), "seed": pa.int64()}
    texts = [row | {"input": as_lines([row["input"]]).decode().rstrip()} for row in rows]
    pa.parquet.write_table(pa.Table.from_pylist(texts, schema=pa.schema(types)), file)
    return file.getvalue()


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Fields]]]] = {
    ".jsonl": functools.partial(_read_lines, _parse_json),
    ".parquet": _read_parquet,
    ".txt": functools.partial(_read_lines, _parse_text),
}
WRITERS = {".jsonl": as_lines, ".parquet": as_parquet}
