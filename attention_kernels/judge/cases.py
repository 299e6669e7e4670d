"""The inputs that a backend is tested on, those that try the most for their cost first.

Most cases are drawn: shapes, values, scales and layouts jointly, from a seed that every case
prints. Of many drawn cases, those that try something new are taken: a length, a number of heads, a
batch size, or two or three values that no case has had together. Fixed cases are added: values
where rounding shows, values of any size, and GPT-2's own shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from attention_kernels.judge.inputs import Case, Context, DecodeCase, Extreme, Kind, Op
from attention_kernels.registry import BackendSpec

EVERY_LENGTH_TO = 257
EDGES = (257, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256)
LONGEST_EMULATED = 1025
REMAINDERS = 48, 64  # of tiles of these sizes, all with each mask and head_dim, if they are few
# Every number of heads, in a batch of two or more, and every batch size to here. Larger batches:
# `batch` completes 32 prompts at once on a CPU, 512 on a GPU.
WIDEST = 64
BATCHES, EMULATED_BATCHES = (96, 128, 192, 256, 512), (96, 128)
LONGEST_CACHE = 16384
# GPT-2's own heads and lengths, which are judged in part: the first model's, those of the larger
# ones, and numbers of tokens that a kernel could take for special, beside others that are drawn.
HEADS, LARGER_HEADS, LENGTHS = 12, (16, 20, 25), (512, 768, 1024)
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
# The largest softmax_scale times scale^2; above, 16-bit dtypes round scores by more than 16, which
# are larger by the second factor in trained values.
LARGEST_SOFTMAX_SCALE, OF_TRAINED = 64.0, 1 / 16
NUMBERS: tuple[tuple[Kind, float, float], ...] = (
    ("normal", 0.02, 0.2),
    ("normal", 0.2, 0.8),
    ("normal", 0.8, 2.0),
    ("normal", 2.0, 8.0),
    ("offset", 0.3, 3.0),
    ("trained", 0.5, 2.0),
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
OF_DECODE: dict[str, Sequence[Any]] = {
    "lengths": ("equal", "the first is the longest", "a later one is the longest"),
    "room": (range(1), range(1, 32), range(32, 1024)),
}
# Limits of Case.work: of cases whose triples of values count; of all cases, on a device and
# emulated; of sizes that are drawn freely from their ranges; and of GPT-2's own batches.
LARGEST_WORK_OF_TRIPLE = 2.5e6
LARGEST_WORK, USUAL_WORK, GPT2_WORK = (3e8, 2e7), (1e7, 5e5), 5e7
# The cost of a case that is judged in part, for its work.
IN_PART = 0.1
# The cost of a call, on a device and emulated, and of a block of 64 rows, in units of work.
CALL_COST, BLOCK_COST = (1e7, 5e4), 2e4
SIZES = "batch", "num_heads", "group", "head_dim", "seqlen"
# How many cases are drawn at once; how many of each length and mask; how many of each width.
DRAWN, DRAWN_OF_LENGTH, DRAWN_OF_WIDTH = 2000, 16, 12
# How many parts a fixed case counts for: enough for GPT-2's own batches to be in a quick run.
PARTS_OF_FIXED = 30, 120
# Of how many cases at once in_order_of_gain() counts the new parts.
NEAR = 256
# The dimensions of decode whose triples are combined; of attention, all are.
DECODE_TRIPLES = "lengths", "batch", "num_heads", "head_dim", "layout"
MOST_COMBINED_HEAD_DIMS = 3
# A backend that compiles for each shape gets shapes of each dtype with a length of each range: one,
# or more if only a plug-in says so. A fault at every fourth length is missed by 4 shapes with
# probability 0.75^4 = 32 %, by 12 with 3 %, which take a compiler a minute or two.
COMPILED_RANGES = (range(1, 48), range(48, 129), range(129, 513), range(513, 4097))
OF_RANGE, OF_RANGE_IF_SAID = 1, 3
# The fields that make the shape of a call.
SHAPES: dict[type, tuple[str, ...]] = {
    Case: ("seqlen", "head_dim", "batch", "num_heads", "group", "is_causal"),
    DecodeCase: ("lengths", "max_seqlen", "head_dim", "num_heads", "group"),
}
Numbers: TypeAlias = NDArray[Any]
Columns: TypeAlias = dict[str, Numbers]
Ordered: TypeAlias = list[tuple[Case | DecodeCase, float]]
"""Cases, each with the share of all parts that earlier cases cover."""


def ordered_cases(
    op: Op,
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    seed: int,
    *,
    share: float = 1.0,
    is_emulated: bool = False,
    has_groups: bool = False,
    is_aligned: bool = False,
    contexts: Sequence[Context] = ("plain",),
) -> Ordered:
    """Return every case of attention or of decode, those that try the most for their cost first.

    head_dims: those to draw from; if there are none, ANY_HEAD_DIM. share: stop when this share of
    all parts is covered. has_groups: also cases with fewer key heads. is_aligned: none off
    multiples of 16 bytes. contexts: one is drawn for each case.
    """
    is_decode, head_dims = op == "decode", head_dims or ANY_HEAD_DIM
    fixed: list[Case | DecodeCase] = []
    for dtype in dtypes:
        if is_decode:
            fixed += fixed_decode_cases(head_dims, dtype, seed)
        else:
            fixed += hard_cases(head_dims, dtype, seed, is_emulated=is_emulated)
    longer = CACHES if is_decode else LONG_EMULATED if is_emulated else LONG
    values: dict[str, Sequence[Any]] = {
        "seqlen": [*TILE_EDGES, *SHORT, *longer],
        "batch": BATCH_RANGES,
        "num_heads": HEAD_RANGES,
        "group": GROUPS if has_groups else GROUPS[:1],
        "head_dim": [range(x, x + 1) for x in head_dims],
        "layout": LAYOUTS if is_aligned else (*LAYOUTS, ("unaligned",)),
        "softmax_scale": SOFTMAX_SCALES,
        "numbers": NUMBERS,
        "dtype": dtypes,
        **(OF_DECODE if is_decode else {"is_causal": (True, False)}),
    }
    drawn = Drawn(op, values, np.random.default_rng([seed, is_decode]), is_emulated=is_emulated)
    costs = [cost(case, is_emulated=is_emulated) for case in fixed]
    draw, found = random.Random(f"{op} {seed}"), list[tuple[Case | DecodeCase, float]]()
    for n, tried in in_order_of_gain(costs, PARTS_OF_FIXED[is_emulated], drawn.costs, drawn.parts):
        if tried >= share:
            break
        if n < 0:
            found.append((fixed[n], tried))
            continue
        chosen = {name: of_name[drawn.at[name][n]] for name, of_name in values.items()}
        chosen |= {name: int(sizes[n]) for name, sizes in drawn.sizes.items()}
        chosen = _with_numbers(chosen, draw) | {"context": draw.choice(contexts)}
        case = _decode_case(chosen, draw, seed) if is_decode else Case(seed=seed, **chosen)
        found.append((case, tried))
    return found


def fitted(case: Case, spec: BackendSpec) -> Case:
    """Return the case or, if the backend's file says that it takes no such one, one that it takes.

    That is one of another length, size, softmax_scale or mask, if there is any.
    """
    if spec.version is None or not spec.version.only:
        return case
    smaller: list[dict[str, Any]] = [{}, {"batch": 1}, {"batch": 1, "num_heads": 1, "group": 1}]
    lengths = [-(-case.seqlen // tile) * tile for tile in (1, 16, 32, 64, 128, 256)]
    for is_causal, softmax_scale, sizes, seqlen in itertools.product(
        (case.is_causal, not case.is_causal),
        (case.softmax_scale, None),
        smaller,
        (*lengths, *(2**n for n in range(4, 11))),
    ):
        call = {"seqlen": seqlen, "is_causal": is_causal, "softmax_scale": softmax_scale}
        new = dataclasses.replace(case, **call, **sizes)
        # Grouped queries reach a version file as more batch entries: see ladder.op.
        batch, heads = new.batch, new.num_heads
        batch, heads = (batch, heads) if new.group == 1 else (batch * heads, new.group)
        names = {"B": batch, "N": seqlen, "H": heads, "D": case.head_dim, "causal": is_causal}
        if spec.version.takes(**names, default_scale=softmax_scale is None):
            return new
    return case


def cost(case: Case | DecodeCase, *, is_emulated: bool) -> float:
    """Estimate the cost of a case, in units of work."""
    blocks = case.batch * case.num_heads * case.group * -(-case.seqlen // 64)
    share = IN_PART if case.work > LARGEST_WORK[is_emulated] else 1.0
    return CALL_COST[is_emulated] + share * (BLOCK_COST * blocks + case.work)


def hard_cases(
    head_dims: Sequence[int], dtype: torch.dtype, seed: int, *, is_emulated: bool
) -> list[Case]:
    """Return cases in which rounding shows or of extreme values, long ones, and GPT-2's shapes.

    Those of more than 4,096 keys find errors that grow with the length; those of 12 heads find
    errors that occur only at GPT-2's own shape.
    """
    head_dim, draw = usual_head_dim(head_dims), random.Random(f"hard {dtype} {seed}")
    fields: dict[str, Any] = {"dtype": dtype, "seed": seed}
    found = [
        Case(draw.randint(257, 340), head_dim, 19.3, is_causal=is_causal, kind="equal", **fields)
        for is_causal in (True, False)
    ]
    found += [Case(draw.randint(66, 135), head_dim, kind="offset", **fields)]
    if dtype != torch.float16:  # it holds neither scores of 1e8 nor extreme values
        found += [
            Case(draw.randint(48, 80), head_dim, 1e4, is_causal=is_causal, **fields)
            for is_causal in (True, False)
        ]
        extreme = random.Random(f"extreme {dtype} {seed}")
        found += [
            Case(extreme.randint(66, 135), head_dim, is_causal=is_causal, kind=kind, **fields)
            for kind, is_causal in itertools.product(EXTREMES, (True, False))
        ]
    for heads in (HEADS, draw.choice(LARGER_HEADS)):
        longest = max(130, math.isqrt(int(GPT2_WORK / (2 * heads * head_dim))))
        seqlen = draw.randint(129, longest)
        found += [Case(seqlen, head_dim, batch=2, num_heads=heads, **fields)]
    for scale in (8.0,) if is_emulated else (0.02, 1.0, 8.0):
        found += [Case(draw.randint(513, 560), head_dim, scale, num_heads=12, **fields)]
    if is_emulated:
        return [*found, Case(LONGEST_EMULATED, head_dim, num_heads=1, **fields)]
    lengths = [*LENGTHS, draw.randint(257, 511), draw.randint(513, 1023)]
    found += [Case(seqlen, head_dim, num_heads=HEADS, **fields) for seqlen in lengths]
    heads = draw.choice(LARGER_HEADS)
    found += [Case(draw.randint(257, 1024), head_dim, num_heads=heads, **fields)]
    long = draw.randint(4097, 4608)
    found += [Case(long, head_dim, num_heads=1, is_causal=False, kind="offset", **fields)]
    if dtype == torch.float32:
        found += [Case(draw.randint(2501, 4608), head_dim, num_heads=1, **fields)]
    return found


def usual_head_dim(head_dims: Sequence[int]) -> int:
    """Return GPT-2's head_dim, 64, or the first of head_dims if 64 is not among them.

    head_dims: those that a backend takes; if there are none, it takes any.
    """
    return 64 if 64 in (head_dims or (64,)) else head_dims[0]


def fixed_decode_cases(
    head_dims: Sequence[int], dtype: torch.dtype, seed: int
) -> Iterator[DecodeCase]:
    """Yield cases with lengths around the edges of tiles in one batch, and a long cache."""
    usual, draw = usual_head_dim(head_dims), random.Random(f"long {dtype} {seed}")

    def edges(head_dim: int, **fields: Any) -> DecodeCase:
        lengths, most = tuple(draw.sample(EDGES, len(EDGES))), max(EDGES) + draw.randint(0, 31)
        return DecodeCase(head_dim, dtype, seed, lengths, most, **fields)

    yield from map(edges, head_dims)
    yield edges(usual, scale=19.3, kind="equal")
    yield edges(usual, kind="offset")
    if dtype in (torch.float32, torch.float64):  # 16-bit dtypes round scores of 1e8 too much
        yield edges(usual, scale=1e4)
    longest = draw.randint(4097, LONGEST_CACHE)
    lengths = draw.randint(1, longest), longest
    yield DecodeCase(usual, dtype, seed, lengths, longest + draw.randint(0, 31), num_heads=1)


def _with_numbers(chosen: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Draw layout, scale and softmax_scale from the chosen ranges."""
    kind, *scales = chosen.pop("numbers")
    scale, softmax_scale = _between(draw, *scales), chosen["softmax_scale"]
    if isinstance(softmax_scale, tuple):
        least, most = sorted(map(abs, softmax_scale))
        largest = LARGEST_SOFTMAX_SCALE * (OF_TRAINED if kind == "trained" else 1.0)
        size = _between(draw, least, max(least, min(most, largest / scale**2)))
        softmax_scale = math.copysign(size, softmax_scale[0])
    layout = draw.choice(chosen["layout"])
    drawn = {"kind": kind, "scale": scale, "softmax_scale": softmax_scale, "layout": layout}
    return chosen | drawn


def _between(draw: random.Random, least: float, most: float) -> float:
    """Draw a number of two digits, evenly by its logarithm."""
    return float(f"{math.exp(draw.uniform(math.log(least), math.log(most))):.2g}")


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


def shapes_of_range(spec: BackendSpec) -> int:
    """Return of how many shapes of each dtype and range a backend that compiles each is tried."""
    return OF_RANGE if spec.is_ours else OF_RANGE_IF_SAID


def with_few_shapes(found: Ordered, spec: BackendSpec) -> Ordered:
    """Return cases of a few shapes: for each dtype, some with lengths of each COMPILED_RANGES.

    The shapes are of the first cases, and have as many head_dims as possible. The cases of a dtype
    take its shapes in turn, and keep their values, layout and scales, so they remain as many.
    """
    head_dims, of_range = {case.head_dim for case, _ in found}, shapes_of_range(spec)
    shapes: dict[torch.dtype, dict[range, list[dict[str, Any]]]] = {}
    for case, _ in found:
        of_dtype = shapes.setdefault(case.dtype, {x: [] for x in COMPILED_RANGES})
        left = head_dims - {x["head_dim"] for x in itertools.chain(*of_dtype.values())}
        ranges = (x for x in COMPILED_RANGES if case.seqlen in x)
        alike = of_dtype[next(ranges, COMPILED_RANGES[-1])]
        shape = {name: getattr(case, name) for name in SHAPES[type(case)]}
        if (case.head_dim in left or not left) and len(alike) < of_range and shape not in alike:
            alike.append(shape)
    turns = {x: itertools.cycle([*itertools.chain(*of.values())]) for x, of in shapes.items()}
    changed: dict[Case | DecodeCase, float] = {}
    for case, tried in found:
        changed.setdefault(dataclasses.replace(case, **next(turns[case.dtype])), tried)
    return [x for x in changed.items() if (x[0].kind, x[0].seqlen) != ("zero rows", 1)]  # all zeros


class Drawn:
    """Many drawn cases, as columns, with the parts that each covers.

    A part is a combination of two or three values, or an exact size.
    """

    def __init__(
        self,
        op: Op,
        values: Mapping[str, Sequence[Any]],
        draw: np.random.Generator,
        *,
        is_emulated: bool,
    ) -> None:
        """Draw cases of any values, of each length and mask, and of each width.

        values: those of each dimension. Those of sizes are ranges; each case has one number.
        """
        self._op, self._values, self._draw = op, values, draw
        self._usual = USUAL_WORK[is_emulated]
        self.at: Columns = {}
        """The places of values in each dimension."""
        self.sizes: Columns = {}
        self._least: Columns = {}
        """The sizes that count for costs: the least in their ranges, unless they were given."""
        largest = LARGEST_WORK[is_emulated]
        is_decode = op == "decode"
        for most in [largest] * 3 + [LARGEST_WORK_OF_TRIPLE] * (1 if is_decode else 10):
            self._add(DRAWN, most)
        if not is_decode:
            lengths = np.arange(1, EVERY_LENGTH_TO + 1).repeat(2 * DRAWN_OF_LENGTH)
            masks = np.tile([0, 1], len(lengths) // 2)
            self._add(len(lengths), 3 * self._usual, seqlen=lengths, is_causal=masks)
            short = lengths <= max(REMAINDERS)
            lengths, masks = lengths[short], masks[short]
            for (head_dim,) in values["head_dim"][:MOST_COMBINED_HEAD_DIMS]:
                dims = np.full(len(lengths), head_dim)
                self._add(len(dims), seqlen=lengths, is_causal=masks, head_dim=dims)
        widths = np.arange(1, WIDEST + 1).repeat(DRAWN_OF_WIDTH)
        batches = np.append(widths, EMULATED_BATCHES if is_emulated else BATCHES)
        for given in (
            {"num_heads": widths, "batch": draw.integers(2, 4, len(widths))},
            {"batch": batches, "num_heads": draw.integers(1, 4, len(batches))},
        ):
            count = len(given["batch"])
            self._add(count, seqlen=draw.integers(2, 21, count), **given)
        kept = self._work(self._least) <= largest
        if is_decode:
            is_one = (self.sizes["batch"] == 1) | (self.sizes["seqlen"] == 1)
            kept &= ~(is_one & (self.at["lengths"] > 0))
        for columns in (self.at, self.sizes, self._least):
            columns |= {name: x[kept] for name, x in columns.items()}
        least = self._least
        blocks = least["batch"] * least["num_heads"] * least["group"] * -(-least["seqlen"] // 64)
        self.costs = CALL_COST[is_emulated] + BLOCK_COST * blocks + self._work(least)
        self.parts = np.stack([*self._parts()], axis=1)
        """The parts of each case, one row per case; 0 means no part."""

    def _work(self, sizes: Columns) -> Numbers:
        numbers = sizes["batch"] * sizes["num_heads"] * sizes["group"] * sizes["head_dim"]
        numbers *= 5 * sizes["seqlen"] if self._op == "decode" else sizes["seqlen"] ** 2
        return numbers

    def _add(self, count: int, most: float = math.inf, **given: Numbers) -> None:
        """Draw cases with given sizes and places; others are free up to the usual work.

        In a case of more than `most` work, some sizes but seqlen are the smallest.
        """
        at = {name: self._draw.integers(len(x), size=count) for name, x in self._values.items()}
        ranges = {name: self._values[name] for name in SIZES}
        for name, numbers in given.items():
            at[name] = numbers
            if name in ranges:  # a number in none of them counts as in the last
                places = {n: place for place, of in enumerate(ranges[name]) for n in of}
                last = len(ranges[name]) - 1
                at[name] = np.array([places.get(n, last) for n in numbers.tolist()])

        def least() -> Columns:
            low = {name: np.array([x[0] for x in of])[at[name]] for name, of in ranges.items()}
            return low | {name: x for name, x in given.items() if name in ranges}

        for name in self._draw.permutation([name for name in ranges if name != "seqlen"]):
            smallest = int(np.argmin([x[0] for x in ranges[name]]))
            at[name] = np.where(self._work(least()) > most, smallest, at[name])
        low = least()
        sizes, room = dict(low), np.maximum(self._usual / self._work(low), 1.0)
        for name in (x for x in SIZES if x not in given):
            power = 2 if name == "seqlen" and self._op == "attention" else 1
            last, step = np.array([(x[-1], x.step) for x in ranges[name]])[at[name]].T
            steps = (np.minimum(last, low[name] * room ** (1 / power)) - low[name]) // step
            sizes[name] = low[name] + step * self._draw.integers(steps.astype(np.int64) + 1)
            room = np.maximum(room / (sizes[name] / low[name]) ** power, 1.0)
        for columns, new in ((self.at, at), (self.sizes, sizes), (self._least, low)):
            columns |= {
                name: np.concatenate([columns.get(name, x[:0]), x]) for name, x in new.items()
            }

    def _parts(self) -> Iterator[Numbers]:
        """Yield columns of parts; cases that try the same have the same number."""
        count = 1  # 0 means no part

        def column(numbers: Numbers, where: Numbers | bool = True) -> Numbers:
            nonlocal count
            first, count = count, count + int(numbers.max()) + 1
            return np.where(where, first + numbers, 0)

        head_dims, is_decode = len(self._values["head_dim"]), self._op == "decode"
        names = [name for name, of_name in self._values.items() if len(of_name) > 1]
        left_out = {"group"} | ({"head_dim"} if head_dims > MOST_COMBINED_HEAD_DIMS else set())
        triples = [x for x in names if x not in left_out and (not is_decode or x in DECODE_TRIPLES)]
        is_small = self._work(self._least) <= LARGEST_WORK_OF_TRIPLE
        for of, size, where in ((names, 2, True), (triples, 3, is_small)):
            for group in itertools.combinations(of, size):
                numbers = np.zeros(len(self.costs), dtype=np.int64)
                for name in group:
                    numbers = numbers * len(self._values[name]) + self.at[name]
                yield column(numbers, where)
        batch, heads = self.sizes["batch"], self.sizes["num_heads"]
        yield column(batch)
        yield column(heads, batch > 1)
        if not is_decode:
            seqlen, mask = self.sizes["seqlen"], self.at["is_causal"]
            yield column(2 * seqlen + mask, seqlen <= EVERY_LENGTH_TO)
            if 1 < head_dims <= MOST_COMBINED_HEAD_DIMS:  # every remainder of a tile with each
                for tile in REMAINDERS:
                    yield column((2 * (seqlen % tile) + mask) * head_dims + self.at["head_dim"])


def in_order_of_gain(
    fixed: Sequence[float], own: int, costs: Numbers, parts: Numbers
) -> Iterator[tuple[int, float]]:
    """Yield the numbers of cases, each time that with the most new parts for its cost.

    fixed: the costs of cases with `own` parts that no other has; their numbers are negative.
    With each comes the share of all parts that had occurred before it.
    """
    first, costs = len(fixed), np.concatenate([fixed, costs])
    is_open = np.zeros(parts.max() + 1, dtype=bool)
    is_open[parts] = True
    is_open[0] = False
    total = left = int(is_open.sum()) + own * first
    # Those of drawn cases can only shrink, as others close some of their parts.
    gains = np.concatenate([np.full(first, own), (parts > 0).sum(1)]) / costs
    while gains.any():
        least = np.partition(gains, -NEAR)[-NEAR]  # no other can have more
        near = np.flatnonzero(gains >= least)
        drawn = near[near >= first]
        while True:
            gains[drawn] = is_open[parts[drawn - first]].sum(1) / costs[drawn]
            best = int(near[gains[near].argmax()])
            if not 0 < gains[best] >= least:
                break
            yield best - first, 1 - left / total
            left -= round(gains[best] * costs[best])
            gains[best] = 0
            if best >= first:
                is_open[parts[best - first]] = False
