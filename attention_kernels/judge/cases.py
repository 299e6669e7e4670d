"""The inputs that a backend is tested on. Whatever the seed, they cover:

every length up to 257, causal and full: two tiles of 128 and their edges (every_length)
every number of heads up to 32, 48 and 64; every batch up to 33, and larger ones (every_width)
values where rounding shows, values of any size, GPT-2's own shapes (hard_cases, extreme_cases)
all combinations of bands of batch, heads and length with the mask, all triples of these, dtype and
    layout, and all pairs of these, head_dim, softmax_scale and kind of numbers (random_cases)

Everything else is drawn from a seed that every case prints.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attention_kernels.contract import dtype_name

Kind = Literal[
    "normal", "offset", "equal", "tiny", "huge", "alternating", "halves", "one large column"
]
Layout = Literal["fused", "contiguous", "transposed", "gaps", "mixed"]

SCALES = (0.02, 1.0, 8.0)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 200, 1023, 1024)
EVERY_LENGTH_TO = 257
EDGES = (257, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256)
LONGEST, LONGEST_EMULATED = 2500, 1025
# Numbers of heads and batch sizes. `batch` completes 32 prompts at once on a CPU, 512 on a GPU.
WIDTHS = (*range(1, 33), 48, 64)
BATCHES = (*range(1, 34), 64, 128, 512)
LARGEST_EMULATED_BATCH = 128
# Bands of batch sizes and of numbers of heads: a kernel may change its code path between them.
BATCH_BANDS = ((1, 2), (3, 32))
HEAD_BANDS = ((1, 5), (6, 15), (16, 32))
# For a backend that takes any head_dim: small, odd, not multiples of 16, and above 128.
ANY_HEAD_DIM = (32, 64, 128, 1, 8, 20, 33, 80, 96, 160, 192, 256)
SOFTMAX_SCALES = (None, 0.05, 0.3, 1.0, 3.0, 0.0, -0.5)
LARGEST_SOFTMAX_SCALE = 1.0  # at scale 8; above, 16-bit dtypes round scores by more than 16
NUMBERS: tuple[tuple[Kind, float], ...] = (
    ("normal", 0.02),
    ("normal", 1.0),
    ("normal", 8.0),
    ("offset", 1.0),
)
EXTREMES: tuple[Kind, ...] = ("tiny", "huge", "alternating", "halves", "one large column")
# The size of the values where a kernel must not look: finite, even when multiplied by 8.
LARGE = {torch.float16: 1e3, torch.bfloat16: 1e30, torch.float32: 1e30, torch.float64: 1e30}
LAYOUTS: tuple[Layout, ...] = ("fused", "contiguous", "transposed", "gaps", "mixed")
# The most multiplications of a score by a value: in a case of every_length() with more than one
# head, in a random case whose length is free within its band, and in any random case.
SMALL_WORK = 5e5
USUAL_WORK, USUAL_EMULATED_WORK = 6e7, 8e6
LARGEST_WORK, LARGEST_EMULATED_WORK = 3e8, 1.1e8


@dataclass(frozen=True)
class Case:
    """One input of attention(); equal cases have equal inputs."""

    seqlen: int
    head_dim: int
    scale: float = 1.0
    """The standard deviation of q, k and v: from a flat softmax (0.02) to a peaky one (8)."""
    batch: int = 1
    num_heads: int = 2
    is_causal: bool = True
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    kind: Kind = "normal"
    """The kind of values; see of_kind()."""
    layout: Layout = "fused"
    """The memory layout of q, k and v; see arrange()."""

    @property
    def work(self) -> float:
        """The number of multiplications of a score by a value, if nothing were masked."""
        return float(self.batch * self.num_heads * self.seqlen**2 * self.head_dim)

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k and v, strided views of (batch, seqlen, num_heads, head_dim).

        The numbers are drawn on the CPU, so that every device gets the same ones.
        """
        shape = (self.batch, self.seqlen, 3, self.num_heads, self.head_dim)
        qkv = of_kind(_normal(shape, self.seed + 1) * self.scale, self.kind, self.scale)
        return arrange(qkv.to(device=device, dtype=self.dtype), self.layout)

    def __str__(self) -> str:
        """Return what distinguishes this case from others."""
        kind = "causal" if self.is_causal else "full"
        softmax = "" if self.softmax_scale is None else f"softmax_scale {self.softmax_scale}, "
        unusual = "" if self.kind == "normal" else f"{self.kind} values, "
        layout = "" if self.layout == "fused" else f"{self.layout} layout, "
        return (
            f"seqlen {self.seqlen}, head_dim {self.head_dim}, batch {self.batch}, "
            f"{self.num_heads} heads, {kind}, scale {self.scale}, {softmax}{unusual}{layout}"
            f"{dtype_name(self.dtype)}, seed {self.seed}"
        )


@dataclass(frozen=True)
class DecodeCase:
    """One input of decode(): a cache whose rows hold sequences of different lengths."""

    head_dim: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lengths: tuple[int, ...] = (1, 37, 70)
    max_seqlen: int = 70
    num_heads: int = 2
    scale: float = 1.0
    softmax_scale: float | None = None
    layout: Layout = "transposed"
    """The memory layout of the cache; see arrange()."""
    kind: Kind = "normal"
    """The kind of values; see of_kind()."""

    @property
    def seqlen(self) -> int:
        """The length of the cache."""
        return self.max_seqlen

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw q, k_cache, v_cache and seqlens; the values past a row's length are large."""
        shape = (len(self.lengths), self.max_seqlen, 3, self.num_heads, self.head_dim)
        generator = torch.Generator().manual_seed(self.seed)
        qkv = of_kind(torch.randn(shape, generator=generator) * self.scale, self.kind, self.scale)
        q = torch.stack([row[length - 1, 0] for row, length in zip(qkv, self.lengths, strict=True)])
        for row, length in zip(qkv, self.lengths, strict=True):
            row[length:] = row[length:].sign() * LARGE[self.dtype]
        _, k, v = arrange(qkv.to(device=device, dtype=self.dtype), self.layout)
        seqlens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return q[:, None].to(device=device, dtype=self.dtype), k, v, seqlens

    def __str__(self) -> str:
        """Return what distinguishes this case from others."""
        softmax = "" if self.softmax_scale is None else f"softmax_scale {self.softmax_scale}, "
        unusual = "" if self.kind == "normal" else f"{self.kind} values, "
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"decode, head_dim {self.head_dim}, {self.num_heads} heads, lengths {lengths} of "
            f"{self.max_seqlen}, scale {self.scale}, {softmax}{unusual}{self.layout} layout, "
            f"{dtype_name(self.dtype)}, seed {self.seed}"
        )


@functools.lru_cache(maxsize=1)  # a comparison runs many backends on the same case
def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_kind(qkv: Tensor, kind: Kind, scale: float) -> Tensor:
    """Turn normal numbers, (batch, seqlen, 3, num_heads, head_dim), into a kind, in place.

    offset: the mean of v is 2.5. equal: all scores are equal, and v is 1 in the first half and 3 in
    the second. tiny and huge: v at the ends of float32's range. alternating and halves: rows of v
    of very different sizes. one large column: one row of v is 0 except for its first number, which
    is multiplied by 2^30.
    """
    v, half = qkv[:, :, 2], qkv.shape[1] // 2
    if kind == "offset":
        v += 2.5
    elif kind == "equal":
        qkv[:, :, :2] = scale
        v[:] = 1.0
        v[:, half:] = 3.0
    elif kind == "tiny":
        v *= 1e-30
    elif kind == "huge":
        v *= 1e36
    elif kind == "alternating":
        v[:, ::2] *= 1e-19
        v[:, 1::2] *= 1e19
    elif kind == "halves":
        v[:, :half] *= 1e-25
        v[:, half:] *= 1e16
    elif kind == "one large column":
        v[:, half, :, 0] *= 2.0**30
        v[:, half, :, 1:] = 0.0
    return qkv


def arrange(qkv: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Split (batch, seqlen, 3, num_heads, head_dim) into q, k and v with a memory layout.

    fused: views of one projection, as in GPT-2. contiguous: three contiguous tensors. transposed:
    heads before positions. gaps: NaN around every head, row and sequence, more for k than for q and
    more for v than for k; each view begins 16 bytes or more into its storage. mixed: a different
    layout for each. Rows begin at multiples of 16 bytes wherever those of a contiguous tensor do.
    """
    q, k, v = qkv.unbind(2)
    if layout == "contiguous":
        return q.contiguous(), k.contiguous(), v.contiguous()
    if layout == "transposed":
        return _transposed(q), _transposed(k), _transposed(v)
    if layout == "gaps":
        return _with_gaps(q, 1), _with_gaps(k, 2), _with_gaps(v, 3)
    if layout == "mixed":
        return _transposed(q), _with_gaps(k, 1), v.contiguous()
    return q, k, v


def cases(
    head_dims: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
) -> Iterator[Case]:
    """Yield the fixed cases: every length with every head_dim and, up to length 200, every scale.

    Lengths up to 200 are also tried with a batch of 3, full attention and a softmax_scale.
    """
    for at, seqlen in enumerate(lengths):
        for nth, head_dim in enumerate(head_dims):
            if seqlen > 200:  # the scales take turns
                yield Case(seqlen, head_dim, SCALES[(at + nth) % 3], dtype=dtype, seed=seed)
                continue
            for scale in SCALES:
                yield Case(seqlen, head_dim, scale, dtype=dtype, seed=seed)
            heads = 12 if seqlen == 33 else 3  # GPT-2's number, once
            yield Case(seqlen, head_dim, batch=3, num_heads=heads, dtype=dtype, seed=seed)
            yield Case(seqlen, head_dim, is_causal=False, dtype=dtype, seed=seed)
            yield Case(seqlen, head_dim, softmax_scale=0.3, dtype=dtype, seed=seed)


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


def every_length(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], seed: int
) -> Iterator[Case]:
    """Yield two cases of each length up to EVERY_LENGTH_TO, one causal and one full.

    The head_dims take turns, so that each remainder modulo a tile's width is tried with several.
    """
    draw = random.Random(f"every length {seed}")
    for seqlen in range(1, EVERY_LENGTH_TO + 1):
        for is_causal in (True, False):
            head_dim = head_dims[(seqlen // 32 + is_causal) % len(head_dims)]
            if seqlen > 128:  # keep long cases small
                head_dim = min(head_dim, usual_head_dim(head_dims))
            width = max(1, min(12, int(SMALL_WORK / (seqlen**2 * head_dim))))
            batch = draw.randint(1, min(4, width))
            heads = draw.randint(1, width // batch)
            yield _drawn(draw, dtypes, seed, seqlen, head_dim, batch, heads, is_causal)


def every_width(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], seed: int, *, is_emulated: bool
) -> Iterator[Case]:
    """Yield a short case of each number of heads and of each batch size."""
    draw = random.Random(f"every width {seed}")
    for batch, heads in _widths(draw, is_emulated=is_emulated):
        seqlen, head_dim = draw.randint(1, 20), draw.choice(head_dims)
        yield _drawn(draw, dtypes, seed, seqlen, head_dim, batch, heads, draw.random() < 0.5)


def _widths(draw: random.Random, *, is_emulated: bool) -> Iterator[tuple[int, int]]:
    """Yield a batch size with each number of heads, and a number of heads with each batch size."""
    for heads in WIDTHS:
        yield draw.randint(1, 2), heads
    for batch in BATCHES:
        if not is_emulated or batch <= LARGEST_EMULATED_BATCH:
            yield batch, draw.randint(1, 3)


def _drawn(
    draw: random.Random,
    dtypes: Sequence[torch.dtype],
    seed: int,
    seqlen: int,
    head_dim: int,
    batch: int,
    num_heads: int,
    is_causal: bool,
) -> Case:
    """Return a case of the given shape, with everything else drawn."""
    kind, scale = draw.choice(NUMBERS)
    softmax_scale = draw.choice([x for x in SOFTMAX_SCALES if _is_moderate(scale, x)])
    return Case(
        seqlen,
        head_dim,
        scale,
        batch,
        num_heads,
        is_causal,
        softmax_scale,
        draw.choice(dtypes),
        seed,
        kind,
        draw.choice(LAYOUTS),
    )


def _is_moderate(scale: float, softmax_scale: float | None) -> bool:
    return scale <= 1 or (softmax_scale or 0) <= LARGEST_SOFTMAX_SCALE


def random_cases(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], seed: int, *, is_emulated: bool
) -> Iterator[Case]:
    """Yield random cases that cover the combinations listed in the module's docstring."""
    draw = random.Random(f"random cases {seed}")
    largest = LARGEST_EMULATED_WORK if is_emulated else LARGEST_WORK
    usual = USUAL_EMULATED_WORK if is_emulated else USUAL_WORK
    # The upper ends of the bands of lengths; the lower ends follow from them.
    ends: tuple[int, ...] = (64, 128, 256, 512, 1024, 1280, LONGEST)
    if is_emulated:
        ends = (16, 64, 128, 256, LONGEST_EMULATED)
    conditions: dict[str, Sequence[Any]] = {
        "band": [(low + 1, high) for low, high in itertools.pairwise((0, *ends))],
        "batch": BATCH_BANDS,
        "num_heads": HEAD_BANDS,
        "is_causal": (True, False),
        "dtype": dtypes,
        "layout": LAYOUTS,
        "head_dim": head_dims,
        "softmax_scale": SOFTMAX_SCALES,
        "numbers": NUMBERS,
    }
    shape = ("band", "batch", "num_heads", "is_causal")
    groups = [
        shape,
        *itertools.combinations((*shape, "dtype", "layout"), 3),
        *itertools.combinations(conditions, 2),
    ]

    def least_work(chosen: Mapping[str, Any]) -> float:
        seqlen, batch, heads = (chosen[name][0] for name in shape[:3])
        return float(batch * heads * seqlen**2 * chosen["head_dim"])

    def fits(chosen: Mapping[str, Any]) -> bool:
        is_moderate = _is_moderate(chosen["numbers"][1], chosen["softmax_scale"])
        return is_moderate and least_work(chosen) <= largest

    for chosen in combinations(conditions, groups, draw, fits):
        (low, high), (kind, scale) = chosen.pop("band"), chosen.pop("numbers")
        room = usual / least_work({**chosen, "band": (1, high)})  # for seqlen^2, batch and heads
        for name in ("batch", "num_heads"):
            least, most = chosen[name]
            chosen[name] = draw.randint(least, max(least, min(most, int(least * room / low**2))))
            room *= least / chosen[name]
        seqlen = draw.randint(low, max(low, min(high, int(room**0.5))))
        if draw.random() < 0.5 and seqlen // 64 * 64 >= low:
            seqlen = min(high, seqlen // 64 * 64 + draw.choice((0, 0, 1)))  # at a tile's edge
        yield Case(seqlen, scale=scale, kind=kind, seed=seed, **chosen)


def decode_cases(
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    seed: int,
    *,
    is_emulated: bool = False,
) -> Iterator[DecodeCase]:
    """Yield fixed cases of each dtype, cases of each width, and random ones that cover all pairs.

    The fixed cases have lengths around the edges of tiles in one batch: one case of each head_dim,
    and the inputs of hard_cases() with one head_dim.
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
    free: dict[str, Sequence[Any]] = {
        "lengths": ("drawn", "equal", "ones"),
        "head_dim": head_dims,
        "softmax_scale": SOFTMAX_SCALES,
        "scale": SCALES,
        "layout": LAYOUTS,
        "dtype": dtypes,
    }

    def fits(chosen: Mapping[str, Any]) -> bool:
        return _is_moderate(chosen["scale"], chosen["softmax_scale"])

    for batch, heads in _widths(draw, is_emulated=is_emulated):
        chosen = next(combinations(free, [()], draw, fits)) | {"lengths": "drawn"}
        yield _decode_case(draw, (1, 20), batch, seed, num_heads=heads, **chosen)
    ends = (32, 70, 128, 512, 1024, 1200)
    conditions = {
        "band": [(low + 1, high) for low, high in itertools.pairwise((0, *ends))],
        "batch": BATCH_BANDS,
        "num_heads": HEAD_BANDS,
        **free,
    }
    for chosen in combinations(conditions, [*itertools.combinations(conditions, 2)], draw, fits):
        batch, heads = (draw.randint(*chosen.pop(name)) for name in ("batch", "num_heads"))
        yield _decode_case(draw, chosen.pop("band"), batch, seed, num_heads=heads, **chosen)


def _decode_case(
    draw: random.Random,
    band: tuple[int, int],
    batch: int,
    seed: int,
    *,
    lengths: str,
    **chosen: Any,
) -> DecodeCase:
    longest = draw.randint(*band)
    rows = [longest] * batch
    if lengths == "drawn":
        rows[1:] = [draw.randint(1, longest) for _ in rows[1:]]
        draw.shuffle(rows)
    elif lengths == "ones":
        rows = [1] * batch
    max_seqlen = longest + draw.choice((0, 1, 31))
    return DecodeCase(seed=seed, lengths=tuple(rows), max_seqlen=max_seqlen, **chosen)


def combinations(
    conditions: Mapping[str, Sequence[Any]],
    groups: Sequence[tuple[str, ...]],
    draw: random.Random,
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> Iterator[dict[str, Any]]:
    """Yield choices of one value per condition until every group's combinations are covered.

    groups: tuples of conditions whose values must all be combined. Greedy: of up to 20 random
    choices that contain the first open combination, take the one that closes most. fits: returns
    whether a choice is allowed; a combination is given up if none of 200 random choices is allowed.
    """
    open_ones = {
        tuple(zip(group, values, strict=True)): None  # a dict keeps the order, and so the draw
        for group in groups
        for values in itertools.product(*(conditions[name] for name in group))
    }

    def closed_by(chosen: Mapping[str, Any]) -> list[tuple[tuple[str, Any], ...]]:
        held = (tuple((name, chosen[name]) for name in group) for group in groups)
        return [one for one in held if one in open_ones]

    while open_ones:
        first = next(iter(open_ones))
        drawn = (
            {name: draw.choice(values) for name, values in conditions.items()} | dict(first)
            for _ in range(200)
        )
        candidates = list(itertools.islice(filter(fits, drawn), 20))
        if not candidates:
            del open_ones[first]
            continue
        best = max(candidates, key=lambda chosen: len(closed_by(chosen)))
        for one in closed_by(best):
            del open_ones[one]
        yield best


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _with_gaps(x: Tensor, width: int) -> Tensor:
    batch, seqlen, num_heads, head_dim = x.shape
    pad = width * 16 // x.element_size()
    shape = (batch + 1, seqlen + width, num_heads + 1, head_dim + pad)
    view = x.new_full(shape, torch.nan)[:batch, width:, :num_heads, pad:]
    return view.copy_(x)
