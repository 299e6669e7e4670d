"""Which of a backend's cases run, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Container, Hashable, Sequence
from typing import Any, TypeVar

import torch

from attention_kernels.judge.cases import (
    BATCH_RANGES,
    COMPILED_RANGES,
    HEAD_RANGES,
    LENGTH_RANGES,
    LONGEST_IN_TRIPLES,
    SOFTMAX_SCALES,
    range_of,
)
from attention_kernels.judge.cover import in_order_of_gain
from attention_kernels.judge.inputs import Case, DecodeCase

CaseT = TypeVar("CaseT", bound=Case | DecodeCase)
# The fields that make the shape of a call.
SHAPES: dict[type, tuple[str, ...]] = {
    Case: ("seqlen", "head_dim", "batch", "num_heads", "group", "is_causal"),
    DecodeCase: ("lengths", "max_seqlen", "head_dim", "num_heads", "group"),
}
# What a call, emulated or not, and a block of 64 rows cost besides work: it decides which cases run
# first. On a GPU work is cheap.
CALL_COST, BLOCK_COST = {True: 5e4, False: 1e7}, 2e4


def with_few_shapes(found: Sequence[CaseT]) -> list[CaseT]:
    """Return cases of only a few shapes: for each dtype, one with a length of each COMPILED_RANGES.

    The shapes are of cases that try the most, and have as many head_dims as possible. The cases of
    a dtype take its shapes in turn, and keep their values, layout and scales.
    """
    head_dims = {case.head_dim for case in found}
    shapes: dict[torch.dtype, dict[range, dict[str, Any]]] = defaultdict(dict)
    for case, _ in in_order_of_gain(found, tries, lambda _: 1.0):
        of_dtype = shapes[case.dtype]
        left = head_dims - {shape["head_dim"] for shape in of_dtype.values()}
        if case.head_dim in left or not left:
            shape = {name: getattr(case, name) for name in SHAPES[type(case)]}
            of_dtype.setdefault(range_of(case.seqlen, COMPILED_RANGES), shape)
    turns = {dtype: itertools.cycle(of_dtype.values()) for dtype, of_dtype in shapes.items()}
    changed = dict.fromkeys(dataclasses.replace(x, **next(turns[x.dtype])) for x in found)
    return [x for x in changed if (x.kind, x.seqlen) != ("zero rows", 1)]  # nothing but zeros


def cost(case: Case | DecodeCase, *, is_emulated: bool) -> float:
    """Return about what a case costs, in the unit of its work."""
    batch = case.batch if isinstance(case, Case) else len(case.lengths)
    blocks = batch * case.num_heads * case.group * -(-case.seqlen // 64)
    return CALL_COST[is_emulated] + BLOCK_COST * blocks + case.work


def tries(case: Case | DecodeCase) -> list[Hashable]:
    """Return what a case tries: its sizes, and the pairs and triples of its values."""
    own: dict[str, Hashable] = {
        "num_heads": _place(case.num_heads, HEAD_RANGES),
        "head_dim": case.head_dim,
        "layout": case.layout,
        "softmax_scale": _place(case.softmax_scale, SOFTMAX_SCALES),
        "numbers": (case.kind, case.scale),
        "dtype": case.dtype,
    }
    if case.group > 1:
        own["group"] = case.group
    if isinstance(case, Case):
        batch, longest = case.batch, case.seqlen
        own["is_causal"] = case.is_causal
        sizes: list[Hashable] = [(longest, case.is_causal)]
    else:
        batch, longest = len(case.lengths), max(case.lengths)
        own["lengths"] = case.lengths.index(longest) > 0, len({*case.lengths}) > 1
        own["room"] = longest < case.max_seqlen
        sizes = [*case.lengths]
    own["batch"] = _place(batch, BATCH_RANGES)
    own["longest"] = _place(longest, LENGTH_RANGES)
    sizes += [("batch", batch), ("heads", case.num_heads)]
    counts = (2, 3) if longest <= LONGEST_IN_TRIPLES else (2,)
    groups = (itertools.combinations(own.items(), count) for count in counts)
    return [(type(case), part) for part in itertools.chain(sizes, *groups)]


def _place(value: Any, ranges: Sequence[Container[Any]]) -> Hashable:
    """Return which of the ranges contains a value, or else the value."""
    return next((n for n, values in enumerate(ranges) if value in values), str(value))
