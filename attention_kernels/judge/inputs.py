"""One input of attention() or decode(): its shape, its values and its memory layout."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from attention_kernels.contract import dtype_name

Op: TypeAlias = Literal["attention", "decode"]
Extreme = Literal[
    "tiny", "huge", "alternating", "halves", "one large column", "zero rows", "tiny scores"
]
Timed = Literal[
    "peaky", "near-equal keys", "one-hot keys", "heavy-tailed", "trained", "uniform", "large mean"
]
Kind = Literal["normal", "offset", "equal"] | Extreme | Timed
# How a call is made: as a user's own code would, as a server would, on a stream of its own, or in a
# CUDA graph.
Context = Literal["plain", "no_grad", "inference_mode", "stream", "graph"]
# The size of the values where a kernel must not look: finite, even when multiplied by 8.
LARGE = {torch.float16: 1e3, torch.bfloat16: 1e30, torch.float32: 1e30, torch.float64: 1e30}


@dataclass(frozen=True)
class Case:
    """One input of attention(); equal cases have equal inputs, and others share nothing."""

    op: ClassVar[Op] = "attention"

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
    layout: str = "fused"
    """The memory layout of q, k and v; see arrange()."""
    group: int = 1
    """The number of query heads per key head; num_heads counts those of k and v."""
    context: Context = "plain"

    @property
    def work(self) -> float:
        """The number of multiplications of a score by a value, if nothing were masked."""
        heads = self.num_heads * self.group
        return float(self.batch * heads * self.seqlen**2 * self.head_dim)

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """Draw q, k and v, strided views of (batch, seqlen, num_heads, head_dim).

        The numbers are drawn on the CPU, so that every device gets the same ones.
        """
        shape = (self.batch, self.seqlen, 3, self.num_heads * self.group, self.head_dim)
        qkv = of_kind(_normal(shape, own_seed(self)) * self.scale, self.kind, self.scale)
        return arrange(qkv.to(device=device, dtype=self.dtype), self.layout, self.group)

    def __str__(self) -> str:
        """Describe the case, without its usual values."""
        kind = "causal" if self.is_causal else "full"
        layout = "" if self.layout == "fused" else f"{self.layout} layout, "
        return (
            f"seqlen {self.seqlen}, head_dim {self.head_dim}, batch {self.batch}, "
            f"{_heads(self)}, {kind}, {_values(self)}{layout}{_context(self)}"
            f"{dtype_name(self.dtype)}, seed {self.seed}"
        )


@dataclass(frozen=True)
class DecodeCase:
    """One input of decode(): a cache whose rows hold sequences of different lengths."""

    op: ClassVar[Op] = "decode"

    head_dim: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lengths: tuple[int, ...] = (1, 37, 70)
    max_seqlen: int = 70
    num_heads: int = 2
    scale: float = 1.0
    softmax_scale: float | None = None
    layout: str = "transposed"
    """The memory layout of the cache; see arrange()."""
    kind: Kind = "normal"
    """The kind of values; see of_kind()."""
    group: int = 1
    """The number of query heads per key head; num_heads counts those of the cache."""
    context: Context = "plain"

    @property
    def batch(self) -> int:
        """The number of rows of the cache."""
        return len(self.lengths)

    @property
    def work(self) -> float:
        """About as many multiplications of attention() cost as much in the emulator."""
        heads = self.num_heads * self.group
        return 5.0 * len(self.lengths) * max(self.lengths) * heads * self.head_dim

    @property
    def seqlen(self) -> int:
        """The length of the cache."""
        return self.max_seqlen

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw q, k_cache, v_cache and seqlens; the values past a row's length are large."""
        heads = self.num_heads * self.group
        shape = (len(self.lengths), self.max_seqlen, 3, heads, self.head_dim)
        qkv = of_kind(_normal(shape, own_seed(self)) * self.scale, self.kind, self.scale)
        q = torch.stack([row[length - 1, 0] for row, length in zip(qkv, self.lengths, strict=True)])
        for row, length in zip(qkv, self.lengths, strict=True):
            used = max(self.lengths) if "one row" in self.layout else length
            row[used:] = torch.tensor(LARGE[self.dtype]).copysign(row[used:])
        _, k, v = arrange(qkv.to(device=device, dtype=self.dtype), self.layout, self.group)
        seqlens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return q[:, None].to(device=device, dtype=self.dtype), k, v, seqlens

    def __str__(self) -> str:
        """Describe the case, without its usual values."""
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"decode, head_dim {self.head_dim}, {_heads(self)}, "
            f"lengths {lengths} of {self.max_seqlen}, {_values(self)}{self.layout} layout, "
            f"{_context(self)}{dtype_name(self.dtype)}, seed {self.seed}"
        )


def _heads(case: Case | DecodeCase) -> str:
    return f"{case.num_heads} heads" + (f" of {case.group} queries" if case.group > 1 else "")


def _values(case: Case | DecodeCase) -> str:
    softmax = "" if case.softmax_scale is None else f"softmax_scale {case.softmax_scale}, "
    kind = "" if case.kind == "normal" else f"{case.kind} values, "
    return f"scale {case.scale}, {softmax}{kind}"


def _context(case: Case | DecodeCase) -> str:
    return "" if case.context == "plain" else f"context {case.context}, "


def own_seed(case: Case | DecodeCase) -> int:
    """Return a number of a case's own: a hash of its fields, keyed with its seed.

    A kernel that knows those of many cases knows nothing of another's.
    """
    key = str(case.seed).encode()
    digest = hashlib.blake2b(repr(case).encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big")


@functools.lru_cache(maxsize=1)  # a comparison runs many backends on the same case
def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_kind(qkv: Tensor, kind: Kind, scale: float) -> Tensor:
    """Turn normal numbers, (batch, seqlen, 3, num_heads, head_dim), into a kind, in place.

    offset: the mean of v is 2.5. equal: all scores are equal, and v is 1 in the first half and 3 in
    the second. tiny and huge: v near the ends of float32's range. alternating and halves: rows of v
    of very different sizes. one large column: one row of v is 0 except for its first number, which
    is multiplied by 2^30. zero rows: every third row of q, k and v is 0. tiny scores: q and k near
    the end of float32's range.

    These are timed, too. peaky: eight times as large. near-equal keys: they differ by a thousandth.
    one-hot keys: one number of each is multiplied by 8, and the others but the first are 0.
    heavy-tailed: cubes. trained: like a trained GPT-2, with small values, one column of k far from
    zero, and a first key that all queries attend to. large mean: that of v is 8, that of k is 1.
    """
    (q, k, v), half = qkv.unbind(2), qkv.shape[1] // 2
    changes: dict[Kind, Callable[[], object]] = {
        "normal": lambda: None,
        "offset": lambda: v.add_(2.5),
        "equal": lambda: (qkv[:, :, :2].fill_(scale), v[:, :half].fill_(1), v[:, half:].fill_(3)),
        "tiny": lambda: v.mul_(1e-30),
        "huge": lambda: v.mul_(1e33),
        "alternating": lambda: (v[:, ::2].mul_(1e-19), v[:, 1::2].mul_(1e19)),
        "halves": lambda: (v[:, :half].mul_(1e-25), v[:, half:].mul_(1e16)),
        "one large column": lambda: (v[:, half, :, 0].mul_(2.0**30), v[:, half, :, 1:].zero_()),
        "zero rows": qkv[:, ::3].zero_,
        "tiny scores": lambda: qkv[:, :, :2].mul_(1e-30),
        "peaky": lambda: qkv.mul_(8.0),
        "near-equal keys": lambda: k.mul_(1e-3).add_(k[:, :1] * 1e3),
        "one-hot keys": lambda: _make_one_hot(k),
        "heavy-tailed": lambda: qkv.pow_(3).mul_(15**-0.5 / scale**2),
        "trained": lambda: _make_trained(q, k, v, scale),
        "uniform": lambda: qkv.mul_(0.5**0.5 / scale).erf_().mul_(3**0.5 * scale),
        "large mean": lambda: (k.add_(1.0), v.add_(8.0)),
    }
    changes[kind]()
    return qkv


def _make_one_hot(k: Tensor) -> None:
    hot = torch.eye(k.shape[3]).mul_(8)[torch.arange(k.shape[1]) % k.shape[3]]
    hot[:, 0] = 1.0
    k *= hot[:, None]


def _make_trained(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    v *= 0.3
    k[..., -1] += 6.0 * scale
    q[..., -1] += 3.0 * scale
    k[:, 0] *= 4.0
    v[:, 0] *= 0.1


def arrange(qkv: Tensor, layout: str, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Split (batch, seqlen, 3, num_heads, head_dim) into q, k and v with a memory layout.

    k and v have num_heads / group heads.

    fused: views of one projection, as in GPT-2. contiguous: three contiguous tensors. transposed:
    heads before positions. gaps: NaN around every head, row and sequence, more for k than for q and
    more for v than for k; each view begins 16 bytes or more into its storage. one head, one row:
    the first head, or row of the batch, for all, with a stride of 0. k is q, v is k: one tensor.
    unaligned: rows begin off multiples of 16 bytes, where those of the other layouts begin if those
    of a contiguous tensor do. Three names are those of q, k and v, each in its own projection if it
    is fused.
    """
    q, k, v = qkv.unbind(2)
    k, v = (x[:, :, : x.shape[2] // group] for x in (k, v))
    if layout == "k is q":
        return q, q[:, :, : k.shape[2]], v
    if layout == "v is k":
        return q, k, k
    if layout == "fused":
        return q, k, v
    of_q, of_k, of_v = layout.split(", ") if "," in layout else [layout] * 3
    return _placed(q, of_q, 1), _placed(k, of_k, 2), _placed(v, of_v, 3)


def _placed(x: Tensor, layout: str, width: int) -> Tensor:
    """Return a copy in another layout; width: of gaps, in 16 bytes."""
    copies: dict[str, Callable[[], Tensor]] = {
        "contiguous": x.contiguous,
        "fused": lambda: torch.stack([x * 2, x, x * -3], 2)[:, :, 1],
        "transposed": lambda: x.transpose(1, 2).contiguous().transpose(1, 2),
        "gaps": lambda: _with_gaps(x, width, width * 16 // x.element_size()),
        "unaligned": lambda: _with_gaps(x, 1, 1),
        "one head": lambda: x[:, :, :1].contiguous().expand(x.shape),
        "one row": lambda: x[:1].contiguous().expand(x.shape),
    }
    return copies[layout]()


def _with_gaps(x: Tensor, width: int, pad: int) -> Tensor:
    batch, seqlen, num_heads, head_dim = x.shape
    shape = (batch + 1, seqlen + width, num_heads + 1, head_dim + pad)
    view = x.new_full(shape, torch.nan)[:batch, width:, :num_heads, pad:]
    return view.copy_(x)
