"""The reference that every backend is judged by: float64 attention, and the allowed error.

An output must meet three rules, for every row i (one query of one head) and every column c (one
number of that head's output, over all queries):

    max|o - ref|               <= factor * max(naive, max condition)      + sums + 4 eps max|ref|
    ||o_i - ref_i||/||ref_i||  <= factor * max(naive_row, condition_i)    + sums + 4 eps' + eps/2
    ||o_c - ref_c||/||size_c|| <= factor * max(naive_column, condition_c) + sums + 4 eps' + eps/2

The core is FlashAttention's rule (Dao-AILab/flash-attention, tests): a kernel may be `factor` times
as far from float64 as plain PyTorch in the same dtype (naive: its largest error; naive_row and
naive_column: its largest relative error of a row and of a column). The second rule exists because
the first rows of causal attention set the maximum, which hides an error that grows with the length.
The third exists because one large column of V dominates the norm of a row, which hides an error in
the other columns. A column may cancel to nothing, so its error is relative to the sum of absolute
values: size_ic = sum_j p_ij |v_jc|. Rows and columns of only a few numbers are not judged, because
their errors are a matter of luck.

Plain PyTorch's error is one draw of a random variable: by luck it may be many times smaller than
that of an equally good kernel that rounds elsewhere. Two terms, computed from the inputs, keep luck
out of the verdict. eps is the precision of the dtype, eps' that of the sums (float32's for 16-bit
dtypes).

condition: how far rounding of the scores moves the output. A score s_ij = scale * q_i.k_j has a
    rounding error of about d_ij = sqrt((eps' scale ||q_i|| ||k_j||)^2 + (eps/2 s_ij)^2 + eps'^2):
    from the sum over head_dim, from the result, and from exp, whose relative error of p_ij equals
    an error of the score. Since do_i = sum_j p_ij d_ij (v_j - o_i), independent
    roundings move the output by sqrt(sum_j (p_ij d_ij (v_j - o_i))^2). It is large where the
    softmax is peaky and two scores nearly tie, because rounding then decides which of them wins. A
    16-bit kernel also rounds p_ij before it multiplies v_j, but not in the row's sum:
    sqrt(sum_j (eps/2 p_ij v_j)^2).
sums: (eps' sqrt(sum_j min(1, p_ij/u)^2) + sum_j p_ij [p_ij < u]) |ref|, with u = eps'/2. Adding
    p_ij to a sum of up to 1 loses at most min(p_ij, u). Where p_ij >= u, n roundings to nearest
    drift by about sqrt(n) of them: a third of a rounding each, and five times that for the largest
    of all rows, in O and in the row's sum. A smaller p_ij may be lost altogether, and all such
    losses have the same sign. A kernel that adds one key at a time stays within that, and so does
    one that rescales or divides its sums in every tile. One that truncates drifts by n roundings
    and fails. The float64 reference drifts like the output, so float64 gets twice the term.

A version file whose algorithm needs more says how much and why (`Error: 2x: ...` in its header);
all budgets are then multiplied by BackendSpec.error_slack.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import threshold

from attention_kernels.contract import dtype_name, per_query_head
from attention_kernels.errors import ArgumentError

# The factor of each precision class. A number split into two terms keeps 22 of float32's 24 bits,
# so three products of such terms may lose a bit more than plain float32. float64 has no finer
# reference: the reference is as far from the truth as the output.
BUDGET_FACTOR = {"3xtf32": 4.0, "3xfp16": 4.0, "fp64": 4.0}
# FlashAttention's factor: a kernel may round twice where plain PyTorch rounds once. Every ieee-fp32
# kernel stays within it; those that divide O in every tile also need the term for sums.
DEFAULT_BUDGET_FACTOR = 2.0
# The unit in the last place, relative to the dtype's, of a class that rounds products more coarsely
# than its dtype: TF32 has 13 bits fewer than float32. Multiplies all terms except that for sums.
LAST_PLACE = {"tf32": 2.0**13}
# The absolute term, in units in the last place: exponentials and divisions, each good to an ulp.
ABSOLUTE_TERM_ULPS = 4
# Above this fraction of its budget an error is reported as borderline: other inputs may exceed it.
BORDERLINE = 0.8
# The most scores computed at once: 1 GiB in float64, in five copies.
LARGEST_SCORES = 2**27
LEAST_SCORE = -1e150  # finite, even its square
RELATIVE_FROM = 1e-3
# The fewest numbers in a row or column that is judged.
LEAST_NUMBERS = 16
# The names of an output's axes, singular and plural.
AXES = (("batch", "batches"), ("row", "rows"), ("head", "heads"), ("column", "columns"))


def check_precision() -> None:
    """Raise ArgumentError if torch computes float32 products in TF32 or bfloat16."""
    if torch.backends.cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != "highest":
        raise ArgumentError(
            "torch is set to compute float32 products in TF32 or bfloat16: plain PyTorch is then "
            "no measure of error (torch.set_float32_matmul_precision('highest') sets it back)"
        )


@dataclass(frozen=True)
class Verdict:
    """How far an output is from the reference, and how far it may be."""

    error: float
    """max|out - ref|; infinite for a NaN or an infinity."""
    budget: float
    naive_error: float
    """Plain PyTorch's max|out - ref|."""
    relative_error: float = 0.0
    """The largest where |ref| > RELATIVE_FROM, to compare with published figures; not judged."""
    row_error: float = 0.0
    """||out_i - ref_i|| / ||ref_i|| of the row nearest to its budget, or farthest over it."""
    row_budget: float = math.inf
    """The budget of that row."""
    naive_row_error: float = 0.0
    """Plain PyTorch's largest row_error."""
    column_error: float = 0.0
    """||out_c - ref_c|| / ||size_c|| of the column nearest to its budget, or farthest over it."""
    column_budget: float = math.inf
    """The budget of that column."""
    naive_column_error: float = 0.0
    """Plain PyTorch's largest column_error."""
    where: str = ""
    """For a failure: the worst element, and which elements are over the budget."""
    fault: str = ""
    """A fault other than a numerical error: a changed input, a wrong shape."""

    @property
    def rules(self) -> tuple[tuple[str, float, float, float], ...]:
        """The rules in words, each with the error that it judges, its budget, and naive_error."""
        return (
            ("error", self.error, self.budget, self.naive_error),
            ("by row", self.row_error, self.row_budget, self.naive_row_error),
            ("by column", self.column_error, self.column_budget, self.naive_column_error),
        )

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; NaN never passes, nor does a budget of 0 or infinity."""
        is_within = all(error <= budget for _, error, budget, _ in self.rules)
        return not self.fault and 0 < self.budget < math.inf and is_within

    @property
    def nearness(self) -> float:
        """The largest ratio of an error to its budget; infinite for any other failure."""
        if not self.passed and not 0 < self.budget < math.inf:
            return math.inf
        ratio = max(error / budget for _, error, budget, _ in self.rules)
        return ratio if self.passed or ratio > 1 else math.inf

    @property
    def status(self) -> Literal["passed", "borderline", "failed"]:
        """The verdict in one word; borderline means above BORDERLINE of the budget."""
        if not self.passed:
            return "failed"
        return "borderline" if self.nearness > BORDERLINE else "passed"

    def __str__(self) -> str:
        """Return the errors with their budgets, and the place of a failure."""
        if self.fault:
            return self.fault
        where = f"; {self.where}" if self.where else ""
        if self.error == math.inf:
            return f"the output is not finite{where}"
        if not math.isfinite(self.budget):
            return f"there is no budget, because plain PyTorch's output is not finite{where}"
        judged = (rule for rule in self.rules if rule[2] < math.inf)  # not of too few numbers
        texts = (f"{rule} {error:.2e}, budget {budget:.2e}" for rule, error, budget, _ in judged)
        return "; ".join(texts) + where


@dataclass(frozen=True)
class Rule:
    """One of the three rules: the terms of its budgets.

    For rows or columns of fewer than LEAST_NUMBERS numbers the condition is infinite, so that any
    error is allowed.
    """

    naive_error: float
    """Plain PyTorch's largest error."""
    condition: Tensor
    absolute: float
    sums: Tensor
    dim: int | None = None
    """The dimension of the output that norms are taken along; None: each element by itself."""
    lengths: Tensor | None = None
    """The norm of every row or column, which its error is relative to."""

    def errors(self, difference: Tensor) -> Tensor:
        """Return the error of every element, row or column."""
        if self.lengths is None:
            return difference
        return vector_norm(difference, dim=self.dim) / self.lengths  # type: ignore[no-any-return]

    def budgets(self, precision: str, slack: float = 1.0) -> Tensor:
        """Return the budget of each of errors(), or of all."""
        naive = torch.full_like(self.condition, self.naive_error)
        # Unlike Python's max(), torch's keeps a NaN.
        expected = budget_factor(precision) * naive.maximum(self.condition)
        return slack * (LAST_PLACE.get(precision, 1.0) * (expected + self.absolute) + self.sums)


@dataclass(frozen=True)
class Truth:
    """The reference output of a call, and the rules by which other outputs are judged."""

    reference: Tensor
    """float64, (batch, rows, num_heads, head_dim)."""
    dtype: torch.dtype
    """The dtype of the inputs."""
    rules: dict[str, Rule]
    """Those of elements, rows and columns: "", "row_" and "column_", as in Verdict's fields."""

    def judge(self, out: Tensor, precision: str = "ieee-fp32", slack: float = 1.0) -> Verdict:
        """Compare an output with the reference; a wrong shape or dtype is a fault.

        slack: BackendSpec.error_slack.
        """
        reference = self.reference
        if out.shape != reference.shape or out.dtype != self.dtype:
            got, wanted = (
                f"{tuple(shape)} {dtype_name(dtype)}"
                for shape, dtype in ((out.shape, out.dtype), (reference.shape, self.dtype))
            )
            return Verdict(math.inf, math.inf, 0.0, fault=f"the output is {got}, not {wanted}")
        difference = (out.double() - reference).abs()
        relative = (difference / reference.abs()).where(reference.abs() > RELATIVE_FROM, 0.0)
        found: dict[str, Any] = {}
        places: list[Tensor] = []
        for name, rule in self.rules.items():
            errors, budgets = rule.errors(difference), rule.budgets(precision, slack)
            nearest = int((errors / budgets).nan_to_num(nan=math.inf).argmax())
            error, budget = (x.expand_as(errors).flatten()[nearest] for x in (errors, budgets))
            # Infinite for a NaN, too.
            found[f"{name}error"] = error.item() if error.isfinite() else math.inf
            found[f"{name}budget"] = budget.item()
            found[f"naive_{name}error"] = rule.naive_error
            over = ~(errors <= budgets)
            if over.any():
                over = over if rule.dim is None else over.unsqueeze(rule.dim)
                places.append(over.expand_as(difference))
        verdict = Verdict(relative_error=relative.max().item(), **found)
        if verdict.passed or not places:
            return verdict
        over = places[0]
        # A NaN counts as the largest error.
        worst = int(difference.nan_to_num(nan=math.inf).where(over, -1.0).argmax())
        value, right = (x.flatten()[worst].item() for x in (out, reference))
        index = torch.unravel_index(torch.tensor(worst), out.shape)
        at = ", ".join(f"{name} {int(x)}" for (name, _), x in zip(AXES, index, strict=True))
        where = f"{value:.6g} instead of {right:.6g} at {at}; over the budget are {extent(over)}"
        return dataclasses.replace(verdict, where=where)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    seqlens: Tensor | None = None,
) -> Tensor:
    """Compute attention in plain PyTorch, in the dtype of its inputs.

    Shapes are (batch, seqlen, num_heads, head_dim). If q has fewer rows than k, the causal mask is
    bottom-right aligned. seqlens: the number of keys of each batch entry, (batch,); all by default.
    """
    weights = torch.softmax(_scores(q, k, softmax_scale, is_causal, seqlens), dim=3)
    return (weights @ v.transpose(1, 2)).transpose(1, 2).contiguous()


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    seqlens: Tensor | None = None,
) -> Truth:
    """Compute the reference output of a call and the terms of its budgets.

    The arguments are those of naive_attention(), but k and v may have fewer heads than q. Whatever
    the shape, only a few gigabytes of scores exist at once.
    """
    k, v = per_query_head(q, k, v)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    reference = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    rounding, sizes, naive = (torch.empty_like(reference) for _ in range(3))
    row_sums = reference.new_empty(q.shape[:3])
    offset = k.shape[1] - q.shape[1]
    for batch, rows, heads in _parts(q, k.shape[1]):
        part = batch, rows, heads
        seen = batch, slice(offset + rows.stop if is_causal else None), heads
        lengths = None if seqlens is None else seqlens[batch]
        arguments = q[part], k[seen], v[seen], scale, is_causal, lengths
        reference[part], rounding[part], sizes[part], row_sums[part] = _rounding(*arguments)
        naive[part] = _naive_difference(reference[part], *arguments)
    eps, sums = _eps(q.dtype), row_sums[..., None] * reference.abs()
    # A row may cancel to nothing; its float64 reference is then no more precise than this.
    resolution = torch.finfo(torch.float64).eps * sizes

    def relative(dim: int, size: Tensor) -> Rule:
        lengths = vector_norm(size, dim=dim).clamp_(min=1e-300)
        parts = naive, rounding, sums
        errors, condition, drift = (vector_norm(part, dim=dim) / lengths for part in parts)
        if q.shape[dim] < LEAST_NUMBERS:
            condition.fill_(math.inf)
        absolute = ABSOLUTE_TERM_ULPS * _sum_eps(q.dtype) + eps / 2
        return Rule(errors.max().item(), condition, absolute, drift, dim, lengths)

    absolute = ABSOLUTE_TERM_ULPS * eps * reference.abs().max().item()
    rules = {
        "": Rule(naive.max().item(), rounding.max(), absolute, sums.max()),
        "row_": relative(3, reference.abs().maximum(resolution)),
        "column_": relative(1, sizes),
    }
    return Truth(reference, q.dtype, rules)


def error_budget(precision: str, dtype: torch.dtype, expected: float, largest: float) -> float:
    """Return the error budget without the term for sums.

    expected: plain PyTorch's error, or the condition if it is larger. largest: the reference's
    largest magnitude.
    """
    absolute = ABSOLUTE_TERM_ULPS * _eps(dtype) * largest
    return LAST_PLACE.get(precision, 1.0) * (budget_factor(precision) * expected + absolute)


def extent(wrong: Tensor) -> str:
    """Describe how many elements of a mask are set and where; it has the shape of an output.

    For example "992 of 4096 elements, in rows 32 to 63, 31 of 64 columns (1, 3, 5, ...)". An axis
    is left out if elements are set at all of its positions.
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


def _scores(
    q: Tensor, k: Tensor, softmax_scale: float | None, is_causal: bool, seqlens: Tensor | None
) -> Tensor:
    """Return the scores, (batch, num_heads, rows, keys), -inf where a key does not count."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * scale
    if is_causal:
        ones = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(ones.triu(1 + k.shape[1] - q.shape[1]), -torch.inf)
    if seqlens is not None:
        past = torch.arange(k.shape[1], device=scores.device) >= seqlens[:, None]
        scores.masked_fill_(past[:, None, None], -torch.inf)
    return scores


def _rounding(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *mask: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reference, each element's condition and size, and each row's term for sums.

    mask: is_causal and seqlens.
    """
    eps, sum_eps = _eps(q.dtype), _sum_eps(q.dtype)
    is_float64 = q.dtype == torch.float64
    q, k, v = (x.double() for x in (q, k, v))
    scores = _scores(q, k, scale, *mask)
    weights = torch.softmax(scores, dim=3)
    v = v.transpose(1, 2)
    o, size = (weights @ torch.cat([v, v.abs()], dim=3)).chunk(2, dim=3)
    unit = sum_eps / 2
    capped = weights.clamp(max=unit)
    drift = 2 * vector_norm(capped, dim=3)
    lost = threshold(capped.neg_(), -unit, 0.0, inplace=True).sum(3).neg_()  # p_ij < u
    sums = (drift + lost) * (2 if is_float64 else 1)
    weights.square_()
    squares = v.square()
    stored = weights @ squares if eps > sum_eps else 0.0  # effect of rounding p to 16 bits
    # A score of -inf, times its weight of 0, must not become NaN.
    scores.clamp_(min=LEAST_SCORE).square_().mul_((eps / 2) ** 2)
    q_norms, k_norms = (x.square().sum(3).transpose(1, 2) for x in (q, k))
    rounded = sum_eps**2 + (eps / 2) ** 2 / q.shape[3]
    scores.addcmul_(q_norms[..., None], k_norms[:, :, None], value=rounded * scale**2)
    weights.mul_(scores.add_(sum_eps**2))
    # (v - o)^2 is expanded, so that the sum over keys is a matrix product.
    first, second = (weights @ torch.cat([v, squares], dim=3)).chunk(2, dim=3)
    total = weights.sum(3, keepdim=True)
    moved = (second - 2 * o * first + o.square() * total).clamp_(min=0)
    condition = (moved + (eps / 2) ** 2 * stored).sqrt_()
    o, condition, size, sums = (x.transpose(1, 2) for x in (o, condition, size, sums))
    return o, condition, size, sums


def _naive_difference(
    reference: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> Tensor:
    """Return the error of plain PyTorch in the dtype of its inputs, element by element.

    float64 has no finer reference: its error is estimated as float32's, scaled to float64's eps.
    """
    scale = 1.0
    if q.dtype == torch.float64:
        q, k, v = q.float(), k.float(), v.float()
        reference = naive_attention(q.double(), k.double(), v.double(), *arguments)
        scale = _eps(torch.float64) / _eps(torch.float32)
    out = naive_attention(q, k, v, *arguments)
    return scale * (out.double() - reference).abs()


def budget_factor(precision: str) -> float:
    """Return the multiple of plain PyTorch's error that a precision class may have."""
    return BUDGET_FACTOR.get(precision, DEFAULT_BUDGET_FACTOR)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _sum_eps(dtype: torch.dtype) -> float:
    """Return the eps of sums; 16-bit products are summed in float32."""
    return min(_eps(dtype), _eps(torch.float32))


def _parts(q: Tensor, keys: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of batch, rows and heads with at most LARGEST_SCORES scores each."""
    batch, seqlen, num_heads, _ = q.shape
    # How many fit at once, of each axis the largest part whose inner axes are whole.
    rows, heads, entries = (
        max(1, LARGEST_SCORES // scores)
        for scores in (keys, seqlen * keys, num_heads * seqlen * keys)
    )
    firsts = range(0, batch, entries), range(0, seqlen, rows), range(0, num_heads, heads)
    for entry, row, head in itertools.product(*firsts):
        last_row = min(row + rows, seqlen)
        yield slice(entry, entry + entries), slice(row, last_row), slice(head, head + heads)
