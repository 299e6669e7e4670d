"""The inputs that a backend is tried on: fixed cases, every short length, and random ones.

The random cases are drawn from a seed that every case prints. They cover all pairs of conditions:
an error that needs two of them at once (a batch and a long sequence, say) is met by some case.
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
EVERY_LENGTH_TO = 130
EDGES = (257, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256)
LONGEST = 2500
# What random cases are drawn from: powers of two and what is none, GPT-2's 12, 16, 20 and 25 heads.
BATCHES = (1, 2, 3, 5)
HEADS = (1, 2, 3, 5, 8, 12, 16, 20, 25)
SOFTMAX_SCALES = (None, 0.05, 0.3, 1.0)
NUMBERS: tuple[tuple[Kind, float], ...] = (
    ("normal", 0.02),
    ("normal", 1.0),
    ("normal", 8.0),
    ("offset", 1.0),
)
EXTREMES: tuple[Kind, ...] = ("tiny", "huge", "alternating", "halves", "one large column")
# What lies where a kernel must not look: finite, and its products with 8 still are.
LARGE = {torch.float16: 1e3, torch.bfloat16: 1e30, torch.float32: 1e30, torch.float64: 1e30}
LAYOUTS: tuple[Layout, ...] = ("fused", "contiguous", "transposed", "gaps", "mixed")
# Multiplications of a score with a value in one random case, at most.
LARGEST_WORK = 3e8
LARGEST_EMULATED_WORK = 4e7


@dataclass(frozen=True)
class Case:
    """One input of attention(); two cases that are equal have equal inputs."""

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
    """See of_kind()."""
    layout: Layout = "fused"
    """How q, k and v lie in memory; see arrange()."""

    @property
    def work(self) -> float:
        """Multiplications of a score with a value, were nothing masked."""
        return float(self.batch * self.num_heads * self.seqlen**2 * self.head_dim)

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k and v: strided views of (batch, seqlen, num_heads, head_dim).

        They are drawn on the CPU, so that every device gets the same numbers.
        """
        shape = (self.batch, self.seqlen, 3, self.num_heads, self.head_dim)
        qkv = of_kind(_normal(shape, self.seed + 1) * self.scale, self.kind, self.scale)
        return arrange(qkv.to(device=device, dtype=self.dtype), self.layout)

    def __str__(self) -> str:
        """Name what tells this case from the others."""
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
    """Of the cache."""
    kind: Kind = "normal"
    """As in Case."""

    @property
    def seqlen(self) -> int:
        """The length of the cache."""
        return self.max_seqlen

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw q, k_cache, v_cache and seqlens. What lies past a row's length is large."""
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
        """Name what tells this case from the others."""
        softmax = "" if self.softmax_scale is None else f"softmax_scale {self.softmax_scale}, "
        unusual = "" if self.kind == "normal" else f"{self.kind} values, "
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"decode, head_dim {self.head_dim}, {self.num_heads} heads, lengths {lengths} of "
            f"{self.max_seqlen}, scale {self.scale}, {softmax}{unusual}{self.layout} layout, "
            f"{dtype_name(self.dtype)}, seed {self.seed}"
        )


@functools.lru_cache(maxsize=1)  # a comparison checks many backends in one case
def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_kind(qkv: Tensor, kind: Kind, scale: float) -> Tensor:
    """Change normal numbers in place to a kind: (batch, seqlen, 3, num_heads, head_dim).

    offset: the mean of v is 2.5. equal: all scores are equal, and v is first 1 and then 3. tiny and
    huge: v at the ends of float32's range. alternating and halves: rows of v of very different
    sizes. one large column: a row of v has one number, 2^30 times as large as the others are.
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
    """Split (batch, seqlen, 3, num_heads, head_dim) into q, k and v that lie in memory as named.

    fused: views of one projection, as GPT-2 makes them. contiguous: a tensor each. transposed:
    heads before positions. gaps: NaN around every head, row and sequence, more for k than for q and
    more for v than for k; each view begins 16 bytes or more into its storage. mixed: three layouts.
    Rows begin at multiples of 16 bytes wherever those of a contiguous tensor do.
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
    """Yield the fixed cases: every length with every head_dim and, up to 200, every scale.

    Batches of 3, full attention and a softmax_scale are tried up to 200 as well.
    """
    for at, seqlen in enumerate(lengths):
        for nth, head_dim in enumerate(head_dims):
            if seqlen > 200:  # each scale with another head_dim
                yield Case(seqlen, head_dim, SCALES[(at + nth) % 3], dtype=dtype, seed=seed)
                continue
            for scale in SCALES:
                yield Case(seqlen, head_dim, scale, dtype=dtype, seed=seed)
            heads = 12 if seqlen == 33 else 3  # GPT-2's, once
            yield Case(seqlen, head_dim, batch=3, num_heads=heads, dtype=dtype, seed=seed)
            yield Case(seqlen, head_dim, is_causal=False, dtype=dtype, seed=seed)
            yield Case(seqlen, head_dim, softmax_scale=0.3, dtype=dtype, seed=seed)


def hard_cases(head_dim: int, dtype: torch.dtype, seed: int, *, is_emulated: bool) -> list[Case]:
    """Return cases in which rounding shows: equal scores, inputs of 1e4, values far from zero.

    Those of 4,096 keys are for an error that grows with the length.
    """
    fields: dict[str, Any] = {"dtype": dtype, "seed": seed}
    found = [
        Case(300, head_dim, 19.3, is_causal=is_causal, kind="equal", **fields)
        for is_causal in (True, False)
    ]
    found += [Case(100, head_dim, kind="offset", **fields)]
    if dtype != torch.float16:  # where scores of 1e8 overflow
        found += [
            Case(64, head_dim, 1e4, is_causal=is_causal, **fields) for is_causal in (True, False)
        ]
    if not is_emulated:
        found += [Case(4096, head_dim, num_heads=1, is_causal=False, kind="offset", **fields)]
    if not is_emulated and dtype == torch.float32:
        found += [Case(4096, head_dim, num_heads=1, **fields)]
    return found


def extreme_cases(head_dim: int, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield cases whose values differ by many orders of magnitude, which float16 cannot hold."""
    if dtype == torch.float16:
        return
    for kind, is_causal in itertools.product(EXTREMES, (True, False)):
        yield Case(100, head_dim, is_causal=is_causal, dtype=dtype, seed=seed, kind=kind)


def every_length(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], seed: int
) -> Iterator[Case]:
    """Yield two cases of each length up to EVERY_LENGTH_TO, one causal and one full, else random.

    An error at one remainder of a tile's width, say seqlen % 32 == 17, is met several times.
    """
    draw = random.Random(f"every length {seed}")
    for seqlen in range(1, EVERY_LENGTH_TO + 1):
        for is_causal in (True, False):
            kind, scale = draw.choice(NUMBERS)
            batch = draw.choice(BATCHES)
            yield Case(
                seqlen,
                draw.choice(head_dims),
                scale,
                batch,
                draw.choice([heads for heads in HEADS if heads * batch <= 12]),
                is_causal,
                draw.choice(SOFTMAX_SCALES),
                draw.choice(dtypes),
                seed,
                kind,
                draw.choice(LAYOUTS),
            )


def random_cases(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], seed: int, *, is_emulated: bool
) -> Iterator[Case]:
    """Yield random cases that cover all pairs of conditions, lengths by where they lie."""
    draw = random.Random(f"random cases {seed}")
    largest = LARGEST_EMULATED_WORK if is_emulated else LARGEST_WORK
    # Each end with a band up to it: the narrower the cases of a band, the more work they may be.
    ends = (
        (16, 64, 128, 256, 512, 1100) if is_emulated else (64, 128, 256, 512, 1024, 1280, LONGEST)
    )
    bands = tuple(itertools.pairwise((0, *ends)))
    conditions: dict[str, Sequence[Any]] = {
        "band": bands,
        "batch": BATCHES,
        "num_heads": HEADS,
        "head_dim": head_dims,
        "is_causal": (True, False),
        "softmax_scale": SOFTMAX_SCALES,
        "numbers": NUMBERS,
        "layout": LAYOUTS,
        "dtype": dtypes,
    }

    def fits(chosen: Mapping[str, Any]) -> bool:
        work = chosen["batch"] * chosen["num_heads"] * chosen["head_dim"]
        return bool(work * (chosen["band"][0] + 1) ** 2 <= largest)

    for chosen in all_pairs(conditions, draw, fits):
        (low, high), (kind, scale) = chosen.pop("band"), chosen.pop("numbers")
        work = chosen["batch"] * chosen["num_heads"] * chosen["head_dim"]
        seqlen = draw.randint(low + 1, min(high, int((largest / work) ** 0.5)))
        if draw.random() < 0.5 and seqlen // 64 * 64 > low:
            seqlen = seqlen // 64 * 64 + draw.choice((0, 0, 1))  # a tile's edge
        yield Case(seqlen, scale=scale, kind=kind, seed=seed, **chosen)


def decode_cases(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], seed: int
) -> Iterator[DecodeCase]:
    """Yield fixed cases of each dtype, then random ones that cover all pairs.

    The fixed ones have lengths around the edges of tiles in one batch: of each head_dim, and of one
    head_dim the inputs of hard_cases().
    """
    edges: dict[str, Any] = {"lengths": EDGES, "max_seqlen": max(EDGES)}
    for dtype in dtypes:
        for head_dim in head_dims:
            yield DecodeCase(head_dim, dtype, seed, **edges)
        usual = 64 if 64 in head_dims else head_dims[0]
        yield DecodeCase(usual, dtype, seed, scale=19.3, kind="equal", **edges)
        yield DecodeCase(usual, dtype, seed, kind="offset", **edges)
        if dtype in (torch.float32, torch.float64):  # 16 bits round scores of 1e8 by many units
            yield DecodeCase(usual, dtype, seed, scale=1e4, **edges)
    draw = random.Random(f"decode {seed}")
    ends = (32, 70, 128, 512, 1024, 1200)
    conditions: dict[str, Sequence[Any]] = {
        "band": tuple(itertools.pairwise((0, *ends))),
        "batch": BATCHES,
        "num_heads": HEADS,
        "head_dim": head_dims,
        "softmax_scale": SOFTMAX_SCALES,
        "scale": SCALES,
        "layout": LAYOUTS,
        "dtype": dtypes,
    }
    for chosen in all_pairs(conditions, draw):
        (low, high), batch = chosen.pop("band"), chosen.pop("batch")
        longest = draw.randint(low + 1, high)
        others = [draw.randint(1, longest) for _ in range(batch - 1)]
        lengths = tuple(draw.sample([longest, *others], batch))
        max_seqlen = longest + draw.choice((0, 1, 31))
        yield DecodeCase(seed=seed, lengths=lengths, max_seqlen=max_seqlen, **chosen)


def all_pairs(
    conditions: Mapping[str, Sequence[Any]],
    draw: random.Random,
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> Iterator[dict[str, Any]]:
    """Yield choices of one value per condition until every pair of values has met that can meet.

    Greedy: of 20 random choices that hold the first open pair, the one that closes most. fits: says
    which choices are allowed; a pair that 200 choices do not fit into is given up.
    """
    names = list(conditions)

    def pairs(chosen: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}

    open_pairs = {
        (a, x, b, y): None  # a dict keeps the order, and so the draw
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(conditions[a], conditions[b])
    }
    while open_pairs:
        a, x, b, y = first = next(iter(open_pairs))
        drawn = (
            {name: draw.choice(values) for name, values in conditions.items()} | {a: x, b: y}
            for _ in range(200)
        )
        candidates = list(itertools.islice(filter(fits, drawn), 20))
        if not candidates:
            del open_pairs[first]
            continue
        best = max(candidates, key=lambda chosen: sum(pair in open_pairs for pair in pairs(chosen)))
        for pair in pairs(best):
            open_pairs.pop(pair, None)
        yield best


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _with_gaps(x: Tensor, width: int) -> Tensor:
    batch, seqlen, num_heads, head_dim = x.shape
    pad = width * 16 // x.element_size()
    shape = (batch + 1, seqlen + width, num_heads + 1, head_dim + pad)
    view = x.new_full(shape, torch.nan)[:batch, width:, :num_heads, pad:]
    return view.copy_(x)
