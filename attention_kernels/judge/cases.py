"""The inputs that a backend is tested on. Whatever the seed, they cover:

every length up to 257, causal and full: two tiles of 128 and their edges (every_length)
every number of heads up to 32, 48 and 64; every batch up to 33, and larger ones (every_width)
values where rounding shows, values of any size, GPT-2's own shapes (hard_cases, extreme_cases)
each range of lengths with small and large batches and numbers of heads (every_shape)
all pairs of values of any two dimensions, and triples of short lengths (random_cases)
for a backend that supports_gqa, each value with each number of query heads per key head

Everything else is drawn from a seed that every case prints. table() lists the values.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from attention_kernels.judge.cover import Cover, Group, Places
from attention_kernels.judge.inputs import Case, DecodeCase, Extreme, Kind, Layout

SCALES = (0.02, 1.0, 8.0)
EVERY_LENGTH_TO = 257
EDGES = (257, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256)
LONGEST_EMULATED = 1025
# Numbers of heads and batch sizes. `batch` completes 32 prompts at once on a CPU, 512 on a GPU.
WIDTHS = (*range(1, 33), 48, 64)
BATCHES = (*range(1, 34), 64, 128, 512)
LARGEST_EMULATED_BATCH = 128
# Values that are combined. A kernel may change its code path between two ranges, or at the edges
# of tiles: 48 is a multiple of 16, 64 of 16 and 32, and 128 of all three.
SHORT_RANGES = ((1, 1), (2, 15), (16, 46), (50, 62), (66, 126), (130, 256), (257, 512))
TILE_EDGES = (47, 48, 49, 63, 64, 65, 127, 128, 129)
LONG_RANGES = ((513, 1024), (1025, 1280), (1281, 2500))
LONG_RANGES_EMULATED = ((513, LONGEST_EMULATED),)
DECODE_RANGES = (
    (1, 1),
    (2, 15),
    (16, 46),
    (50, 62),
    (66, 126),
    (130, 512),
    (513, 1024),
    (1025, 1200),
)
LENGTH_RANGES = [range(edge, edge + 1) for edge in TILE_EDGES] + [
    range(low, high + 1) for low, high in (*SHORT_RANGES, *LONG_RANGES)
]
BATCH_RANGES = (range(1, 2), range(2, 3), range(3, 8, 2), range(4, 9, 2), range(9, 33))
HEAD_RANGES = (range(1, 2), range(2, 5, 2), range(3, 6, 2), range(6, 16), range(16, 33))
# Query heads per key head.
GROUPS = (2, 7)
# The batches and numbers of heads that every length is combined with, causal and full.
SHAPE_BATCHES = BATCH_RANGES[0], BATCH_RANGES[2]
SHAPE_HEADS = HEAD_RANGES[0], HEAD_RANGES[-1]
# The longest of triples, and of triples with batch or num_heads; the most head_dims of triples.
LONGEST_IN_TRIPLES, LONGEST_WIDE_IN_TRIPLES = 512, 126
MOST_COMBINED_HEAD_DIMS = 3
# For a backend that takes any head_dim: small, odd, not multiples of 16, and above 128.
ANY_HEAD_DIM = (32, 64, 128, 1, 8, 20, 33, 80, 96, 160, 192, 256)
SOFTMAX_SCALES = ((None,), (0.05, 0.3, 1.0), (3.0,), (0.0,), (-0.5,))
LARGEST_SOFTMAX_SCALE = 1.0  # at scale 8; above, 16-bit dtypes round scores by more than 16
NUMBERS: tuple[tuple[Kind, float], ...] = (
    ("normal", 0.02),
    ("normal", 1.0),
    ("normal", 8.0),
    ("offset", 1.0),
)
EXTREMES: tuple[Kind, ...] = get_args(Extreme)
LAYOUTS: tuple[Layout, ...] = ("fused", "contiguous", "transposed", "gaps", "mixed")
# The most multiplications of a score by a value, in a case of: every_length() with more than one
# head; a triple; a pair, if emulated; random sizes that are free within their ranges; any shape.
SMALL_WORK = 5e5
LARGEST_WORK_OF_PAIR, LARGEST_WORK_OF_TRIPLE = 2e7, 9e6
USUAL_WORK, USUAL_EMULATED_WORK = 1e7, 5e5
LARGEST_WORK, LARGEST_EMULATED_WORK = 3e8, 1.1e8
SIZES = "batch", "num_heads", "seqlen", "head_dim"
# A backend that compiles for each shape gets one shape of each dtype with a length of each range.
COMPILED_RANGES = (range(1, 48), range(48, 129), range(129, 513), range(513, 4097))
CALL_WORK = 5e5  # what a call counts for when combinations are chosen


def hard_cases(
    head_dims: Sequence[int], dtype: torch.dtype, seed: int, *, is_emulated: bool
) -> list[Case]:
    """Return cases in which rounding shows: equal scores, inputs of 1e4, values far from zero.

    The cases of 4,096 keys find errors that grow with the length; those of 12 heads find errors
    that occur only at GPT-2's own shape.
    """
    head_dim = usual_head_dim(head_dims)
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
    for scale in (8.0,) if is_emulated else SCALES:
        found += [Case(513, head_dim, scale, num_heads=12, **fields)]
    if is_emulated:
        return [*found, Case(LONGEST_EMULATED, head_dim, num_heads=1, **fields)]
    found += [Case(4096, head_dim, num_heads=1, is_causal=False, kind="offset", **fields)]
    if dtype == torch.float32:
        found += [Case(4096, head_dim, num_heads=1, **fields)]
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


class Drawn:
    """Draws the cases of attention from a seed; has_groups: those with fewer key heads.

    Its methods share the combinations that are still open, so call them in the order below.
    """

    def __init__(
        self,
        head_dims: Sequence[int],
        dtypes: Sequence[torch.dtype],
        seed: int,
        *,
        is_emulated: bool,
        has_groups: bool = False,
    ) -> None:
        self.head_dims, self.seed, self.is_emulated = head_dims, seed, is_emulated
        self.draw = random.Random(f"cases {seed}")
        self.dimensions = attention_dimensions(head_dims, dtypes, is_emulated=is_emulated)
        groups = attention_groups(self.dimensions)
        if has_groups:
            groups = _with_groups(self.dimensions)
            self.dimensions["group"] = GROUPS
        self.usual, self.largest, self.largest_of_pair = (
            (USUAL_EMULATED_WORK, LARGEST_EMULATED_WORK, LARGEST_WORK_OF_PAIR)
            if is_emulated
            else (USUAL_WORK, LARGEST_WORK, LARGEST_WORK)
        )

        names = *SIZES, *["group"] * has_groups
        least = {name: _least(self.dimensions[name]) for name in names}

        def cost(at: Mapping[str, Places]) -> NDArray[np.float64]:
            sizes = {name: values[at[name]] for name, values in least.items()}
            return np.where(_is_moderate(at), CALL_WORK + _work(sizes), math.inf)

        self.cover = Cover(self.dimensions, groups, self.draw, cost)

    def every_length(self) -> Iterator[Case]:
        """Yield two cases of each length up to EVERY_LENGTH_TO, one causal and one full.

        Every remainder of a tile of up to 64 meets up to three head_dims with each mask. The
        longest have the first head_dim, so that they stay small.
        """
        turns = [*reversed(self.head_dims)]
        for seqlen in range(1, EVERY_LENGTH_TO + 1):
            turn = min(seqlen * len(turns) // 192, len(turns) - 1)
            for is_causal in (True, False):
                # The masks do not meet the same ones at the same length.
                head_dim = turns[1 - turn if is_causal and len(turns) > 2 > turn else turn]
                width = max(1, min(12, int(SMALL_WORK / (seqlen**2 * head_dim))))
                batch = self.draw.randint(1, min(4, width))
                heads = self.draw.randint(1, width // batch)
                yield self._case(seqlen, head_dim, batch, heads, is_causal)

    def every_width(self) -> Iterator[Case]:
        """Yield a short case of each number of heads and of each batch size."""
        for batch, heads in _widths(self.draw, is_emulated=self.is_emulated):
            seqlen, head_dim = self.draw.randint(1, 20), self.draw.choice(self.head_dims)
            yield self._case(seqlen, head_dim, batch, heads, self.draw.random() < 0.5)

    def _case(self, seqlen: int, head_dim: int, batch: int, heads: int, is_causal: bool) -> Case:
        """Return a case of a given shape that closes as many combinations as possible."""
        fixed = {
            "seqlen": next(x for x in self.dimensions["seqlen"] if seqlen in x),
            "batch": range_of(batch, BATCH_RANGES),
            "num_heads": range_of(heads, HEAD_RANGES),
            "head_dim": head_dim,
            "is_causal": is_causal,
        }
        chosen = self.cover.choose(fixed)
        assert chosen is not None
        chosen |= {"seqlen": seqlen, "batch": batch, "num_heads": heads}
        return self._with_numbers(chosen)

    def every_shape(self) -> Iterator[Case]:
        """Yield a case of each range of lengths, SHAPE_BATCHES and SHAPE_HEADS; no large ones."""
        lengths = [x for x in self.dimensions["seqlen"] if len(x) > 1]
        shapes = itertools.product(lengths, SHAPE_BATCHES, SHAPE_HEADS, (True, False))
        for shape in shapes:
            fixed = dict(zip(("seqlen", "batch", "num_heads", "is_causal"), shape, strict=True))
            fixed["head_dim"] = self.head_dims[0]
            if (chosen := self.cover.choose(fixed, self.largest)) is not None:
                yield self._sized(chosen)

    def random_cases(self) -> Iterator[Case]:
        """Yield cases until every combination of the groups has occurred."""
        limits = CALL_WORK + self.largest_of_pair, CALL_WORK + LARGEST_WORK_OF_TRIPLE
        while (chosen := self.cover.next(*limits)) is not None:
            yield self._sized(chosen)

    def _sized(self, chosen: dict[str, Any]) -> Case:
        """Draw batch, num_heads and seqlen from their ranges, and the smallest if it is large."""
        names = [name for name in (*SIZES, "group") if name in chosen]
        room = self.usual / _work({name: _least([chosen[name]]) for name in names}).item()
        for name, power in (("batch", 1), ("num_heads", 1), ("seqlen", 2)):
            values = chosen[name]
            least = values[0]
            most = max(least, int(least * max(room, 0.0) ** (1 / power)))
            chosen[name] = self.draw.choice([x for x in values if x <= most])
            room *= (least / chosen[name]) ** power
        return self._with_numbers(chosen)

    def _with_numbers(self, chosen: dict[str, Any]) -> Case:
        (kind, scale), softmax_scales = chosen.pop("numbers"), chosen.pop("softmax_scale")
        return Case(
            kind=kind,
            scale=scale,
            softmax_scale=self.draw.choice(softmax_scales),
            seed=self.seed,
            **chosen,
        )


def attention_dimensions(
    head_dims: Sequence[Any], dtypes: Sequence[Any], *, is_emulated: bool
) -> dict[str, Sequence[Any]]:
    """Return the values of each dimension that are combined; those of a range are one value."""
    ranges = (*SHORT_RANGES, *(LONG_RANGES_EMULATED if is_emulated else LONG_RANGES))
    lengths = [range(edge, edge + 1) for edge in TILE_EDGES]
    return {
        "seqlen": [*lengths, *(range(low, high + 1) for low, high in ranges)],
        "batch": BATCH_RANGES,
        "num_heads": HEAD_RANGES,
        "head_dim": head_dims,
        "is_causal": (True, False),
        "layout": LAYOUTS,
        "softmax_scale": SOFTMAX_SCALES,
        "numbers": NUMBERS,
        "dtype": dtypes,
    }


def _with_groups(dimensions: Mapping[str, Sequence[Any]]) -> list[Group]:
    """Return the pairs of each value of any dimension with each of GROUPS."""
    return [{name: values, "group": GROUPS} for name, values in dimensions.items()]


def attention_groups(dimensions: Mapping[str, Sequence[Any]]) -> list[Group]:
    """Return the groups whose combinations all occur: pairs, and triples of short lengths."""

    def among(longest: int, *without: str) -> dict[str, Sequence[Any]]:
        if len(dimensions["head_dim"]) > MOST_COMBINED_HEAD_DIMS:
            without = (*without, "head_dim")
        found = {name: values for name, values in dimensions.items() if name not in without}
        return {**found, "seqlen": [x for x in dimensions["seqlen"] if x[-1] <= longest]}

    def groups(values: Group, count: int) -> list[Group]:
        chosen = itertools.combinations(values, count)
        return [{name: values[name] for name in names} for names in chosen]

    return [
        *groups(dimensions, 2),
        *groups(among(LONGEST_IN_TRIPLES, "batch", "num_heads"), 3),
        *groups(among(LONGEST_WIDE_IN_TRIPLES), 3),
    ]


def attention_cases(
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    seed: int,
    *,
    is_emulated: bool,
    has_groups: bool = False,
) -> list[Case]:
    """Return every case of attention; has_groups: also those with fewer key heads."""
    drawn = Drawn(head_dims, dtypes, seed, is_emulated=is_emulated)
    found = [*drawn.every_length()]  # in this order, which decides what the later ones draw
    found += [*drawn.every_width(), *drawn.every_shape(), *drawn.random_cases()]
    if has_groups:
        found += Drawn(
            head_dims, dtypes, seed, is_emulated=is_emulated, has_groups=True
        ).random_cases()
    for dtype in dtypes:
        found += hard_cases(head_dims, dtype, seed, is_emulated=is_emulated)
        found += extreme_cases(usual_head_dim(head_dims), dtype, seed)
    return found


def _widths(draw: random.Random, *, is_emulated: bool) -> Iterator[tuple[int, int]]:
    """Yield a batch size with each number of heads, and a number of heads with each batch size."""
    for heads in WIDTHS:
        yield draw.randint(1, 2), heads
    for batch in BATCHES:
        if not is_emulated or batch <= LARGEST_EMULATED_BATCH:
            yield batch, draw.randint(1, 3)


def range_of(value: int, ranges: Sequence[range]) -> range:
    """Return the range that contains a value; the last one for a larger value."""
    return next((x for x in ranges if value in x), ranges[-1])


def _is_moderate(at: Mapping[str, Places]) -> NDArray[np.bool_]:
    """Return where scores stay so small that 16-bit dtypes round them by less than 16."""
    largest = np.array([max(x or 0 for x in scales) for scales in SOFTMAX_SCALES])
    scale = np.array([scale for _, scale in NUMBERS])
    is_small: NDArray[np.bool_] = largest[at["softmax_scale"]] <= LARGEST_SOFTMAX_SCALE
    return is_small | (scale[at["numbers"]] <= 1)


def _least(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return the values of a dimension of numbers, of each range the least."""
    return np.array([x[0] if isinstance(x, range) else x for x in values], dtype=float)


def _work(sizes: Mapping[str, Any]) -> Any:
    """Return the multiplications of a score by a value, given numbers or arrays by SIZES."""
    heads = sizes["num_heads"] * sizes.get("group", 1)
    return sizes["batch"] * heads * sizes["seqlen"] ** 2 * sizes["head_dim"]


def decode_cases(
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    seed: int,
    *,
    is_emulated: bool = False,
    has_groups: bool = False,
) -> Iterator[DecodeCase]:
    """Yield fixed cases of each dtype, cases of each width, and random ones that cover all pairs.

    The fixed cases have lengths around the edges of tiles in one batch: one case of each head_dim,
    and the inputs of hard_cases() with one head_dim. has_groups: also cases with fewer key heads.
    """
    edges: dict[str, Any] = {"lengths": EDGES, "max_seqlen": max(EDGES)}
    for dtype in dtypes:
        for head_dim in head_dims:
            yield DecodeCase(head_dim, dtype, seed, **edges)
        usual = usual_head_dim(head_dims)
        yield DecodeCase(usual, dtype, seed, scale=19.3, kind="equal", **edges)
        yield DecodeCase(usual, dtype, seed, kind="offset", **edges)
        if dtype in (torch.float32, torch.float64):  # 16-bit dtypes round scores of 1e8 too much
            yield DecodeCase(usual, dtype, seed, scale=1e4, **edges)
    draw = random.Random(f"decode {seed}")
    dimensions = decode_dimensions(head_dims, dtypes)

    least = {name: _least(dimensions[name]) for name in ("longest", "batch", "num_heads")}

    def cost(at: Mapping[str, Places]) -> NDArray[np.float64]:
        longest, batch, heads = (values[at[name]] for name, values in least.items())
        is_equal = at["lengths"] == dimensions["lengths"].index("equal")
        is_possible = is_equal | ((batch > 1) & (longest > 1))
        costs = longest * batch * heads + 1e3
        return np.where(is_possible & _is_moderate(at), costs, math.inf)

    cover = Cover(dimensions, decode_groups(dimensions), draw, cost)
    for batch, heads in _widths(draw, is_emulated=is_emulated):
        fixed = {
            "longest": draw.choice(dimensions["longest"][1:3]),
            "lengths": draw.choice(dimensions["lengths"][1:] if batch > 1 else ("equal",)),
            "batch": range_of(batch, BATCH_RANGES),
            "num_heads": range_of(heads, HEAD_RANGES),
        }
        chosen = cover.choose(fixed)
        assert chosen is not None
        yield _decode_case(draw, seed, {**chosen, "batch": [batch], "num_heads": [heads]})
    while (chosen := cover.next()) is not None:
        yield _decode_case(draw, seed, chosen)
    if has_groups:
        grouped = {**dimensions, "group": GROUPS}
        cover = Cover(grouped, _with_groups(dimensions), draw, cost)
        while (chosen := cover.next()) is not None:
            yield _decode_case(draw, seed, chosen)


def decode_dimensions(head_dims: Sequence[Any], dtypes: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return the values of each dimension that are combined; those of a range are one value."""
    return {
        "longest": [
            *(range(low, high + 1) for low, high in DECODE_RANGES),
            *(range(edge, edge + 1) for edge in TILE_EDGES),
        ],
        "lengths": ("equal", "the first is the longest", "a later one is the longest"),
        "batch": BATCH_RANGES,
        "num_heads": HEAD_RANGES,
        "head_dim": head_dims,
        "layout": LAYOUTS,
        "softmax_scale": SOFTMAX_SCALES,
        "numbers": NUMBERS,
        "dtype": dtypes,
        "room": ((0,), (1, 31)),
    }


def decode_groups(dimensions: Group) -> list[Group]:
    """Return the groups whose combinations all occur: pairs, and triples of the batch's shape."""
    names = [
        *itertools.combinations(dimensions, 2),
        *itertools.combinations(("lengths", "batch", "num_heads", "head_dim", "layout"), 3),
    ]
    return [{name: dimensions[name] for name in group} for group in names]


def _decode_case(draw: random.Random, seed: int, chosen: dict[str, Any]) -> DecodeCase:
    longest, batch, num_heads, softmax_scale, room = (
        draw.choice(chosen.pop(name))
        for name in ("longest", "batch", "num_heads", "softmax_scale", "room")
    )
    (kind, scale), lengths = chosen.pop("numbers"), chosen.pop("lengths")
    rows = [longest] * batch
    if lengths != "equal":
        rows[1:] = [draw.randint(1, max(1, longest - 1)) for _ in rows[1:]]
    if lengths == "a later one is the longest":
        place = draw.randrange(batch // 2, batch)
        rows[0], rows[place] = rows[place], rows[0]
    return DecodeCase(
        seed=seed,
        lengths=tuple(rows),
        max_seqlen=longest + room,
        num_heads=num_heads,
        softmax_scale=softmax_scale,
        kind=kind,
        scale=scale,
        **chosen,
    )


def table() -> str:
    """Return the values of each dimension as a Markdown table; those in brackets are one value."""
    head_dims, dtypes = ("each that is declared",), ("each that is declared",)
    columns = [
        attention_dimensions(head_dims, dtypes, is_emulated=False),
        attention_dimensions(head_dims, dtypes, is_emulated=True),
        decode_dimensions(head_dims, dtypes),
    ]
    for dimensions in columns:
        dimensions["group"] = GROUPS
    names = {
        "longest": "seqlen",
        "lengths": "lengths in a batch",
        "room": "room in the cache",
        "group": "query heads per key head",
    }
    rows: dict[str, list[str]] = {}
    for at, dimensions in enumerate(columns):
        for name, values in dimensions.items():
            texts = rows.setdefault(names.get(name, name), ["", "", ""])
            texts[at] = ", ".join(map(_text, values))
    lines = ["| dimension | attention | attention, emulated | decode |", "|---|---|---|---|"]
    lengths = ", ".join(map(_text, COMPILED_RANGES))
    of_each = f"for each dtype, one with a seqlen of each of {lengths}"
    rows["shapes, if compiled for each"] = [of_each, "", of_each]
    for name, texts in rows.items():
        same = ["the same" if text and text == texts[0] else text for text in texts[1:]]
        lines.append(f"| {' | '.join([name, texts[0], *same])} |")
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Return a value of a dimension; a range or a tuple of which one is drawn is in brackets."""
    if isinstance(value, range):
        if len(value) > 3:
            return f"[{value[0]} to {value[-1]}]"
        texts = [str(x) for x in value]
        return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    if isinstance(value, tuple) and isinstance(value[0], str):
        return f"{value[0]} times {value[1]:g}"
    if isinstance(value, tuple):
        texts = ["default" if x is None else f"{x:g}" for x in value]
        return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    return {"True": "causal", "False": "full"}.get(str(value), str(value))
