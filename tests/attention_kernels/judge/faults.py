"""Planted faults: conditions that a case must meet to show a fault; no kernel runs.

A fault shows under a condition on one dimension, on two or on three. PARTS has the conditions by
dimension: what a kernel's code depends on, such as the edge of a tile or a branch for a mask.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attention_kernels import BackendSpec
from attention_kernels.contract import Kernels
from attention_kernels.judge.cases import EXTREMES, LARGEST_WORK_OF_TRIPLE
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import cases_for
from attention_kernels.judge.worker import Runner
from attention_kernels.precision import PLAIN_PRECISIONS

Condition: TypeAlias = Callable[[Any], bool]
Fault: TypeAlias = tuple[tuple[str, str], ...]
"""Conditions, as dimension and name, that must all hold."""
Met: TypeAlias = dict[Fault, NDArray[np.bool_]]
"""Which of the cases meet a fault."""

TILES = (16, 32, 48, 64, 128)


def each(name: str, field: str, values: Iterable[Any]) -> dict[str, Condition]:
    """Return the condition that a field has a value, for each value."""
    return {name.format(x): lambda c, x=x: getattr(c, field) == x for x in values}  # type: ignore[misc]


MASKS: dict[str, Condition] = {"causal": lambda c: c.is_causal, "full": lambda c: not c.is_causal}
BATCHES: dict[str, Condition] = {
    "a batch of 1": lambda c: c.batch == 1,
    "a batch of 2": lambda c: c.batch == 2,
    "a batch above 2": lambda c: c.batch > 2,
    "a batch above 8": lambda c: c.batch > 8,
}
HEADS: dict[str, Condition] = {
    "1 head": lambda c: c.num_heads == 1,
    "an odd number of heads above 1": lambda c: c.num_heads > 1 and c.num_heads % 2 == 1,
    "an even number of heads": lambda c: c.num_heads % 2 == 0,
    "5 heads or fewer": lambda c: c.num_heads <= 5,
    "6 to 15 heads": lambda c: 6 <= c.num_heads <= 15,
    "16 heads or more": lambda c: c.num_heads >= 16,
}
HEAD_DIMS = each("head_dim {}", "head_dim", (32, 64, 128))
LAYOUTS = each("{} layout", "layout", ("fused", "contiguous", "transposed", "gaps")) | {
    "a layout for each of q, k and v": lambda c: "," in c.layout,
    "a stride of 0": lambda c: "one" in c.layout,
}
SOFTMAX_SCALES: dict[str, Condition] = {
    "no softmax_scale": lambda c: c.softmax_scale is None,
    "any softmax_scale": lambda c: c.softmax_scale is not None,
    "a softmax_scale below 0": lambda c: (c.softmax_scale or 0) < 0,
    "a softmax_scale of 0": lambda c: c.softmax_scale == 0,
    "a softmax_scale from 0 to 1": lambda c: 0 < (c.softmax_scale or 0) <= 1,
    "a softmax_scale of 1 or more": lambda c: (c.softmax_scale or 0) >= 1,
}
NUMBERS: dict[str, Condition] = {
    "a flat softmax": lambda c: c.scale <= 0.2,
    "small numbers": lambda c: 0.2 <= c.scale <= 0.8,
    "usual numbers": lambda c: 0.8 <= c.scale <= 2 and c.kind == "normal",
    "large numbers": lambda c: 2 <= c.scale <= 8,
}


def _tiles(length: Callable[[Any], int]) -> dict[str, Condition]:
    found: dict[str, Condition] = {}
    for tile in TILES:
        found |= {
            f"whole tiles of {tile}": lambda c, t=tile: length(c) % t == 0,  # type: ignore[misc]
            f"part of a tile of {tile}": lambda c, t=tile: length(c) < t,  # type: ignore[misc]
            f"tiles of {tile} and a rest": lambda c, t=tile: (  # type: ignore[misc]
                length(c) > t and length(c) % t > 0
            ),
            f"3 tiles of {tile} or more": lambda c, t=tile: length(c) > 2 * t,  # type: ignore[misc]
            f"1 more than tiles of {tile}": lambda c, t=tile: length(c) % t == 1,  # type: ignore[misc]
            f"1 less than tiles of {tile}": lambda c, t=tile: length(c) % t == t - 1,  # type: ignore[misc]
        }
    return found


PARTS: dict[str, dict[str, Condition]] = {
    "length": _tiles(lambda c: c.seqlen)
    | {
        "1 token": lambda c: c.seqlen == 1,
        "an odd length": lambda c: c.seqlen % 2 == 1,
        "more than 256 tokens": lambda c: c.seqlen > 256,
        "more than 512 tokens": lambda c: c.seqlen > 512,
    },
    "batch": BATCHES | {"an odd batch above 1": lambda c: c.batch > 1 and c.batch % 2 == 1},
    "heads": HEADS,
    "mask": MASKS,
    "head_dim": HEAD_DIMS,
    "layout": LAYOUTS,
    "softmax_scale": SOFTMAX_SCALES,
    "numbers": NUMBERS | {"values far from 0": lambda c: c.kind == "offset"},
}
"""Conditions whose pairs and triples are faults of attention."""
WIDTHS = each("a batch of {}", "batch", (*range(1, 65), 128)) | {
    f"{n} heads, a batch of 2 or more": lambda c, n=n: c.num_heads == n and c.batch > 1  # type: ignore[misc]
    for n in range(1, 65)
}
RARE: dict[str, Condition] = {
    "a softmax_scale above 3": lambda c: (c.softmax_scale or 0) > 3,
    "a softmax_scale above 20": lambda c: (c.softmax_scale or 0) > 20,
    "a softmax_scale below -0.5": lambda c: (c.softmax_scale or 0) < -0.5,
    "a softmax_scale below -5": lambda c: (c.softmax_scale or 0) < -5,
    "a standard deviation of 0.3 to 0.7": lambda c: 0.3 <= c.scale <= 0.7,
    "a standard deviation of 2 to 3.5": lambda c: 2 < c.scale < 3.5,
    "a standard deviation of 3.5 to 6": lambda c: 3.5 < c.scale < 6,
    "one head of v for all": lambda c: c.layout.endswith("one head") and c.num_heads > 1,
    "one row of k for all": lambda c: "one row" in c.layout.split(", ")[:2] and c.batch > 1,
    "v is k": lambda c: c.layout == "v is k",
    "k fused with another v": lambda c: ", fused, " in c.layout,
}
SINGLE: dict[str, Condition] = (
    WIDTHS
    | RARE
    | each("{} values", "kind", ("equal", *EXTREMES))
    | {
        "scores of 1e8": lambda c: c.scale >= 1e4,
        "q is k": lambda c: c.layout == "k is q",
        "more than 1,024 tokens": lambda c: c.seqlen > 1024,
        "GPT-2 small's batches": lambda c: (
            (c.num_heads, c.head_dim) == (12, 64) and c.batch > 1 and c.seqlen > 128
        ),
        "12 heads of more than 512 tokens, unusual numbers": lambda c: (
            c.num_heads == 12 and c.head_dim == 64 and c.seqlen > 512 and c.scale != 1
        ),
    }
)
NATIVE: dict[str, Condition] = {
    "2,048 tokens": lambda c: c.seqlen > 2048,
    "more than 4,096 tokens": lambda c: c.seqlen > 4096,
    "a batch of 512": lambda c: c.batch == 512,
}

DECODE_PARTS: dict[str, dict[str, Condition]] = {
    "length": _tiles(lambda c: max(c.lengths))
    | {
        "all of length 1": lambda c: {*c.lengths} == {1},
        "more than 256 tokens": lambda c: max(c.lengths) > 256,
        "more than 1,024 tokens": lambda c: max(c.lengths) > 1024,
    },
    "lengths": {
        "equal lengths": lambda c: len({*c.lengths}) == 1,
        "different lengths": lambda c: len({*c.lengths}) > 1,
        "the first row is the longest": lambda c: c.lengths[0] == max(c.lengths),
        "the longest row is not the first": lambda c: c.lengths[0] < max(c.lengths),
    },
    "cache": {
        "a full cache": lambda c: max(c.lengths) == c.max_seqlen,
        "a cache with room": lambda c: max(c.lengths) < c.max_seqlen,
    },
    "batch": BATCHES,
    "heads": HEADS,
    "head_dim": HEAD_DIMS,
    "layout": LAYOUTS,
    "softmax_scale": SOFTMAX_SCALES,
    "numbers": NUMBERS,
}
DIFFERENT = ("different lengths", "the longest row is not the first")
DECODE_SINGLE: dict[str, Condition] = (
    WIDTHS
    | RARE
    | {
        "a cache of more than 4,096 tokens": lambda c: c.max_seqlen > 4096,
        "a cache of 1,300 to 4,096 tokens": lambda c: 1300 < c.max_seqlen < 4097,
    }
    | {
        f"a row of {n} tokens": lambda c, n=n: n in c.lengths  # type: ignore[misc]
        for n in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257)
    }
    | {
        "lengths that differ from row 16 on": lambda c: len({*c.lengths[15:]}) > 1,
        "values far from 0": lambda c: c.kind == "offset",
        "equal values": lambda c: c.kind == "equal",
        "scores of 1e8": lambda c: c.scale >= 1e4,
    }
)


def met(
    cases: Sequence[Any],
    parts: Mapping[str, Mapping[str, Condition]],
    single: Mapping[str, Condition],
    is_planted: Callable[[Fault], bool],
) -> Met:
    """Return which cases meet each fault: a condition, or two or three on different dimensions."""
    found: Met = {(("", name),): _which(condition, cases) for name, condition in single.items()}
    rows = {
        part: {name: _which(condition, cases) for name, condition in conditions.items()}
        for part, conditions in parts.items()
    }
    for count in (1, 2, 3):
        for chosen in itertools.combinations(rows, count):
            for names in itertools.product(*(rows[part] for part in chosen)):
                fault = tuple(zip(chosen, names, strict=True))
                if is_planted(fault):
                    found[fault] = np.logical_and.reduce([rows[p][name] for p, name in fault])
    return found


def in_attention(fault: Fault) -> bool:
    """Return whether a fault is planted: not if only large cases, or none, can meet it.

    Three conditions are combined up to 512 tokens, and with batch or heads up to 96. The edges of
    tiles are those of 47 to 65 tokens.
    """
    if len(fault) == 1:
        return True
    names = dict(fault)
    if {"a softmax_scale of 1 or more", "large numbers"} <= {*names.values()}:
        return False
    sizes = ("length", "batch", "heads")
    least = {part: _least(part, name) for part, name in fault if part in sizes}
    length = least.pop("length", 1)
    head_dim = int(names.get("head_dim", "head_dim 32").split()[1])
    work = math.prod(least.values()) * (length if length == 1 else max(65, length)) ** 2 * head_dim
    if len(fault) == 2:
        return work <= 2e7
    return length <= (96 if least else 512) and work <= LARGEST_WORK_OF_TRIPLE


@functools.cache
def _least(part: str, name: str) -> int:
    """Return the least size that meets a condition."""
    sized = (SimpleNamespace(seqlen=n, batch=n, num_heads=n) for n in range(1, 2000))
    return next(case.seqlen for case in sized if PARTS[part][name](case))


def in_decode(fault: Fault) -> bool:
    """Return whether a fault is planted: any pair that exists, and triples of the batch's shape."""
    names = dict(fault)
    if {"a softmax_scale of 1 or more", "large numbers"} <= {*names.values()}:
        return False
    is_one_length = names.get("batch") == "a batch of 1" or names.get("length") == "all of length 1"
    if is_one_length and names.get("lengths") in DIFFERENT:
        return False
    return len(fault) < 3 or {*names} <= {"lengths", "batch", "heads", "head_dim", "layout"}


def remainders(cases: Sequence[Any]) -> Met:
    """Return which cases meet each remainder of a tile, with each mask, and with each head_dim.

    A remainder of 128 is met by a length above 128 alone.
    """
    found: Met = {}
    lengths = np.array([case.seqlen for case in cases])
    masks = {name: _which(condition, cases) for name, condition in MASKS.items()}
    dims = {name: _which(condition, cases) for name, condition in HEAD_DIMS.items()}
    for tile in TILES:
        for rest in range(tile):
            at_rest = (lengths % tile == rest) & (lengths > tile * (tile == 128))
            one = ("length", f"the remainder {rest} of tiles of {tile}")
            for mask, is_masked in masks.items():
                found[one, ("mask", mask)] = at_rest & is_masked
                if tile <= 64:
                    for dim, is_dim in dims.items():
                        both = ("mask", mask), ("head_dim", dim)
                        found[(one, *both)] = at_rest & is_masked & is_dim
    return found


def _which(condition: Condition, cases: Iterable[Any]) -> NDArray[np.bool_]:
    return np.array([bool(condition(case)) for case in cases])


def cases_of(
    seed: int, *, is_emulated: bool, quick: bool = False, head_dims: tuple[int, ...] = (32, 64, 128)
) -> list[Case | DecodeCase]:
    """Return the cases for a backend that has both kernels, in the order in which they run."""
    spec = BackendSpec(
        name="COVERED",
        family="test",
        summary="It is never called.",
        loader=lambda: Kernels(lambda *_: None, lambda *_: None),  # type: ignore[arg-type,return-value]
        precisions=PLAIN_PRECISIONS,
        head_dims=head_dims,
    )
    runner = _Emulated(spec, "cpu") if is_emulated else Runner(spec, "cpu")
    return cases_for(runner, [torch.float32], seed, quick=quick)


class _Emulated(Runner):
    is_emulated = True


def met_by(cases: Sequence[Case | DecodeCase], *, is_emulated: bool) -> Met:
    """Return which cases meet each fault of attention and of decode."""
    attention = [case for case in cases if isinstance(case, Case)]
    decode = [case for case in cases if isinstance(case, DecodeCase)]
    single = SINGLE if is_emulated else SINGLE | NATIVE
    found = met(attention, PARTS, single, in_attention) | remainders(attention)
    of_decode = met(decode, DECODE_PARTS, DECODE_SINGLE, in_decode)
    return found | {(("decode", ""), *fault): which for fault, which in of_decode.items()}
