"""What may be said of samples: medians, ratios and shares, and when there is no difference.

A ratio is given only within one file and one cell, never to a more precise baseline, and only if
the samples of the two do not overlap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from gpt2_infer.bench.record import FREE_ATTENTION, File, Provenance, Row

WITHIN_SPREAD = "~"  # in place of a figure
TIE = "no difference beyond the spread of the samples"
# The instructions that limit each dtype, and how many of their products replace one of its own.
ROOFS = {
    "float32": (
        ("FFMA", "ffma_tflops", 1),
        ("3 TF32 products", "mma_tf32_tflops", 3),
        ("3 float16 products", "mma_float16_tflops", 3),
    ),
    "float16": (("mma.sync, float16", "mma_float16_tflops", 1),),
}
# How coarse the precision classes of float32 are; every other class is its dtype's own.
COARSENESS = {"ieee-fp32": 0, "3xtf32": 1, "3xfp16": 1, "tf32": 2, "none": 3}

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def group_by(rows: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the rows by key, both in the order of the rows."""
    groups: dict[Key, list[Item]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def main_rows(file: File) -> list[Row]:
    """Return the rows of the metric that the study is about; the others stand beside them."""
    return (
        file.of(file.study.get("timed", "generation")) if is_generation(file) else file.of("time")
    )


def is_generation(file: File) -> bool:
    """Return whether a file compares generation end to end."""
    return bool(file.study["kind"] == "generation")


def cell_name(row: Row) -> str:
    """Return everything of a cell but its length."""
    if "seqlen" in row.cell:
        return row.kernel.shape
    return f"{row.cell['mode']}, {row.cell['dtype']}, batch {row.cell['batch']}"


def length(row: Row) -> int:
    """Return what varies within a table or a picture: the seqlen, or the tokens."""
    return int(row.cell["seqlen" if "seqlen" in row.cell else "max_tokens"])


def detail_length(rows: Iterable[Row]) -> int:
    """Return the length that stands for a contender, in bars and beside its times."""
    lengths = {length(row) for row in rows}
    is_kernel = all("seqlen" in row.cell for row in rows)
    return 1024 if is_kernel and 1024 in lengths else max(lengths)


def has_shapes(file: File) -> bool:
    """Return whether shapes are compared, each at lengths of its own."""
    cells = {row.kernel for row in main_rows(file)}
    shapes, lengths = {cell.shape for cell in cells}, {cell.seqlen for cell in cells}
    return len(cells) < len(shapes) * len(lengths)


def ratio(row: Row, others: Iterable[Row], baseline: str) -> float | None:
    """Return how many times as fast as the baseline; None if the baseline is more precise.

    NaN if the ranges of their samples meet: then neither is faster.
    """
    for other in others:
        coarser = _coarseness(row) > _coarseness(other)
        if other.contender == baseline and not coarser and other.samples and row.samples:
            told = other is row or not _overlap(row, other)
            return other.median / row.median if told else math.nan
    return None


def attention_share(row: Row, others: Iterable[Row]) -> float | None:
    """Return the part of an end-to-end time that goes away if attention takes none.

    NaN if that is within the spread: a sample with attention is no slower than one without.
    """
    for other in others:
        if other.contender == FREE_ATTENTION and other.samples and row.samples:
            told = row.spread[0] > other.spread[1]
            return 1 - other.median / row.median if told else math.nan
    return None


def _coarseness(row: Row) -> int:
    return COARSENESS.get(row.extra.get("precision", ""), 0)


def _overlap(one: Row, other: Row) -> bool:
    return one.spread[0] <= other.spread[1] and other.spread[0] <= one.spread[1]


def spread_percent(samples: Sequence[float]) -> float:
    """Return the distance from the smallest to the largest sample, in percent of the median."""
    return 100 * (max(samples) - min(samples)) / statistics.median(samples)


def widest_spread(rows: Iterable[Row]) -> str:
    """Return the widest spread of several rows."""
    return f"{max(spread_percent(row.samples) for row in rows if row.samples):.1f} %"


def quantiles(samples: Sequence[float]) -> str:
    """Return the 20th and 80th percentiles."""
    low, *_, high = statistics.quantiles(samples, n=5, method="inclusive")
    return f"{low:.1f} .. {high:.1f}"


def with_spread(row: Row, form: str) -> str:
    """Return the median with the smallest and the largest sample, or why there is none."""
    if not row.samples:
        return f"{row.status}: {row.reason}"
    middle, low, high = (form.format(value) for value in (row.median, *row.spread))
    return f"{middle} ({low} .. {high})"


def figure(value: float | None, form: str) -> str:
    """Return a number as a text: blank for None, a tilde for what the samples do not tell."""
    if value is None:
        return ""
    return WITHIN_SPREAD if math.isnan(value) else form.format(value)


def times(value: float | None) -> str:
    """Return a ratio as a text."""
    return figure(value, "{:.2g}" if value is not None and value < 0.1 else "{:.2f}")


def within_budget(row: Row) -> bool:
    """Return whether the check before the timing found an error within its budget."""
    found = row.check
    return bool(
        found
        and found.error is not None
        and found.budget is not None
        and found.error <= found.budget
    )


def where(provenance: Provenance) -> str:
    """Return the machine and the torch of a run."""
    return f"{provenance.machine}, torch {provenance.packages['torch']}"


def how(file: File, *packages: str) -> str:
    """Say where, with which versions and how often something was timed."""
    versions = (f", {name} {file.provenance.packages[name]}" for name in packages)
    place = where(file.provenance) + "".join(versions)
    return f"{place}; medians of {file.study['rounds']} interleaved rounds"


def beneath(row: Row, limits: dict[str, float]) -> tuple[int, float] | None:
    """Return how many samples are beneath the floor of a kernel's cell, and the floor in us.

    The floor is what the run's own copy and its fastest instruction allow; None without them.
    """
    highest = max(roofs(row, limits).values(), default=0.0)
    copy = limits.get("copy_gbps")
    if not highest or not copy:
        return None
    floor = max(row.kernel.flops / highest / 1e6, row.kernel.min_bytes / copy / 1e3)
    return sum(sample < floor for sample in row.samples), floor


def roofs(row: Row, limits: dict[str, float]) -> dict[str, float]:
    """Return the TFLOP/s that bound a kernel's dtype, as measured in the same run."""
    dtype = str(row.cell["dtype"])
    found: dict[str, Any] = {f"8192\u00b3 matmul, {dtype}": limits.get(f"matmul_{dtype}_tflops")}
    found |= {
        words: limits[name] / products
        for words, name, products in ROOFS.get(dtype, ())
        if name in limits
    }
    return {words: roof for words, roof in found.items() if roof}


def median_of(rows: Collection[Row], at: int, form: str) -> str:
    """Return the median of the one row of a length, or its status; blank if there is none."""
    for row in rows:
        if length(row) == at:
            return form.format(row.median) if row.samples else row.status
    return ""
