"""The inputs that a backend is tested on, those that try the most for their cost first.

Most cases are drawn: shapes, values, scales and layouts jointly, from a seed that every case
prints. Of many that are drawn, those are taken that try something new: a length, a number of heads,
a batch size, or two or three values that no case has had together. table() lists the values. Fixed
cases are added: values where rounding shows, values of any size, and GPT-2's own shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
import torch

from attention_kernels.judge.calls import Op
from attention_kernels.judge.cover import Cover, Numbers, in_order_of_gain
from attention_kernels.judge.inputs import Case, DecodeCase, Extreme, Kind

SCALES = (0.02, 1.0, 8.0)
EVERY_LENGTH_TO = 257
EDGES = (257, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256)
LONGEST_EMULATED = 1025
REMAINDERS = 48, 64  # of tiles of these sizes, all with each mask and head_dim, if they are few
# Every number of heads, in a batch of two or more, and every batch size to here. Larger batches:
# `batch` completes 32 prompts at once on a CPU, 512 on a GPU.
WIDEST = 64
BATCHES, EMULATED_BATCHES = (100, 128, 300, 512), (100, 128)
LONGEST_CACHE = 16384
LARGER_GPT2_HEADS = (16, 20, 25)
# Values that are combined. A kernel may change its code path between two ranges, or at the edges
# of tiles: 48 is a multiple of 16, 64 of 16 and 32, and 128 of all three.
TILE_EDGES = [range(edge, edge + 1) for edge in (47, 48, 49, 63, 64, 65, 127, 128, 129)]
SHORT = [range(1, 2), range(2, 16), range(16, 47), range(50, 63), range(66, 127), range(130, 257)]
LONG = [range(257, 513), range(513, 1025), range(1025, 1281), range(1281, 4097)]
LONG_EMULATED = [range(257, 513), range(513, LONGEST_EMULATED + 1)]
CACHES = [range(257, 513), range(513, 1025), range(1025, 4097)]
BATCH_RANGES = (range(1, 2), range(2, 3), range(3, 8, 2), range(4, 9, 2), range(9, 33))
HEAD_RANGES = (range(1, 2), range(2, 5, 2), range(3, 6, 2), range(6, 16), range(16, 33))
# Query heads per key head.
GROUPS = (range(1, 2), range(2, 3), range(3, 8, 2), range(4, 17, 4))
# For a backend that takes any head_dim: small, odd, not multiples of 16, and above 128.
ANY_HEAD_DIM = (32, 64, 128, 1, 8, 20, 33, 80, 96, 160, 192, 256)
# A number between two is drawn evenly by its logarithm.
SOFTMAX_SCALES = (None, (0.02, 1.0), (1.0, 50.0), 0.0, (-50.0, -0.02))
# The largest softmax_scale times scale^2; above, 16-bit dtypes round scores by more than 16.
LARGEST_SOFTMAX_SCALE = 64.0
NUMBERS: tuple[tuple[Kind, float, float], ...] = (
    ("normal", 0.02, 0.2),
    ("normal", 0.2, 0.8),
    ("normal", 0.8, 2.0),
    ("normal", 2.0, 8.0),
    ("offset", 0.3, 3.0),
)
EXTREMES: tuple[Kind, ...] = get_args(Extreme)
PLACES = ("fused", "contiguous", "transposed", "gaps", "one head", "one row")
LAYOUTS = (
    ("fused",),
    ("contiguous",),
    ("transposed",),
    ("gaps",),
    ("one head", "one row"),
    ("k is q", "v is k"),
    tuple(", ".join(x) for x in itertools.product(PLACES, repeat=3) if len({*x}) > 1),
)
UNALIGNED = ("unaligned",)
# The most multiplications of a score by a value, in a case of: three values that are combined; any
# values, emulated and not; sizes that are free within their ranges; and GPT-2's own batches.
LARGEST_WORK_OF_TRIPLE = 2.5e6
LARGEST_WORK, USUAL_WORK, GPT2_WORK = (3e8, 2e7), (1e7, 5e5), 5e7
# What a call and a block of 64 rows cost besides work. On a GPU work is cheap.
CALL_COST, BLOCK_COST = (1e7, 5e4), 2e4
# How many cases are drawn at once, and of each length and mask, and of each width.
DRAWN, DRAWN_OF_LENGTH, DRAWN_OF_WIDTH = 2000, 16, 12
# What a fixed case counts for: so much that GPT-2's own batches are in a quick run.
PARTS_OF_FIXED = 30, 120
# The dimensions of decode whose triples are combined; of attention, all are.
DECODE_TRIPLES = "lengths", "batch", "num_heads", "head_dim", "layout"
MOST_COMBINED_HEAD_DIMS = 3
# A backend that compiles for each shape gets one shape of each dtype with a length of each range.
COMPILED_RANGES = (range(1, 48), range(48, 129), range(129, 513), range(513, 4097))
# The fields that make the shape of a call.
SHAPES: dict[type, tuple[str, ...]] = {
    Case: ("seqlen", "head_dim", "batch", "num_heads", "group", "is_causal"),
    DecodeCase: ("lengths", "max_seqlen", "head_dim", "num_heads", "group"),
}
Ordered: TypeAlias = list[tuple[Case | DecodeCase, float]]
"""Cases, and the share of what all of them try that was tried before each."""


def dimensions(
    op: Op,
    head_dims: Sequence[Any],
    dtypes: Sequence[Any],
    *,
    is_emulated: bool = False,
    has_groups: bool = True,
    is_aligned: bool = False,
) -> dict[str, Sequence[Any]]:
    """Return the values of each dimension that are combined; those of a range are one value."""
    longer = CACHES if op == "decode" else LONG_EMULATED if is_emulated else LONG
    own: dict[str, Sequence[Any]] = {"is_causal": (True, False)}
    if op == "decode":
        lengths = "equal", "the first is the longest", "a later one is the longest"
        own = {"lengths": lengths, "room": (range(1), range(1, 32))}
    return {
        "seqlen": [*TILE_EDGES, *SHORT, *longer],
        "batch": BATCH_RANGES,
        "num_heads": HEAD_RANGES,
        "group": GROUPS if has_groups else GROUPS[:1],
        "head_dim": head_dims,
        "layout": LAYOUTS if is_aligned else (*LAYOUTS, UNALIGNED),
        "softmax_scale": SOFTMAX_SCALES,
        "numbers": NUMBERS,
        "dtype": dtypes,
        **own,
    }


def ordered_cases(
    op: Op,
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    seed: int,
    *,
    is_emulated: bool = False,
    has_groups: bool = False,
    is_aligned: bool = False,
) -> Ordered:
    """Return every case of attention or of decode, those that try the most for their cost first.

    has_groups: also cases with fewer key heads. is_aligned: none off multiples of 16 bytes.
    """
    fixed: list[Case | DecodeCase] = []
    for dtype in dtypes:
        if op == "decode":
            fixed += fixed_decode_cases(head_dims, dtype, seed)
        else:
            fixed += hard_cases(head_dims, dtype, seed, is_emulated=is_emulated)
            fixed += extreme_cases(usual_head_dim(head_dims), dtype, seed)
    options = {"has_groups": has_groups, "is_aligned": is_aligned, "is_emulated": is_emulated}
    values = dimensions(op, head_dims, dtypes, **options)
    drawn = _draw(op, values, np.random.default_rng([seed, op == "decode"]), is_emulated)
    costs = [cost(case, is_emulated=is_emulated) for case in fixed]
    draw, make = random.Random(f"{op} {seed}"), _decode_case if op == "decode" else _case
    found: Ordered = []
    for n, tried in in_order_of_gain(costs, drawn, PARTS_OF_FIXED[is_emulated]):
        if n < 0:
            found.append((fixed[n], tried))
            continue
        chosen = {name: of_name[drawn.at[name][n]] for name, of_name in values.items()}
        chosen |= {name: int(of_name[n]) for name, of_name in drawn.sizes.items()}
        found.append((make(_with_numbers(chosen, draw), draw, seed), tried))
    return found


def _draw(
    op: Op, values: dict[str, Sequence[Any]], draw: np.random.Generator, is_emulated: bool
) -> Cover:
    """Draw many cases: of any values, of each length and mask, and of each width."""
    is_decode, head_dims = op == "decode", len(values["head_dim"])

    def work(sizes: Mapping[str, Numbers]) -> Numbers:
        numbers = sizes["batch"] * sizes["num_heads"] * sizes["group"] * sizes["head_dim"]
        numbers *= 5 * sizes["seqlen"] if is_decode else sizes["seqlen"] ** 2
        return numbers

    powers = {"batch": 1, "num_heads": 1, "group": 1, "head_dim": 1, "seqlen": 2 - is_decode}
    ranges = [range(x, x + 1) for x in values["head_dim"]]
    cover = Cover({**values, "head_dim": ranges}, powers, work, draw)
    largest, usual = LARGEST_WORK[is_emulated], USUAL_WORK[is_emulated]
    for most in [largest] * 3 + [LARGEST_WORK_OF_TRIPLE] * (1 if is_decode else 10):
        cover.add(DRAWN, usual, most)
    if not is_decode:
        lengths = np.arange(1, EVERY_LENGTH_TO + 1).repeat(2 * DRAWN_OF_LENGTH)
        masks = np.tile([0, 1], len(lengths) // 2)
        cover.add(len(lengths), usual, 3 * usual, seqlen=lengths, is_causal=masks)
        short = lengths <= max(REMAINDERS)
        for head_dim in values["head_dim"][:MOST_COMBINED_HEAD_DIMS]:
            dims = np.full(short.sum(), head_dim)
            cover.add(
                len(dims), usual, seqlen=lengths[short], is_causal=masks[short], head_dim=dims
            )
    widths = np.arange(1, WIDEST + 1).repeat(DRAWN_OF_WIDTH)
    batches = np.append(widths, EMULATED_BATCHES if is_emulated else BATCHES)
    for given in (
        {"num_heads": widths, "batch": draw.integers(2, 4, len(widths))},
        {"batch": batches, "num_heads": draw.integers(1, 4, len(batches))},
    ):
        count = len(given["batch"])
        cover.add(count, usual, seqlen=draw.integers(2, 21, count), **given)
    cover.keep(work(cover.least) <= largest)
    if is_decode:
        is_one = (cover.sizes["batch"] == 1) | (cover.sizes["seqlen"] == 1)
        cover.keep(~(is_one & (cover.at["lengths"] > 0)))
    least = cover.least
    blocks = least["batch"] * least["num_heads"] * least["group"] * -(-least["seqlen"] // 64)
    cover.costs = CALL_COST[is_emulated] + BLOCK_COST * blocks + work(least)
    names = [name for name, of_name in values.items() if len(of_name) > 1]
    cover.combine(names, 2)
    left_out = {"group"} | ({"head_dim"} if head_dims > MOST_COMBINED_HEAD_DIMS else set())
    triples = [x for x in names if x not in left_out and (not is_decode or x in DECODE_TRIPLES)]
    cover.combine(triples, 3, work(least) <= LARGEST_WORK_OF_TRIPLE)
    batch, heads = cover.sizes["batch"], cover.sizes["num_heads"]
    cover.close(batch)
    cover.close(heads, batch > 1)
    if not is_decode:
        seqlen, mask = cover.sizes["seqlen"], cover.at["is_causal"]
        cover.close(2 * seqlen + mask, seqlen <= EVERY_LENGTH_TO)
        if 1 < head_dims <= MOST_COMBINED_HEAD_DIMS:  # every remainder of a tile with each of them
            for tile in REMAINDERS:
                cover.close((2 * (seqlen % tile) + mask) * head_dims + cover.at["head_dim"])
    return cover


def cost(case: Case | DecodeCase, *, is_emulated: bool) -> float:
    """Return about what a case costs, in the unit of its work."""
    blocks = case.batch * case.num_heads * case.group * -(-case.seqlen // 64)
    return CALL_COST[is_emulated] + BLOCK_COST * blocks + case.work


def hard_cases(
    head_dims: Sequence[int], dtype: torch.dtype, seed: int, *, is_emulated: bool
) -> list[Case]:
    """Return cases in which rounding shows, long ones, and batches of GPT-2's own shapes.

    Those of more than 4,096 keys find errors that grow with the length; those of 12 heads find
    errors that occur only at GPT-2's own shape.
    """
    head_dim, draw = usual_head_dim(head_dims), random.Random(f"hard {dtype} {seed}")
    fields: dict[str, Any] = {"dtype": dtype, "seed": seed}
    found = [
        Case(300, head_dim, 19.3, is_causal=is_causal, kind="equal", **fields)
        for is_causal in (True, False)
    ]
    found += [Case(100, head_dim, kind="offset", **fields)]
    if dtype != torch.float16:  # in float16, scores of 1e8 overflow
        found += [
            Case(64, head_dim, 1e4, is_causal=is_causal, **fields) for is_causal in (True, False)
        ]
    for heads in (12, draw.choice(LARGER_GPT2_HEADS)):
        longest = max(130, math.isqrt(int(GPT2_WORK / (2 * heads * head_dim))))
        seqlen = draw.randint(129, longest)
        found += [Case(seqlen, head_dim, batch=2, num_heads=heads, **fields)]
    for scale in (8.0,) if is_emulated else SCALES:
        found += [Case(513, head_dim, scale, num_heads=12, **fields)]
    if is_emulated:
        return [*found, Case(LONGEST_EMULATED, head_dim, num_heads=1, **fields)]
    long = draw.randint(4097, 4608)
    found += [Case(long, head_dim, num_heads=1, is_causal=False, kind="offset", **fields)]
    if dtype == torch.float32:
        found += [Case(draw.randint(2501, 4608), head_dim, num_heads=1, **fields)]
    return found


def usual_head_dim(head_dims: Sequence[int]) -> int:
    """Return GPT-2's head_dim, 64, or the first of head_dims if 64 is not among them."""
    return 64 if 64 in head_dims else head_dims[0]


def extreme_cases(head_dim: int, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield cases whose values span many orders of magnitude; float16 cannot hold them."""
    if dtype == torch.float16:
        return
    for kind, is_causal in itertools.product(EXTREMES, (True, False)):
        yield Case(100, head_dim, is_causal=is_causal, dtype=dtype, seed=seed, kind=kind)


def fixed_decode_cases(
    head_dims: Sequence[int], dtype: torch.dtype, seed: int
) -> Iterator[DecodeCase]:
    """Yield cases of lengths around the edges of tiles in one batch, and one of a long cache."""
    edges: dict[str, Any] = {"lengths": EDGES, "max_seqlen": max(EDGES)}
    for head_dim in head_dims:
        yield DecodeCase(head_dim, dtype, seed, **edges)
    usual, draw = usual_head_dim(head_dims), random.Random(f"long {dtype} {seed}")
    yield DecodeCase(usual, dtype, seed, scale=19.3, kind="equal", **edges)
    yield DecodeCase(usual, dtype, seed, kind="offset", **edges)
    if dtype in (torch.float32, torch.float64):  # 16-bit dtypes round scores of 1e8 too much
        yield DecodeCase(usual, dtype, seed, scale=1e4, **edges)
    longest = draw.randint(4097, LONGEST_CACHE)
    lengths = draw.randint(1, longest), longest
    yield DecodeCase(usual, dtype, seed, lengths, longest + draw.randint(0, 31), num_heads=1)


def _with_numbers(chosen: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Draw what is open in the chosen values: layout, scale and softmax_scale."""
    kind, *scales = chosen.pop("numbers")
    scale, softmax_scale = _between(draw, *scales), chosen["softmax_scale"]
    if isinstance(softmax_scale, tuple):
        least, most = sorted(map(abs, softmax_scale))
        size = _between(draw, least, min(most, LARGEST_SOFTMAX_SCALE / scale**2))
        softmax_scale = math.copysign(size, softmax_scale[0])
    layout = draw.choice(chosen["layout"])
    return chosen | {
        "kind": kind,
        "scale": scale,
        "softmax_scale": softmax_scale,
        "layout": layout,
    }


def _between(draw: random.Random, least: float, most: float) -> float:
    """Draw a number of two digits, evenly by its logarithm."""
    return float(f"{math.exp(draw.uniform(math.log(least), math.log(most))):.2g}")


def _case(chosen: dict[str, Any], _: random.Random, seed: int) -> Case:
    return Case(seed=seed, **chosen)


def _decode_case(chosen: dict[str, Any], draw: random.Random, seed: int) -> DecodeCase:
    longest, batch, lengths = (chosen.pop(name) for name in ("seqlen", "batch", "lengths"))
    rows = [longest] * batch
    if lengths != "equal":
        rows[1:] = [draw.randint(1, max(1, longest - 1)) for _ in rows[1:]]
    if lengths == "a later one is the longest":
        place = draw.randrange(batch // 2, batch)
        rows[0], rows[place] = rows[place], rows[0]
    max_seqlen = longest + draw.choice(chosen.pop("room"))
    return DecodeCase(seed=seed, lengths=tuple(rows), max_seqlen=max_seqlen, **chosen)


def with_few_shapes(found: Ordered) -> Ordered:
    """Return cases of only a few shapes: for each dtype, one with a length of each COMPILED_RANGES.

    The shapes are of the first cases, and have as many head_dims as possible. The cases of a dtype
    take its shapes in turn, and keep their values, layout and scales.
    """
    head_dims = {case.head_dim for case, _ in found}
    shapes: dict[torch.dtype, dict[range, dict[str, Any]]] = defaultdict(dict)
    for case, _ in found:
        of_dtype = shapes[case.dtype]
        left = head_dims - {shape["head_dim"] for shape in of_dtype.values()}
        if case.head_dim in left or not left:
            shape = {name: getattr(case, name) for name in SHAPES[type(case)]}
            ranges = (x for x in COMPILED_RANGES if case.seqlen in x)
            of_dtype.setdefault(next(ranges, COMPILED_RANGES[-1]), shape)
    turns = {dtype: itertools.cycle(of_dtype.values()) for dtype, of_dtype in shapes.items()}
    changed: dict[Case | DecodeCase, float] = {}
    for case, tried in found:
        changed.setdefault(dataclasses.replace(case, **next(turns[case.dtype])), tried)
    return [x for x in changed.items() if (x[0].kind, x[0].seqlen) != ("zero rows", 1)]  # all zeros


def table() -> str:
    """Return the values of each dimension as a Markdown table; those in brackets are one value."""
    each = ("each that is declared",)
    columns = [
        dimensions("attention", each, each),
        dimensions("attention", each, each, is_emulated=True),
        dimensions("decode", each, each),
    ]
    names = {"room": "room in the cache", "group": "query heads per key head"}
    names["lengths"] = "lengths in a batch"
    lines = ["| dimension | attention | attention, emulated | decode |", "|---|---|---|---|"]
    for name in columns[0] | columns[2]:
        texts = [", ".join(map(_text, values.get(name, ()))) for values in columns]
        texts[1:] = ["the same" if text and text == texts[0] else text for text in texts[1:]]
        lines.append(f"| {' | '.join([names.get(name, name), *texts])} |")
    of_each = ", ".join(map(_text, COMPILED_RANGES))
    of_each = f"for each dtype, one with a seqlen of each of {of_each}"
    return "\n".join([*lines, f"| shapes, if compiled for each | {of_each} |  | the same |"])


def _text(value: Any) -> str:
    """Return a value of a dimension; a range or a tuple of which one is drawn is in brackets."""
    if isinstance(value, range):
        if len(value) > 3 and value.step == 1:
            return f"[{value[0]} to {value[-1]}]"
        texts = [*map(str, value)]
    elif isinstance(value, tuple) and isinstance(value[-1], float):
        kind = f"{value[0]} times " if isinstance(value[0], str) else ""
        return f"{kind}[{value[-2]:g} to {value[-1]:g}]"
    elif isinstance(value, tuple):
        texts = [*value] if len(value) < 6 else ["a different one for each of q, k and v"]
    else:
        texts = [{"True": "causal", "False": "full", "None": "default"}.get(str(value), f"{value}")]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
