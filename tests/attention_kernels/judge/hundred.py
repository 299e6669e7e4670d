"""A hundred honest kernels, none of which may be a false alarm; `make cheats` runs this file.

They are those of honest.py, families of the usual ways to compute attention with several parameters
each, and shipped backends of every family. Each has cases, numbers and repeated calls of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_kernels import list_backends
from attention_kernels.errors import UnsupportedError
from attention_kernels.judge import cases
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.suite import judged, leaks, repeat, run_check
from attention_kernels.judge.truth import Verdict
from attention_kernels.judge.worker import open_runner
from attention_kernels.precision import PLAIN_PRECISIONS
from tests.attention_kernels.judge import honest
from tests.attention_kernels.judge.honest import HonestKernel, masked_scores, partials, tiles
from tests.conftest import DEVICES

FAMILIES: list[HonestKernel] = []
# The most work of a case, how many cases there are, and repeated calls; in the emulator, too.
LIMITS = (5e6, 40, 60), (3e5, 8, 8)


def family(*dtypes, precisions=None, supports_gqa=False, **parameters):
    """Add a kernel for each combination of values of the parameters."""

    def add(function):
        for values in itertools.product(*parameters.values()):
            kernel = functools.partial(function, **dict(zip(parameters, values, strict=True)))
            words = [str(getattr(value, "__name__", value)) for value in values]
            kernel.__name__, kernel.__doc__ = (
                "_".join([function.__name__, *words]),
                function.__doc__,
            )
            plain = {dtype: PLAIN_PRECISIONS[dtype] for dtype in dtypes or ["float32"]}
            FAMILIES.append(HonestKernel(kernel, precisions or plain, supports_gqa))
        return function

    return add


# The order of the work


@family(tile=(16, 32, 48, 64, 128), base=("e", "two"), order=("forwards", "backwards"))
def online(q, k, v, scale, hidden, tile, base, order):
    """An online softmax over tiles of keys."""
    exp = torch.exp if base == "e" else torch.exp2
    factor = scale if base == "e" else scale * honest.LOG2_E
    row_max = torch.full_like(q[..., :1], honest.LOWEST)
    row_sum, o = torch.zeros_like(row_max), torch.zeros_like(q)
    everything, parts = masked_scores(q, k, factor, hidden), tiles(k.shape[2], tile)
    for part in parts if order == "forwards" else reversed(parts):
        scores = everything[..., part]
        before, row_max = row_max, torch.maximum(row_max, honest.largest(scores))
        alpha, weights = exp(before - row_max), exp(scores - row_max)
        row_sum, o = (
            alpha * row_sum + weights.sum(3, keepdim=True),
            alpha * o + weights @ v[:, :, part],
        )
    return o / row_sum


@family("float32", "float64", parts=(2, 3, 5, 8), keys=("in_turn", "interleaved"))
def split(q, k, v, scale, hidden, parts, keys):
    """The keys are split, and a last step joins the parts."""
    everything = torch.arange(k.shape[2])
    parts = min(parts, k.shape[2])
    chosen = (
        everything.chunk(parts)
        if keys == "in_turn"
        else [everything[i::parts] for i in range(parts)]
    )
    return honest.divided(functools.reduce(honest.merge, partials(q, k, v, scale, hidden, chosen)))


@family("float32", "float16", "bfloat16", rows=(1, 16, 100))
def queries_in_chunks(q, k, v, scale, hidden, rows):
    """The queries come in chunks, each with its rows of the mask."""
    found = [
        honest.stable_weights(q[:, :, part].float(), k.float(), scale, hidden[part])
        for part in tiles(q.shape[2], rows)
    ]
    weights = torch.cat(found, 2)
    return (weights @ v.float() / weights.sum(3, keepdim=True)).to(q.dtype)


@family(tile=(16, 64))
def two_passes(q, k, v, scale, hidden, tile):
    """The first pass finds row_max and row_sum, the second computes the scores again."""
    parts = partials(q, k, v[..., :0], scale, hidden, tiles(k.shape[2], tile))
    row_max, row_sum, _ = functools.reduce(honest.merge, parts)
    weights, o = (masked_scores(q, k, scale, hidden) - row_max).exp() / row_sum, torch.zeros_like(q)
    for part in tiles(k.shape[2], tile):
        o += weights[..., part] @ v[:, :, part]
    return o


@family(how=("einsum", "bmm", "heads", "batch", "numpy", "threads"))
def products(q, k, v, scale, hidden, how):
    """One of the ways to write the two products."""
    if how in ("heads", "batch"):
        dim = 1 if how == "heads" else 0
        each = zip(*(x.split(1, dim) for x in (q, k, v)), strict=True)
        return torch.cat(
            [masked_scores(*x[:2], scale, hidden).softmax(3) @ x[2] for x in each], dim
        )
    if how == "threads":
        with ThreadPoolExecutor(3) as pool:
            each = [x.split(1, 1) for x in (q, k, v)]
            of_head = functools.partial(products, scale=scale, hidden=hidden, how="bmm")
            return torch.cat([*pool.map(of_head, *each)], 1)
    if how == "einsum":
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
        return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(hidden, -torch.inf).softmax(3), v)
    if how == "numpy":
        scores = torch.from_numpy(q.numpy() @ k.mT.numpy()) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(3)
        return torch.from_numpy(weights.numpy() @ v.numpy())
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    scores = torch.bmm(flat[0], flat[1].mT) * scale
    return torch.bmm(scores.masked_fill(hidden, -torch.inf).softmax(2), flat[2]).view(q.shape)


# The softmax


@family("float32", "float64", on=("q", "k", "both", "scores"))
def scales(q, k, v, scale, hidden, on):
    """The scale multiplies one of the factors, or its root both."""
    root = abs(scale) ** 0.5
    q = q * {"q": scale, "both": root if scale >= 0 else -root}.get(on, 1.0)
    k = k * {"k": scale, "both": root}.get(on, 1.0)
    weights = honest.stable_weights(q, k, scale if on == "scores" else 1.0, hidden)
    return weights @ v / weights.sum(3, keepdim=True)


@family(by=("where", "bias", "weights", "rows"))
def masks(q, k, v, scale, hidden, by):
    """The mask replaces scores, is added to them, multiplies weights, or shortens rows."""
    scores = q @ k.mT * scale
    if by == "rows":
        seen = (~hidden).sum(1).tolist()
        rows = [scores[:, :, i, None, :n].softmax(3) @ v[:, :, :n] for i, n in enumerate(seen)]
        return torch.cat(rows, 2)
    if by == "where":
        scores = torch.where(hidden, torch.tensor(-torch.inf), scores)
    elif by == "bias":
        scores = scores + torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    else:
        row_max = scores.masked_fill(hidden, -torch.inf).amax(3, keepdim=True)
        weights = (scores - row_max).clamp(max=0).exp() * ~hidden
        return weights @ v / weights.sum(3, keepdim=True)
    return scores.softmax(3) @ v


@family("float32", "float64", when=("before", "after", "by_reciprocal", "in_place"))
def normalizes(q, k, v, scale, hidden, when):
    """The weights are divided by their sum, the output is, or is multiplied by its reciprocal."""
    weights = honest.stable_weights(q, k, scale, hidden)
    row_sum = weights.sum(3, keepdim=True)
    if when == "by_reciprocal":
        return weights @ v * row_sum.reciprocal()
    if when == "after":
        return (weights @ v).div_(row_sum)
    return (weights / row_sum if when == "before" else weights.div_(row_sum)) @ v


@family(of=("scores", "output", "both"))
def sums_in_double(q, k, v, scale, hidden, of):
    """One or both of the products are summed in float64."""
    q, k = (x.double() if of != "output" else x for x in (q, k))
    weights = honest.stable_weights(q, k, scale, hidden)
    weights, v = (x.double() if of != "scores" else x.float() for x in (weights, v))
    return (weights @ v / weights.sum(3, keepdim=True)).float()


# Precision


@family("float16", "bfloat16", tile=(16, 64, 128))
def rounds_the_weights(q, k, v, scale, hidden, tile):
    """The weights of a tile are rounded to the dtype of v, as on tensor cores."""
    row_max = torch.full_like(q[..., :1], honest.LOWEST, dtype=torch.float32)
    row_sum, o = torch.zeros_like(row_max), torch.zeros(q.shape)
    everything = masked_scores(q.float(), k.float(), scale, hidden)
    for part in tiles(k.shape[2], tile):
        scores = everything[..., part]
        before, row_max = row_max, torch.maximum(row_max, honest.largest(scores))
        alpha, weights = (before - row_max).exp(), (scores - row_max).exp()
        row_sum = alpha * row_sum + weights.sum(3, keepdim=True)
        o = alpha * o + weights.to(v.dtype).float() @ v[:, :, part].float()
    return (o / row_sum).to(q.dtype)


@family("float16", "bfloat16", weights=("float32", "float64"))
def rounds_the_output_only(q, k, v, scale, hidden, weights):
    """Everything but the output is in a wider dtype."""
    q, k, wide = (x.to(getattr(torch, weights)) for x in (q, k, v))
    return (masked_scores(q, k, scale, hidden).softmax(3) @ wide).to(v.dtype)


@family(precisions={"float32": "3xtf32"}, count=(3,), rounded=(honest.to_tf32,))
@family(precisions={"float32": "tf32"}, count=(2, 3), rounded=(honest.to_tf32, honest.to_bf16))
def terms_of(q, k, v, scale, hidden, count, rounded):
    """A few terms of fewer bits, in a class that allows for what they lose."""
    return honest.by_terms(q, k, v, scale, hidden, count, rounded)


# State, and what others compute


@functools.cache
def scratch(*shape):
    return torch.empty(shape)


@functools.cache
def compiled():
    def attention(q, k, v, scale, hidden):
        return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(3) @ v

    return torch.compile(attention, backend="aot_eager", dynamic=True)


@functools.cache
def tile_for(length):
    return 16 if length < 50 else 64


@family(what=("scratch", "tile_by_shape", "warm_up", "compiled"))
def keeps(q, k, v, scale, hidden, what):
    """Something that holds no number of a call is kept between calls."""
    if what == "compiled":
        return compiled()(q, k, v, scale, hidden)
    if what == "tile_by_shape":
        return online(q, k, v, scale, hidden, tile_for(k.shape[2]), "e", "forwards")
    if what == "warm_up" and not scratch.cache_info().currsize:
        honest.stable_weights(q, k, scale, hidden)
    scores = torch.matmul(q, k.mT, out=scratch(*q.shape[:3], k.shape[2]))
    return scores.mul_(scale).masked_fill_(hidden, -torch.inf).softmax(3) @ v


@family("float32", "float16", "bfloat16", mask=("bool", "bias", "math"))
def library(q, k, v, scale, hidden, mask):
    """PyTorch's own function, with a mask of either kind, or its plain version."""
    bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    context = sdpa_kernel(SDPBackend.MATH) if mask == "math" else contextlib.nullcontext()
    with context:
        attn_mask = bias if mask == "bias" else ~hidden
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale)


@family(supports_gqa=True, how=("repeat", "fold"))
def grouped(q, k, v, scale, hidden, how):
    """Query heads share key heads, which are repeated; or the queries of a group are rows."""
    group = q.shape[1] // k.shape[1]
    if how == "repeat":
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return masked_scores(q, k, scale, hidden).softmax(3) @ v
    rows = q.unflatten(1, (-1, group)).flatten(2, 3)
    return (masked_scores(rows, k, scale, hidden.repeat(group, 1)).softmax(3) @ v).view(q.shape)


by_family: dict[str, list[str]] = {}
for spec in list_backends():
    by_family.setdefault(spec.family, []).append(spec.name)
SHIPPED = [name for names in by_family.values() for name in names[::4]]
ALL = {kernel.name.upper(): kernel.spec() for kernel in (*honest.HONEST, *FAMILIES)}


@pytest.mark.parametrize("name", [*ALL])
def test_an_honest_kernel_is_no_false_alarm(name, record_property):
    judge(ALL[name], "cpu", record_property)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_kernel_is_no_false_alarm(name, device, record_property):
    spec = next(spec for spec in list_backends() if spec.name == name)
    if reason := spec.unavailable_reason(device):
        pytest.skip(reason)
    judge(name, device, record_property)


@functools.cache
def drawn():
    """Return cases of every head_dim and dtype; all kernels take theirs from the same shapes."""
    dtypes = torch.float32, torch.float16, torch.bfloat16, torch.float64
    options = {"is_emulated": True, "has_groups": True, "is_aligned": True}
    ops = ("attention", "decode")
    found = [cases.ordered_cases(op, cases.ANY_HEAD_DIM, dtypes, 1, **options) for op in ops]
    return [case for case, _ in itertools.chain(*found) if case.scale < 1e3]


def judge(what, device, record_property):
    """Run a sample of the suite's cases, those that show leaks, and repeated calls."""
    name = what if isinstance(what, str) else what.name
    draw, alarms = random.Random(name), []
    with contextlib.closing(open_runner(what, device)) as runner:
        spec, dtypes = runner.spec, [getattr(torch, dtype) for dtype in runner.spec.dtypes]
        most, count, calls = LIMITS[runner.is_emulated]
        largest_scale = honest.LARGEST_TF32_SCALE if "tf32" in spec.precisions.values() else 1e3
        head_dims = spec.head_dims or cases.ANY_HEAD_DIM
        has = {"attention": runner.has_attention, "decode": runner.has_decode}
        small = [
            dataclasses.replace(case, seed=draw.randrange(2**31))
            for case in drawn()
            if has[case.op] and case.dtype in dtypes and case.head_dim in head_dims
            if case.work <= most and case.scale <= largest_scale
            if case.group == 1 or spec.supports_gqa
        ]
        checks = [
            (case, judged(runner, case)) for case in draw.sample(small, min(count, len(small)))
        ]
        for dtype in dtypes if runner.has_attention else ():
            one, two = (
                Case(n, head_dims[0], dtype=dtype, seed=draw.randrange(99)) for n in (33, 70)
            )
            checks += [
                ("leaks", leaks(runner, two, [41])),
                ("calls", repeat(runner, [one, two], calls)),
            ]
        for case, steps in checks:
            with contextlib.suppress(UnsupportedError):
                verdict = run_check(runner, steps)
                if verdict is not None and not (isinstance(verdict, Verdict) and verdict.passed):
                    alarms.append(f"{case}: {verdict}")
    record_property("fate", "; ".join(alarms) or "passed")
    assert not alarms
