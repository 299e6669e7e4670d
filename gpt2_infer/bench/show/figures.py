"""Summarize samples: medians, ratios and shares, unless a difference is within the spread.

A ratio is given only within one file and one cell, never to a more precise baseline, and only if
the two sample ranges do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias, TypeVar

import msgspec

from attention_kernels import ladder
from gpt2_infer.bench.record import FREE_ATTENTION, File, Row, Shape

WITHIN_SPREAD = "~"  # shown instead of a figure
TIE = "no difference beyond the spread of the samples"
# The instruction that limits each precision class, and how many of its products make one product.
INSTRUCTIONS = {
    "ieee-fp32": ("ffma_tflops", 1),
    "tf32": ("mma_tf32_tflops", 1),
    "3xtf32": ("mma_tf32_tflops", 3),
    "3xfp16": ("mma_float16_tflops", 3),
    "fp16": ("mma_float16_tflops", 1),
}
# Coarseness of float32's precision classes; any other class is the dtype's own precision.
COARSENESS = {"ieee-fp32": 0, "3xtf32": 1, "3xfp16": 1, "tf32": 2, "none": 3}

Value: TypeAlias = float | str | None
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def group_by(rows: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group the rows by key; keys and rows keep their order."""
    groups: dict[Key, list[Item]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def main_rows(file: File) -> list[Row]:
    """Return the rows of the study's main metric."""
    return file.of("generation" if file.study["kind"] == "generation" else "time")


def cell_name(row: Row) -> str:
    """Return a cell's description without its length."""
    if "seqlen" in row.cell:
        return row.kernel.shape
    return f"{row.cell['mode']}, {row.cell['dtype']}, batch {row.cell['batch']}"


def length(row: Row) -> int:
    """Return the length of a cell: its seqlen, or its number of tokens."""
    return int(row.cell["seqlen" if "seqlen" in row.cell else "max_tokens"])


def shape_of(row: Row) -> Shape:
    """Return the shape at which a version was profiled or inspected."""
    return msgspec.convert(row.cell, Shape)


def new_tokens(file: File, row: Row) -> int:
    """Return the new tokens of a sample, all rows of its batch together."""
    if "tokens" in row.extra:
        return int(row.extra["tokens"])
    each = row.cell.get("new_tokens") or length(row) - int(file.study["prompt_tokens"])
    return int(row.cell["batch"]) * int(each)


def steps_of(file: File, row: Row) -> Row | None:
    """Return a main row with the seconds of the steps, without set-up; None if unknown."""
    return file.beside(row, "generation") or (None if _has_whole_calls(file, row) else row)


def calls_of(file: File, row: Row) -> Row | None:
    """Return a main row with the seconds of whole calls; None if unknown."""
    if found := file.beside(row, "call"):
        return msgspec.structs.replace(found, extra=row.extra)
    is_ours = row.extra.get("program", "gpt2-infer") == "gpt2-infer"
    return row if not is_ours or _has_whole_calls(file, row) else None


def _has_whole_calls(file: File, row: Row) -> bool:
    """Return whether our samples of the main metric include set-up."""
    kind = file.study["kind"]
    return kind == "batch" or (kind == "decode" and row.cell.get("mode") == "recompute")


def detail_length(rows: Iterable[Row]) -> int:
    """Return the length at which contenders are shown in bar charts and detail columns."""
    lengths = {length(row) for row in rows}
    is_kernel = all("seqlen" in row.cell for row in rows)
    return 1024 if is_kernel and 1024 in lengths else max(lengths)


def has_shapes(file: File) -> bool:
    """Return whether a file compares shapes that have different lengths."""
    cells = {row.kernel for row in main_rows(file)}
    shapes, lengths = {cell.shape for cell in cells}, {cell.seqlen for cell in cells}
    return len(cells) < len(shapes) * len(lengths)


def ratio(row: Row, others: Iterable[Row], baseline: str) -> float | None:
    """Return the speedup over the baseline; None if the baseline is more precise.

    NaN if the sample ranges overlap, so that neither is faster.
    """
    for other in others:
        coarser = _coarseness(row) > _coarseness(other)
        if other.contender == baseline and not coarser and other.samples and row.samples:
            (least, most), (other_least, other_most) = row.spread, other.spread
            overlap = least <= other_most and other_least <= most
            is_tie = overlap and other is not row
            return math.nan if is_tie else other.median / row.median
    return None


def attention_share(row: Row, others: Iterable[Row]) -> float | None:
    """Return the fraction of an end-to-end time that attention takes.

    NaN if that is within the spread: some sample with attention is no slower than one without.
    """
    for other in others:
        if other.contender == FREE_ATTENTION and other.samples and row.samples:
            told = row.spread[0] > other.spread[1]
            return 1 - other.median / row.median if told else math.nan
    return None


def saved_share(row: Row, others: Iterable[Row], baseline: str) -> float | None:
    """Return the fraction that a backend saves of what free attention would save of the baseline.

    None for these two. NaN if either saving is within the spread.
    """
    found = {other.contender: other for other in others if other.samples}
    base, free = found.get(baseline), found.get(FREE_ATTENTION)
    if not (base and free and row.samples) or row in (base, free):
        return None
    (least, most), (base_least, base_most) = row.spread, base.spread
    overlap = least <= base_most and base_least <= most
    told = base_least > free.spread[1] and not overlap
    return (base.median - row.median) / (base.median - free.median) if told else math.nan


def _coarseness(row: Row) -> int:
    return COARSENESS.get(row.extra.get("precision", ""), 0)


def widest_spread(rows: Iterable[Row]) -> str:
    """Return the widest range of any row's samples in percent of its median; "" without any."""
    ranges = [(row.spread[1] - row.spread[0]) / row.median for row in rows if row.samples]
    return f"{100 * max(ranges):.1f} %" if ranges else ""


def with_spread(row: Row, form: str, unit: str = "") -> str:
    """Return the median with the smallest and the largest sample, or why there are no samples."""
    if not row.samples:
        return f"{row.status}: {row.reason}"
    middle, low, high = (form.format(value) for value in (row.median, *row.spread))
    return f"{middle}{unit} ({low} .. {high})"


def figure(value: Value, form: str) -> str:
    """Format a number: blank for None, a tilde for NaN (within the spread); a text stays."""
    if value is None or isinstance(value, str):
        return value or ""
    return WITHIN_SPREAD if math.isnan(value) else form.format(value)


def times(value: float | None) -> str:
    """Format a ratio."""
    return figure(value, "{:.2g}" if value is not None and value < 0.1 else "{:.2f}")


def where(file: File) -> str:
    """Return the machine and the torch version of a run."""
    return f"{file.machine}, torch {file.provenance.packages['torch']}"


def how(file: File) -> str:
    """Describe the machine, the version of transformers if it was a peer, and the rounds.

    A study whose figures come from elsewhere says so itself.
    """
    if told := file.study.get("how"):
        return str(told)
    peer = file.provenance.packages["transformers"] if file.study.get("peers") else ""
    place = where(file) + (f", transformers {peer}" if peer else "")
    return f"{place}; medians of {file.study['rounds']} interleaved rounds"


def roof_share(row: Row, limits: dict[str, float]) -> float | None:
    """Return the fraction of its instruction's roof that a float32 kernel reaches.

    The roof of wgmma is a float16 matrix product by cuBLAS: its instruction rate is not measured.
    """
    if row.cell["dtype"] != "float32":
        return None
    version = ladder.versions().get(row.contender)
    name, products = INSTRUCTIONS.get(row.extra.get("precision", ""), ("", 1))
    if version is not None and version.needs_exactly:
        name = "matmul_float16_tflops"
    return row.tflops / (limits[name] / products) if name in limits else None
