"""The truth that every backend is held to: float64 attention and the error budget.

The budget is FlashAttention's own rule (Dao-AILab/flash-attention, tests): a kernel may be at most
twice as far from the float64 reference as plain PyTorch in the same dtype, plus a few units in the
last place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.errors import ArgumentError

# How many times the naive error a class may have. 3xTF32 keeps 22 of float32's 24 bits in each
# product, so two bits more may be lost than by plain float32. float64 is judged by float64, which
# is as far from the truth as the output.
BUDGET_FACTOR = {"3xtf32": 8.0, "fp64": 4.0}
DEFAULT_BUDGET_FACTOR = 2.0
# The absolute term, in units in the last place of the largest output: a floor where the naive error
# is luckily zero.
ABSOLUTE_TERM_ULPS = 4
# How many scores are computed at once: 2 GiB in float64.
LARGEST_SCORES = 2**28
RELATIVE_FROM = 1e-3
# What the axes of an output are called: one, several.
AXES = (("batch", "batches"), ("row", "rows"), ("head", "heads"), ("column", "columns"))


def check_precision() -> None:
    """Raise ArgumentError where float32 products are not: no budget would hold."""
    if torch.backends.cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != "highest":
        raise ArgumentError(
            "torch is set to compute float32 products in TF32 or bfloat16: plain PyTorch is then "
            "no measure of error (torch.set_float32_matmul_precision('highest') sets it back)"
        )


@dataclass(frozen=True)
class Verdict:
    """How far an output is from the reference, and how far it may be.

    relative_error: the largest where the reference is above RELATIVE_FROM in magnitude; for
    comparison with others' figures, and judged by nobody. where: of a failure, its worst element
    and which ones are over the budget, in a phrase.
    """

    error: float
    budget: float
    naive_error: float
    relative_error: float = 0.0
    where: str = ""

    @property
    def passed(self) -> bool:
        """NaN-strict: a NaN error is a failure."""
        return self.error <= self.budget

    @property
    def nearness(self) -> float:
        """The error over the budget; infinite where that is no number above 1 and it failed."""
        ratio = self.error / self.budget if self.budget > 0 else 0.0
        return ratio if self.passed or ratio > 1 else math.inf

    def __str__(self) -> str:
        """Error and budget; of a failure, where it is."""
        where = f"; {self.where}" if self.where else ""
        return f"error {self.error:.2e}, budget {self.budget:.2e}{where}"


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, is_causal: bool = True
) -> Tensor:
    """Plain PyTorch in the dtype of its inputs; (batch, seqlen, num_heads, head_dim) in and out.

    q may have fewer rows than k: the causal mask is bottom-right aligned.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = (q @ k.transpose(2, 3)) * scale
    if is_causal:
        ones = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        future = ones.triu(1 + k.shape[2] - q.shape[2])
        scores.masked_fill_(future, -torch.inf)
    return (torch.softmax(scores, dim=3) @ v).transpose(1, 2).contiguous()


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, is_causal: bool = True
) -> Tensor:
    """naive_attention() in float64, whatever the dtype of the inputs."""
    return naive_attention(q.double(), k.double(), v.double(), softmax_scale, is_causal)


def naive_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    *,
    reference: Tensor | None = None,
) -> float:
    """How far plain PyTorch in the dtype of its inputs is from the reference.

    For float64, where no reference is finer, it is float32's error scaled to float64's precision.
    """
    scale = 1.0
    if q.dtype == torch.float64:
        q, k, v, reference = q.float(), k.float(), v.float(), None
        scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    if reference is None:
        reference = reference_attention(q, k, v, softmax_scale, is_causal)
    out = naive_attention(q, k, v, softmax_scale, is_causal)
    return scale * (out.double() - reference).abs().max().item()


def reference_in_parts(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, is_causal: bool = True
) -> tuple[Tensor, float]:
    """reference_attention() and naive_error(), with few scores at once whatever the shape."""
    reference = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    found = []
    for batch, rows, heads in _parts(q):
        part = batch, rows, heads
        seen = batch, slice(rows.stop if is_causal else None), heads
        inputs = (q[part], k[seen], v[seen], softmax_scale, is_causal)
        reference[part] = reference_attention(*inputs)
        found.append(naive_error(*inputs, reference=reference[part]))
    # Unlike Python's max(), torch's keeps a NaN.
    return reference, torch.tensor(found, dtype=torch.float64).max().item()


def judge(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    *,
    precision: str = "ieee-fp32",
    naive_floor: float = 0.0,
) -> Verdict:
    """Hold `out` against the float64 reference.

    The budget: max|out - ref| <= 2 max|naive_same_dtype - ref| + 4 ulp(max|ref|); for a class in
    BUDGET_FACTOR, its factor for 2. naive_floor: what plain PyTorch's error is taken to be at
    least, for inputs so small that it may be zero by luck (see conformance.naive_floor).
    A wrong shape or dtype, a NaN or an infinity gives an infinite error.
    """
    reference, naive = reference_in_parts(q, k, v, softmax_scale, is_causal)
    naive = naive_floor if naive < naive_floor else naive
    budget = error_budget(precision, q.dtype, naive, reference.abs().max().item())
    if out.shape != q.shape or out.dtype != q.dtype:
        what = f"it is {tuple(out.shape)} {out.dtype}, not {tuple(q.shape)} {q.dtype}"
        return Verdict(math.inf, budget, naive, math.inf, what)
    return measure(out, reference, budget, naive)


def measure(out: Tensor, reference: Tensor, budget: float, naive: float) -> Verdict:
    """How far `out` is from a float64 reference of its shape, and where, if over the budget."""
    difference = (out.double() - reference).abs()
    counts = reference.abs() > RELATIVE_FROM
    relative = (difference / reference.abs()).where(counts, 0.0).max().item()
    error = difference.max().item()
    verdict = Verdict(error if math.isfinite(error) else math.inf, budget, naive, relative)
    if verdict.passed:
        return verdict
    # A NaN is the worst.
    worst = int(difference.nan_to_num(nan=math.inf).argmax())
    got, wanted = out.flatten()[worst].item(), reference.flatten()[worst].item()
    where = f"{got:.6g} instead of {wanted:.6g} at {place(worst, out.shape)}"
    over = extent(~(difference <= budget))
    return dataclasses.replace(verdict, where=f"{where}; over the budget are {over}")


def place(index: int, shape: Sequence[int]) -> str:
    """The coordinates of an element, by its index in the flat tensor of an output's shape."""
    coordinates = []
    for (name, _), size in zip(reversed(AXES), reversed(shape), strict=True):
        coordinates.append(f"{name} {index % size}")
        index //= size
    return ", ".join(reversed(coordinates))


def extent(wrong: Tensor) -> str:
    """How many elements of a mask of an output's shape are set, and where.

    For example "992 of 4096 elements, in rows 32 to 63, 31 of 64 columns (1, 3, 5, ...)"; an axis
    is left out where they are all along it.
    """
    ranges = []
    for axis, (one, several) in enumerate(AXES):
        hit = wrong.movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
        size = wrong.shape[axis]
        if len(hit) == 1 < size:
            ranges.append(f"{one} {hit[0]}")
        elif 1 < len(hit) < size and hit[-1] - hit[0] + 1 == len(hit):
            ranges.append(f"{several} {hit[0]} to {hit[-1]}")
        elif 1 < len(hit) < size:
            first = ", ".join(map(str, hit[:3])) + ", ..." * (len(hit) > 3)
            ranges.append(f"{len(hit)} of {size} {several} ({first})")
    count = f"{int(wrong.sum())} of {wrong.numel()} elements"
    return f"{count}, in {', '.join(ranges)}" if ranges else count


def error_budget(precision: str, dtype: torch.dtype, naive: float, largest: float) -> float:
    """What an error may be, given plain PyTorch's and the largest magnitude of the reference."""
    factor = BUDGET_FACTOR.get(precision, DEFAULT_BUDGET_FACTOR)
    return factor * naive + ABSOLUTE_TERM_ULPS * torch.finfo(dtype).eps * largest


def _parts(q: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Slices along batch, rows and heads whose float64 scores are within a few gigabytes."""
    batch, seqlen, num_heads, _ = q.shape
    if batch * num_heads * seqlen**2 <= LARGEST_SCORES:
        yield slice(None), slice(0, seqlen), slice(None)
        return
    heads = max(1, LARGEST_SCORES // seqlen**2)
    rows = min(seqlen, max(1, LARGEST_SCORES // seqlen))
    for entry in range(batch):
        for row in range(0, seqlen, rows):
            for head in range(0, num_heads, heads):
                yield (
                    slice(entry, entry + 1),
                    slice(row, min(row + rows, seqlen)),
                    slice(head, head + heads),
                )
