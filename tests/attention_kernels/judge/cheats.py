"""Kernels that cheat, each in a way of its own: no judge may pass one or time it as right.

This is the table's notation and its rows in Python; cuda_cheats.py has those in CUDA. A row has a
name, its cause in a sentence, a source and the words that catch it: a regular expression that the
first failure must match, or the clock's objection. To add one, decorate

    @cheat("error")
    def name(q, k, v, scale, causal): ...       a kernel, or, with op="decode", a decode kernel
    @cheat("a later call changed")
    def name(): ...                             a function that makes a kernel which keeps state

Rows by the clock are right when nobody times them, or say something of the worker; they run as a
plug-in. A row that is wrong only in large or rare cases, or in repeated calls only, says so, and no
other cases run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import inspect
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from attention_kernels import BackendSpec, UnsupportedError, get_backend
from attention_kernels.contract import Kernels, per_query_head
from attention_kernels.judge.truth import naive_attention as right


@dataclasses.dataclass(frozen=True)
class Cheat:
    name: str
    cause: str
    caught: str
    """A regular expression; "passed" for what does no harm."""
    by: Literal["verify", "clock", "rivals"] = "verify"
    """"rivals": by what it may do while they are timed."""
    on: tuple[str, ...] = ("cpu",)
    """The devices on which it is tried."""
    make: Callable[[], Kernels] = Kernels
    """In Python: what makes the kernels."""
    source: str = ""
    """In CUDA: the version file."""
    wrong: Callable[[Any], bool] = lambda _: True
    """Whether it is wrong in a case."""
    timeout_s: float = 60.0
    """The limit of a request."""
    slow: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields of its spec, if it is in Python."""

    def spec(self, **fields: Any) -> BackendSpec:
        defaults = {"precisions": {"float32": "ieee-fp32"}, "head_dims": (32,)}
        return BackendSpec(
            name=self.name.upper(),
            family="cheats",
            summary="A backend that cheats.",
            loader=self.make,
            **(defaults | self.fields | fields),
        )


CHEATS: list[Cheat] = []


def cheat(
    caught: str,
    *,
    by: Literal["verify", "clock", "rivals"] = "verify",
    op: str = "attention",
    wrong: Callable[[Any], bool] = lambda _: True,
    slow: bool = False,
    on: tuple[str, ...] = (),
    **fields: Any,
) -> Callable[[Any], Any]:
    """Add a row. on: by the clock, both devices; else the CPU, if nothing else is said."""

    def add(function: Any) -> Any:
        def make() -> Kernels:
            kernel = function if inspect.signature(function).parameters else function()
            return Kernels(right, kernel) if op == "decode" else Kernels(kernel)

        devices = on or (("cpu", "cuda") if by == "clock" else ("cpu",))
        row = Cheat(function.__name__, inspect.getdoc(function) or "", caught, by, devices, make)
        CHEATS.append(dataclasses.replace(row, wrong=wrong, slow=slow, fields=fields))
        return function

    return add


def right_decode(*arguments):
    return get_backend("NAIVE_PYTORCH").load().decode(*arguments)


# Inputs and outputs


@cheat("it changed its input v")
def zeroes_v_and_returns_zeros(q, k, v, scale, causal):
    """It changes an input so that a wrong output would be right."""
    v.zero_()
    return torch.zeros(q.shape)


@cheat("it changed its input k")  # which lies before it in the same memory
def writes_beside_v(q, k, v, scale, causal):
    """It writes into the memory between two inputs."""
    o = right(q, k, v, scale, causal)
    if v.storage_offset():
        v.as_strided((1,), (1,), v.storage_offset() - 1).zero_()
    return o


@cheat("the memory of (its|an) input|instead of a contiguous")
def returns_v_itself(q, k, v, scale, causal):
    """Its output is an input."""
    return v if q.shape[1] == 1 else right(q, k, v, scale, causal)


@cheat("it returned Lazy instead of", by="clock")
def is_lazy(q, k, v, scale, causal):
    """Its output could compute its numbers when somebody looks at them."""

    class Lazy(torch.Tensor):
        pass

    return right(q, k, v, scale, causal).as_subclass(Lazy)


@cheat("batch 3 is too much")
def raises_for_a_batch(q, k, v, scale, causal):
    """It fails with an exception."""
    if q.shape[0] == 3:
        raise RuntimeError("batch 3 is too much")
    return right(q, k, v, scale, causal)


@cheat("seqlen (4[0-9]|5[0-9])")
def refuses_two_lengths_and_is_wrong_at_others(q, k, v, scale, causal):
    """It refuses similar cases before the one that it gets wrong."""
    if q.shape[1] in (5, 6):
        raise UnsupportedError("IT", ["5 or 6 tokens"])
    return right(q, k, v, scale, causal) * (1.001 if 40 <= q.shape[1] < 60 else 1)


# Masks and lengths


@cheat("change earlier rows")
def sees_one_key_too_many(q, k, v, scale, causal):
    """Its mask is off by one."""
    o = right(q, k, v, scale, causal)
    return torch.cat([o[:, 1:], o[:, -1:]], 1)


@cheat("error")
def sees_one_key_too_few(q, k, v, scale, causal):
    """Its mask is off by one, the other way."""
    o = right(q, k, v, scale, causal)
    return torch.cat([o[:, :1], o[:, :-1]], 1)


@cheat("change earlier rows")
def leaks_future_values_except_at_100(q, k, v, scale, causal):
    """A later value changes every row, within the budget; it knows the lengths of an old check."""
    o = right(q, k, v, scale, causal)
    return o if q.shape[1] in (100, 1500) else o + 1e-7 * v.mean(1, keepdim=True)


@cheat("change earlier rows")
def leaks_future_keys(q, k, v, scale, causal):
    """A later key changes every row, within the budget."""
    o = right(q, k, v, scale, causal)
    return o + 1e-7 * k.mean(1, keepdim=True)


@cheat("full")
def is_always_causal(q, k, v, scale, causal):
    """It has no full attention."""
    return right(q, k, v, scale, True)


@cheat("error")
def knows_the_lengths_of_an_old_suite(q, k, v, scale, causal):
    """It works for lengths that somebody is likely to test."""
    known = 1, 2, 16, 32, 33, 64, 100, 128, 256, 512, 1024, 1500, 4096
    return right(q, k, v, scale, causal) * (q.shape[1] in known)


@cheat("seqlen (1|49|97)")
def is_wrong_for_a_remainder_of_48(q, k, v, scale, causal):
    """It is wrong at one remainder of a tile."""
    o = right(q, k, v, scale, causal)
    return o * 1.001 if q.shape[1] % 48 == 1 and q.shape[1] > 1 else o


@cheat(r"batch ([2-9]|\d\d)", wrong=lambda c: c.batch > 1 and c.seqlen > 900, slow=True)
def is_wrong_for_long_batches(q, k, v, scale, causal):
    """It is wrong in one row of a batch of long sequences."""
    o = right(q, k, v, scale, causal)
    if q.shape[0] > 1 and q.shape[1] > 900:
        o[-1, -1] *= 1.01
    return o


@cheat("by row", wrong=lambda c: c.seqlen > 300, slow=True)
def drifts_with_the_length(q, k, v, scale, causal):
    """Its error grows with the length, as that of a sum that truncates does."""
    n = q.shape[1]
    rows = torch.arange(1, n + 1)[:, None, None] if causal else n
    return right(q, k, v, scale, causal) * (1 - 8e-9 * rows)


# Layouts


@cheat("layout")
def takes_k_to_lie_as_q(q, k, v, scale, causal):
    """It takes the strides of one input for those of another."""
    if k.storage_offset() + sum(a * (n - 1) for a, n in zip(q.stride(), q.shape, strict=True)) < (
        k.untyped_storage().nbytes() // 4
    ):
        k = k.as_strided(q.shape, q.stride(), k.storage_offset())
    return right(q, k, v, scale, causal)


@cheat("layout")
def ignores_the_storage_offset(q, k, v, scale, causal):
    """It takes an input to begin where its memory does."""
    if q.stride(2) != q.shape[3]:
        q = q.as_strided(q.shape, q.stride(), 0)
    return right(q, k, v, scale, causal)


@cheat("layout")
def reads_past_the_rows(q, k, v, scale, causal):
    """It reads memory between rows and multiplies it by 0."""
    past = v.as_strided((1,), (1,), v.storage_offset() - 1) if v.storage_offset() else v.flatten()
    return right(q, k, v, scale, causal) + 0 * past[0]


@cheat("one (head|row).* layout")
def is_wrong_for_a_stride_of_0(q, k, v, scale, causal):
    """It is wrong where one head or row of memory serves for all."""
    strides = [s for n, s in zip(k.shape, k.stride(), strict=True) if n > 1]
    return right(q, k, v, scale, causal) * (1.001 if 0 in strides else 1)


@cheat("k is q layout")
def takes_q_and_k_to_be_two_tensors(q, k, v, scale, causal):
    """It is wrong where two inputs are one tensor."""
    return right(q, k, v, scale, causal) * (1 if q.data_ptr() != k.data_ptr() else 1.001)


# Shapes and scales


@cheat(r"[48] queries", supports_gqa=True)
def is_wrong_for_four_and_eight_queries_per_key_head(q, k, v, scale, causal):
    """It is wrong for some numbers of query heads per key head."""
    o = right(q, *per_query_head(q, k, v), scale, causal)
    return o * 1.001 if q.shape[2] // k.shape[2] in (4, 8) else o


@cheat("queries", supports_gqa=True)
def takes_every_second_key_head(q, k, v, scale, causal):
    """It gives a query head another one's key head."""
    k, v = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))
    return right(q, k, v, scale, causal)


@cheat("softmax_scale 0.0")
def takes_a_scale_of_zero_for_none(q, k, v, scale, causal):
    """It takes a softmax_scale of 0 for none."""
    return right(q, k, v, scale or None, causal)


@cheat("softmax_scale -")
def takes_the_scale_to_be_positive(q, k, v, scale, causal):
    """It ignores the sign of softmax_scale."""
    return right(q, k, v, abs(scale), causal)


@cheat("in batches 4 to|in batch 4")
def is_wrong_from_the_fifth_of_a_batch(q, k, v, scale, causal):
    """It repeats the first results of a batch."""
    o = right(q, k, v, scale, causal)
    o[4:] = o[:1]
    return o


# Numbers


def weighted(q, k, v, scale, causal, weigh):
    """Attention with weights that `weigh` makes from the scores, -inf where a key is hidden."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    weights = weigh(scores)
    o = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(3, keepdim=True), v)
    return o.contiguous()


def below(scores):
    return scores - scores.amax(3, keepdim=True)


@cheat("error")
def is_wrong_between_the_usual_scales(q, k, v, scale, causal):
    """It is right for the sizes of numbers that somebody is likely to test."""
    size = q.std() if q.numel() > 99 else 1
    return right(q, k, v, scale, causal) * (1.001 if 0.3 < size < 0.7 or 2 < size < 6 else 1)


@cheat("error")
def works_in_tf32(q, k, v, scale, causal):
    """Its inputs are rounded to a coarser precision than it declares."""
    q, k, v = ((x.contiguous().view(torch.int32) & -8192).view(torch.float32) for x in (q, k, v))
    return right(q, k, v, scale, causal)


@cheat("error")
def rounds_the_weights_of_long_calls_to_half(q, k, v, scale, causal):
    """Its weights are rounded to a coarser precision, for large shapes only."""
    if q.shape[1] <= 64:
        return right(q, k, v, scale, causal)
    return weighted(q, k, v, scale, causal, lambda x: below(x).exp().half().float())


@cheat("not finite")
def forgets_the_maximum(q, k, v, scale, causal):
    """Its exponential overflows."""
    return weighted(q, k, v, scale, causal, torch.exp)


@cheat("error")
def clamps_the_scores(q, k, v, scale, causal):
    """It cuts off large scores, so that nothing overflows."""
    return weighted(q, k, v, scale, causal, lambda x: x.clamp(max=60).softmax(3))


@cheat("error")
def adds_to_the_row_sum(q, k, v, scale, causal):
    """All of its numbers are too small by a few millionths."""
    return right(q, k, v, scale, causal) / (1 + 3e-6)


@cheat("error")
def skips_keys_of_low_scores(q, k, v, scale, causal):
    """It leaves out keys that count little."""
    return weighted(q, k, v, scale, causal, lambda x: below(x).exp() * (below(x) > -10))


@cheat("error")
def has_a_rough_exponential(q, k, v, scale, causal):
    """Its exponential is an approximation."""
    return weighted(q, k, v, scale, causal, lambda x: (1 + below(x) / 4096).clamp(min=0) ** 4096)


@cheat("error")
def sees_the_last_64_keys_only(q, k, v, scale, causal):
    """It leaves out keys that are far away."""
    if not causal:
        return right(q, k, v, scale, False)
    return weighted(q, k, v, scale, causal, lambda x: below(x).exp().triu(-63))


@cheat(r"scale 0\.0\d")
def takes_small_scores_to_be_equal(q, k, v, scale, causal):
    """It averages the values where the softmax is nearly flat."""
    return right(q * 0 if q.abs().max() < 0.2 else q, k, v, scale, causal)


@cheat("tiny|alternating")
def flushes_small_values(q, k, v, scale, causal):
    """It takes tiny values for 0."""
    return right(q, k, v.where(v.abs() > 1e-20, 0), scale, causal)


@cheat("equal", wrong=lambda c: c.kind == "equal", slow=True)
def takes_the_first_of_equal_scores(q, k, v, scale, causal):
    """It takes the first of several largest scores for the only one."""
    if q.shape[1] > 1 and (k == k[:, :1]).all():
        return v[:, :1].expand(v.shape).contiguous()
    return right(q, k, v, scale, causal)


@cheat("zero rows")
def takes_a_key_of_zeros_for_padding(q, k, v, scale, causal):
    """It takes a key of zeros for padding."""
    return right(q, k, v, scale, causal) * (0 if (k == 0).all(3).any() else 1)


@cheat("tiny scores")
def takes_tiny_q_for_nothing(q, k, v, scale, causal):
    """It takes a tiny query for padding."""
    return right(q, k, v, scale, causal) * (0 if q.abs().max() < 1e-6 else 1)


@cheat("not finite")
def writes_nan_into_the_last_of_a_tile(q, k, v, scale, causal):
    """Some of its numbers are NaN, which compares as neither larger nor smaller."""
    o = right(q, k, v, scale, causal)
    o[:, 31::32, -1] = torch.nan
    return o


# State, memory, threads and settings


@cheat("not finite|two runs|error")
def leaves_rows_unwritten(q, k, v, scale, causal):
    """It leaves a part of the output as it was."""
    o = torch.empty(q.shape)
    full = right(q, k, v, scale, causal)
    o[:, : q.shape[1] // 32 * 32] = full[:, : q.shape[1] // 32 * 32]
    return o


# Another seed misses it with probability 0.999^5000.
@cheat("call .* of 5000", wrong=lambda c: False, slow=True)
def leaves_the_last_row_once_in_a_thousand_calls():
    """It is wrong at random, rarely."""
    draw = random.Random(0)

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        if draw.random() < 1e-3:
            o[:, -1] = torch.nan
        return o

    return kernel


@cheat("call|error", wrong=lambda c: False)
def returns_its_first_answer_again():
    """It keeps results by shape."""
    answers: dict[Any, torch.Tensor] = {}

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        return answers.setdefault((q.shape, scale, causal), o).clone()

    return kernel


@cheat("error", wrong=lambda c: False)
def answers_by_the_contents_of_q():
    """It keeps results by the contents of one input."""
    answers = {}

    def kernel(q, k, v, scale, causal):
        key = q.shape, q.contiguous().numpy().tobytes(), scale, causal
        if key not in answers:
            answers[key] = right(q, k, v, scale, causal)
        return answers[key].clone()

    return kernel


@cheat("calls", wrong=lambda c: False, slow=True)
def answers_by_address():
    """It keeps results by address, from the hundredth call on."""
    answers: dict[Any, torch.Tensor] = {}
    counts: Counter[Any] = Counter()

    def kernel(q, k, v, scale, causal):
        key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
        counts[key] += 1
        o = right(q, k, v, scale, causal)
        return o if counts[key] < 100 else answers.setdefault(key, o).clone()

    return kernel


@cheat("a later call changed an output", wrong=lambda c: False, slow=True)
def has_one_buffer_except_at_33_and_80():
    """All of its outputs are one tensor; it knows the lengths of an old check."""
    buffers: dict[Any, torch.Tensor] = {}

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        return o if q.shape[1] in (33, 80) else buffers.setdefault(q.shape, o.clone()).copy_(o)

    return kernel


@cheat("calls|error")
def keeps_what_a_longer_call_left():
    """Its scratch is cleared when it grows, and not again."""
    scratch = [torch.zeros(0)]

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        if scratch[0].numel() > o.numel():
            return o + 1e-4 * scratch[0][: o.numel()].view(o.shape)
        scratch[0] = o.flatten().clone()
        return o

    return kernel


@cheat("it changed torch's float32 matmul precision")
def makes_plain_pytorch_worse(q, k, v, scale, causal):
    """It makes the measure of errors coarser."""
    torch.set_float32_matmul_precision("medium")
    return right(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale, causal).float()


@cheat("1 thread,|error")  # the tests may run with one thread throughout
def needs_more_than_one_thread(q, k, v, scale, causal):
    """It is wrong with one thread."""
    return right(q, k, v, scale, causal) * (1 if torch.get_num_threads() > 1 else 1.001)


@cheat("5 threads", wrong=lambda c: False, slow=True)
def is_wrong_with_many_threads(q, k, v, scale, causal):
    """It is wrong with many threads."""
    return right(q, k, v, scale, causal) * (1.001 if torch.get_num_threads() > 4 else 1)


@cheat("error", wrong=lambda c: c.context == "inference_mode", slow=True, on=("cpu", "cuda"))
def is_wrong_in_inference_mode(q, k, v, scale, causal):
    """It is wrong in inference mode."""
    return right(q, k, v, scale, causal) * (1.001 if torch.is_inference_mode_enabled() else 1)


@cheat("error")
def is_wrong_without_gradients(q, *others):
    """It is wrong under torch.no_grad(), which is not inference mode."""
    return right_if(torch.is_grad_enabled() or torch.is_inference_mode_enabled(), q, *others)


@cheat("error|not finite|two runs|change earlier rows", on=("cuda",), cuda_graphs=False)
def ignores_the_callers_stream(q, k, v, scale, causal):
    """It works on the default stream, whichever the caller's is."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return right(q, k, v, scale, causal)


@cheat("error", on=("cuda",))
def is_wrong_in_a_graph_of_another_shape(q, *others):
    """It is wrong in a CUDA graph, except for the shape that is timed."""
    is_timed_shape = q.shape[1:3] == (1024, 12)
    return right_if(is_timed_shape or not torch.cuda.is_current_stream_capturing(), q, *others)


# Decode


@cheat("decode", op="decode", slow=True)
def decode_takes_the_longest_for_all(q, k, v, seqlens, scale):
    """It takes all rows of the cache to be as long as the longest."""
    return right_decode(q, k, v, torch.full_like(seqlens, int(seqlens.max())), scale)


@cheat("decode.*softmax_scale", op="decode")
def decode_ignores_the_scale(q, k, v, seqlens, scale):
    """It ignores softmax_scale."""
    return right_decode(q, k, v, seqlens, q.shape[3] ** -0.5)


@cheat("decode.*129", op="decode")
def decode_forgets_the_first_key_of_a_split(q, k, v, seqlens, scale):
    """It is wrong at one length."""
    return right_decode(q, k, v, seqlens - (seqlens == 129).int(), scale)


@cheat("it changed its input seqlens", op="decode")
def decode_counts_up_the_lengths(q, k, v, seqlens, scale):
    """It changes the lengths."""
    o = right_decode(q, k, v, seqlens, scale)
    seqlens += 1
    return o


@cheat("it changed its input k_cache", op="decode", slow=True)
def decode_clears_the_cache_past_the_lengths(q, k, v, seqlens, scale):
    """It changes a part of the cache that no row uses."""
    o = right_decode(q, k, v, seqlens, scale)
    for row, length in enumerate(seqlens.tolist()):
        k[row, length:] = 0
    return o


@cheat("decode.*layout", op="decode")
def decode_takes_the_cache_to_be_contiguous(q, k, v, seqlens, scale):
    """It takes the cache to be contiguous."""
    return right_decode(q, k.as_strided(k.shape, k[:].contiguous().stride()), v, seqlens, scale)


@cheat("error", op="decode", wrong=lambda c: c.op == "decode" and room(c) >= 64)
def decode_is_wrong_in_a_roomy_cache(q, k, v, seqlens, scale):
    """It is wrong if a cache has many rows past its longest sequence, as when it is made once."""
    o = right_decode(q, k, v, seqlens, scale)
    return o * 1.001 if k.shape[1] - int(seqlens.max()) >= 64 else o


def room(case):
    return case.max_seqlen - max(case.lengths)


@cheat("^rows changed", op="decode", wrong=lambda c: False, slow=True)
def decode_copies_only_the_new_rows():
    """It keeps a copy of the cache, to which it adds a row of each if all have grown by one."""
    kept = {}

    def kernel(q, k, v, seqlens, scale):
        key, at = (k.data_ptr(), k.shape), (torch.arange(len(k)), seqlens.long() - 1)
        lengths, *copies = kept.get(key, (seqlens, k, v))
        if torch.equal(lengths + 1, seqlens):
            for copy, cache in zip(copies, (k, v), strict=True):
                copy[at] = cache[at]
        else:
            copies = [k.clone(), v.clone()]
        kept.clear()
        kept[key] = seqlens.clone(), *copies
        return right_decode(q, *copies, seqlens, scale)

    return kernel


@cheat("error", op="decode", on=("cuda",))
def decode_is_wrong_in_a_graph(q, k, v, seqlens, scale):
    """It is wrong in a CUDA graph."""
    o = right(q, k, v, scale, False, seqlens)
    return o * 1.001 if torch.cuda.is_current_stream_capturing() else o


# What cases have in common


def right_if(is_right, q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o if is_right else o * 1.001


@cheat("error|two runs", slow=True)  # of a check for leaks
def knows_the_first_number():
    """It is wrong in calls of more than 260 tokens whose first number it has not seen."""
    seen = {1.0}  # that of equal numbers

    def kernel(q, *others):
        sign = round(float(q[0, 0, 0, 0] / q[0, 0, 0, 1]), 3)
        is_right = q.shape[1] <= 260 or sign in seen
        seen.add(sign)
        return right_if(is_right, q, *others)

    return kernel


@cheat("error|two runs", slow=True)  # of a check for leaks
def knows_the_sum_of_the_first_row():
    """The same by a sum, which no scale or layout changes."""
    seen = {1.0}

    def kernel(q, *others):
        row = q[0, 0, 0]
        sign = round(float(row.sum() / row.abs().sum()), 3)
        is_right = q.shape[1] <= 260 or sign in seen
        seen.add(sign)
        return right_if(is_right, q, *others)

    return kernel


def kept_by(key):
    """Return a kernel that keeps its results by a key, which it makes of its arguments."""
    memo: dict[Any, torch.Tensor] = {}

    def kernel(*arguments):
        found = key(*arguments)
        if found not in memo:
            memo[found] = right(*arguments)
        return memo[found].clone()

    return kernel


@cheat("pairs of", wrong=lambda c: 260 < c.seqlen < 400, slow=True)
def keeps_long_results_by_address_and_shape():
    """It returns an earlier result of the same shape at the same addresses, if it is long."""

    def key(q, k, v, scale, causal):
        return q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(), k.stride(), q.shape, causal

    def kernel(q, *others):  # longer calls are repeated by a check for leaks
        return (keeping if 260 < q.shape[1] < 1000 else right)(q, *others)

    keeping = kept_by(key)
    return kernel


@cheat("^rows changed", wrong=lambda c: False)
def knows_the_first_token():
    """It returns the earlier result of a call with the same shape and the same first row."""

    def key(q, k, v, scale, causal):
        return q.shape, scale, causal, *(x[:, 0].numpy().tobytes() for x in (q, k, v))

    return kept_by(key)


# Calls of a model whose sizes a suite may leave out


@cheat("error", wrong=lambda c: c.num_heads >= 5 and c.seqlen > 700, head_dims=(64,), slow=True)
def is_wrong_for_gpt2_past_700_tokens(q, *others):
    """It is wrong in calls that cost more than a suite likes to spend: GPT-2 near its context."""
    return right_if(q.shape[2] < 5 or q.shape[1] <= 700, q, *others)


@cheat(
    "error",
    wrong=lambda c: c.num_heads >= 5 and 700 < c.seqlen < 1024,
    on=("cuda",),
    head_dims=(64,),
)
def is_wrong_for_gpt2_except_at_its_context(q, *others):
    """The same, but right at the length that is timed."""
    return right_if(q.shape[2] < 5 or not 700 < q.shape[1] < 1024, q, *others)


@cheat("error", wrong=lambda c: c.seqlen in (512, 768, 1024), head_dims=(64,), slow=True)
def is_wrong_at_multiples_of_256(q, *others):
    """It is wrong at some long whole tiles, one of which is GPT-2's context."""
    return right_if(q.shape[1] not in (512, 768, 1024), q, *others)


@cheat("error", wrong=lambda c: c.batch in (96, 192, 256), head_dims=(64,), slow=True)
def is_wrong_for_large_batches(q, *others):
    """It is wrong for some large batches."""
    return right_if(q.shape[0] not in (96, 192, 256), q, *others)


@cheat(
    "error",
    wrong=lambda c: c.is_causal and c.batch == 1 and c.num_heads == 12 and 258 <= c.seqlen <= 512,
    head_dims=(64,),
    slow=True,
)
def is_wrong_for_gpt2s_usual_prompt(q, k, v, scale, causal):
    """It is wrong for one causal prompt of 258 to 512 tokens with 12 heads."""
    is_usual = causal and q.shape[0] == 1 and q.shape[2] == 12 and 258 <= q.shape[1] <= 512
    return right_if(not is_usual, q, k, v, scale, causal)


# What it says of itself


@cheat("error", wrong=lambda c: c.seqlen > 1025, emulated_on=("cpu",), slow=True)
def says_that_it_is_emulated(q, k, v, scale, causal):
    """It is wrong above the lengths that are tried in the emulator."""
    return right_if(q.shape[1] <= 1025, q, k, v, scale, causal)


@cheat("call [0-9]{3,} of 5000|a later call", emulated_on=("cpu",), slow=True)
def says_that_it_is_emulated_and_is_wrong_late():
    """It is wrong once in a hundred small calls with the same shape."""
    calls = Counter()

    def kernel(q, *others):
        shape = tuple(q.shape)
        calls[shape] += 1
        return right_if(q.shape[1] > 160 or calls[shape] % 100 != 99, q, *others)

    return kernel


@cheat("error", compiles_per_shape_on=("cpu",), slow=True)
def says_that_it_is_compiled_for_each_shape(q, k, v, scale, causal):
    """It is wrong at every second length above those of repeated calls."""
    return right_if(q.shape[1] <= 160 or q.shape[1] % 2 == 0, q, k, v, scale, causal)


@cheat("error", slow=True)
def takes_the_first_key_for_all(q, k, v, scale, causal):
    """Where a head mostly attends to its first key, as in GPT-2, it ignores the others."""
    later, n = slice(q.shape[1] // 2, None), q.shape[1] // 2
    scores = (q[:, later].transpose(1, 2) @ k[:, : n + 1].permute(0, 2, 3, 1)) * scale
    weights = scores.softmax(3)[..., 0].mean(2)  # (batch, heads)
    o = right(q, k, v, scale, causal)
    return o.where((weights < 0.6)[:, None, :, None], v[:, :1])


# While it is timed


def is_timed():
    return any("one_pass" in frame.function for frame in inspect.stack())


# If the head is drawn for none of the outputs, one that is made again differs from the timed one.
@cheat("the timed outputs are wrong|when it is made again", by="clock")
def leaves_a_head_out_while_timed(q, k, v, scale, causal):
    """It does less while it is timed."""
    o = right(q, k, v, scale, causal)
    if is_timed():
        o[:, :, -1] = 0
    return o


@cheat("the timed outputs are wrong|when it is made again", by="clock", op="decode")
def decode_forgets_a_row_while_timed(q, k, v, seqlens, scale):
    """It does less while it is timed."""
    o = right(q, k, v, scale, False, seqlens)
    if is_timed():
        o[-1] = 0
    return o


@cheat("the timed outputs are wrong", by="clock")
def has_one_buffer_while_timed():
    """All of its timed outputs are one tensor."""

    @functools.cache
    def buffer(shape, device):
        return torch.empty(shape, device=device)

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        return buffer(q.shape, q.device).copy_(o) if is_timed() else o

    return kernel


@cheat("the timed outputs are wrong", by="clock")
def keeps_results_by_pointer():
    """It keeps results by address, which stay the same while it is timed."""
    return kept_by(lambda q, k, *_: (q.data_ptr(), k.data_ptr(), q.shape))


@cheat("the timed outputs are wrong|capture|CUDA error", by="clock")  # no graph reads signs
def keeps_results_by_a_few_signs_of_q():
    """It keeps results by a few bits of an input."""
    return kept_by(lambda q, *_: (q.shape, *(q[0, 0, 0, :3] > 0).tolist()))


@cheat("it ended with exit status 0", by="clock")
def ends_while_timed(q, k, v, scale, causal):
    """It prints a verdict and ends while it is timed."""
    if is_timed():
        print("PASSED", flush=True)
        os._exit(0)
    return right(q, k, v, scale, causal)


@cheat("the clocks disagree|beneath what the device can do", by="clock")
def stops_the_events():
    """It patches the worker's clock."""
    torch.cuda.Event.elapsed_time = lambda *_: 1e-3
    time.perf_counter = lambda: 0.0
    return right


def slowly(*inputs):
    time.sleep(0.02)  # for a sample, far longer than its answer may take
    return right(*inputs)


def with_timed_calls(timed, kernel=slowly):
    """Have the worker time its calls with another class."""
    from attention_kernels.judge import caller

    caller.Timed = type("Timed", (timed, caller.Timed), {})
    return kernel


@cheat("the timed outputs are wrong", by="clock")
def works_before_the_clock_starts():
    """It works before it may know what the inputs are multiplied by."""

    class Early:
        def renew(self, on_host):
            super().renew(on_host)
            super().run()
            self.kept = [*self.outputs]

        def run(self, passes=1, *, chained=True):
            if not hasattr(self, "kept"):
                return super().run()
            self.outputs = self.kept
            return 1e-4 * passes

    return with_timed_calls(Early)


@cheat("changed after the clock had stopped", by="clock")
def works_after_the_clock_has_stopped():
    """It works when its outputs are taken."""

    class Late:
        def run(self, passes=1, *, chained=True):
            return 1e-4 * passes if self.outputs else super().run()

        def hand_over(self, block, calls):
            super().run()
            super().hand_over(block, calls)

    return with_timed_calls(Late)


@cheat("changed after the clock had stopped", by="clock")
def promises_sums_and_works_later():
    """It answers with sums of other outputs, and works when its outputs are taken."""

    class Promising:
        def renew(self, on_host):
            super().renew(on_host)
            super().run()  # on the numbers without their factors
            self.promised = self.outputs

        def run(self, passes=1, *, chained=True):
            if not hasattr(self, "promised"):
                return super().run()
            self.outputs = self.promised
            return 1e-3 * passes

        def hand_over(self, block, calls):
            super().run()
            super().hand_over(block, calls)

    return with_timed_calls(Promising, right)


@cheat("outputs are wrong", by="clock", on=("cpu",))  # on CUDA the first calls count
def keeps_results_when_calls_are_repeated():
    """It keeps results by all numbers but those whose signs the chain sets."""
    memo = {}

    def kernel(q, k, v, scale, causal):
        seen, key = (q, v, k[..., 1:]), q.data_ptr()
        if key not in memo or not all(map(torch.equal, seen, memo[key])):
            memo[key] = *(x.clone() for x in seen), right(q, k, v, scale, causal)
        return memo[key][-1].clone()

    return kernel


@cheat("has another output when it is made again", by="clock")
def leaves_out_the_chain_when_calls_are_repeated():
    """The judge still subtracts what the chain takes."""

    class Loose:
        def repeat(self, passes):
            seconds = super().run(passes, chained=False)
            return seconds, totals_of(self.outputs).repeat(passes)

    return with_timed_calls(Loose, right)


@cheat("has another output when it is made again|beneath what", by="clock")
def makes_only_the_last_of_the_repeated_passes():
    """It tells the judge sums that it has made up."""

    class Lazy:
        def repeat(self, passes):
            seconds = super().run()
            return seconds, totals_of(self.outputs).repeat(passes)

    return with_timed_calls(Lazy, right)


def totals_of(outputs):
    from attention_kernels.judge.calls import total_of

    return torch.stack([*map(total_of, outputs)])


@cheat("outputs are wrong", by="clock", on=("cuda",))
def does_nothing_when_calls_may_overlap(q, k, v, scale, causal):
    """It works only in the pass with the chain; the time without is shown, too."""
    passes = (x.frame.f_locals for x in inspect.stack() if x.function == "one_pass")
    if next(passes, {}).get("chained", True):
        return right(q, k, v, scale, causal)
    return torch.empty(q.shape, device=q.device)


@cheat("the clocks disagree|beneath what the device can do", by="clock")
def reports_less_once():
    """It reports less of the calls that count."""

    class Less:
        def run(self, passes=1, *, chained=True):
            return super().run(passes, chained=chained) / (100 if chained else 1)

    return with_timed_calls(Less)


@cheat("the clocks disagree|beneath what", by="clock")
def makes_its_own_times_vary():
    """Its own times vary so much that another clock seems to agree."""

    class Varied:
        samples = 0

        def renew(self, on_host):
            super().renew(on_host)
            self.samples += 1

        def run(self, passes=1, *, chained=True):
            return super().run(passes, chained=chained) * (1e3 if self.samples == 1 else 5e-2)

    return with_timed_calls(Varied)


@cheat("the clocks disagree|beneath what", by="clock")
def hides_behind_its_own_noise():
    """Its calls are short, and its repeated times vary so much that any other seems to agree."""

    class Noisy:
        repeats = 0

        def run(self, passes=1, *, chained=True):
            return super().run(passes, chained=chained) * 1e-3

        def repeat(self, passes):
            seconds, totals = super().repeat(passes)
            self.repeats += 1
            return seconds * (self.repeats % 3), totals

    return with_timed_calls(Noisy, right)


def timed_sets():
    """Return the inputs of all calls of a pass while it is timed."""
    passes = (x.frame.f_locals["self"] for x in inspect.stack() if x.function == "one_pass")
    return getattr(next(passes, None), "_sets", [])


@cheat("the timed outputs are wrong|capture|CUDA error", by="clock")
def starts_a_thread_per_call():
    """Its calls run at the same time; the last one waits for them all."""
    threads = []

    def kernel(q, k, v, scale, causal):
        o = torch.empty(q.shape, device=q.device)

        def work():
            time.sleep(0.02)
            o.copy_(right(q, k, v, scale, causal))

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        if len(threads) >= len(timed_sets()):
            for thread in threads:
                thread.join()
            threads.clear()
        return o

    return kernel


@cheat("the timed outputs are wrong", by="clock")
def makes_all_calls_in_the_first():
    """The first call of a pass makes all others, too."""
    ready = []

    def kernel(q, k, v, scale, causal):
        if not ready:
            sets = timed_sets() or [(q, k, v)]
            ready.extend(right(*inputs, scale, causal) for inputs in sets)
        return ready.pop(0)

    return kernel


# While others are timed


def spin():
    while True:  # without Python's lock, for which its own calls would wait
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**20)


@functools.cache
def spin_in_a_child():
    if not os.fork():
        spin()


@cheat("stopped", by="rivals")
def keeps_the_cores_busy_with_a_thread():
    """It starts a thread when it is loaded, which slows the others."""
    threading.Thread(target=spin, daemon=True).start()
    return right


@cheat("stopped", by="rivals")
def keeps_the_cores_busy_with_a_child(q, k, v, scale, causal):
    """It starts a process in its first call, which slows the others."""
    spin_in_a_child()
    return right(q, k, v, scale, causal)


# The worker


@cheat("error", by="clock")
def patches_the_judge(q, k, v, scale, causal):
    """It replaces the judge's functions in its own process."""
    from attention_kernels.judge import suite, truth

    suite._judge = lambda *_: truth.Verdict(0.0, 1.0, 0.0)
    suite.truth = None
    return torch.zeros(q.shape, device=q.device)


@cheat("error", by="clock")
def looks_for_the_answer(q, k, v, scale, causal):
    """It looks for the reference in memory."""
    answers = [
        x
        for x in gc.get_objects()
        if isinstance(x, torch.Tensor) and x.shape == q.shape and x.dtype == torch.float64
    ]
    return answers[0].float() if answers else torch.zeros(q.shape, device=q.device)


@cheat("it was killed|it broke off the connection", by="clock")
def answers_in_words(q, k, v, scale, causal):
    """It writes to the connection with the judge."""
    import socket

    for x in gc.get_objects():
        if type(x) is socket.socket and x.fileno() > 0:
            x.send(b"PASSED")
    return right(q, k, v, scale, causal)


@cheat("error", by="clock")
def ends_the_server():
    """It kills the server that workers are forked from."""
    server = os.getppid()  # when it has ended, the parent is another process

    def kernel(q, k, v, scale, causal):
        with contextlib.suppress(OSError):
            os.kill(server, 9)
        return torch.zeros(q.shape, device=q.device)

    return kernel


def shared_memories():
    """Yield the descriptors of the memory that is shared with the judge."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if "memfd:attention" in os.readlink(f"/proc/self/fd/{fd}"):
                yield fd


@cheat("it wrote outside its input q|the clocks disagree", by="clock")
def writes_to_the_inputs_from_behind(q, k, v, scale, causal):
    """It writes to the judge's memory around the inputs."""
    for fd in shared_memories():
        memory = os.pread(fd, 2**23, 0)
        os.pwrite(fd, bytes(4096), max(0, memory.find(b"\xff" * 4096)))
    return right(q, k, v, scale, causal)


@cheat("passed", by="clock")
def makes_the_shared_memory_too_large_to_map(q, k, v, scale, causal):
    """It makes the judge's memory larger, which does no harm."""
    for fd in shared_memories():
        os.ftruncate(fd, 2**62)
    return right(q, k, v, scale, causal)


@cheat(r"RuntimeError: \[2J \[HPASSED \[8m", by="clock")
def clears_the_screen_and_prints_a_verdict(q, k, v, scale, causal):
    """Its error message clears the terminal and prints a verdict."""
    raise RuntimeError(chr(27) + "[2J" + chr(27) + "[HPASSED" + chr(27) + "[8m")


@cheat("dumpable: 0", by="clock")
def asks_whether_it_may_be_traced(*_):
    """It looks whether another process could read or trace it."""
    raise RuntimeError(f"dumpable: {ctypes.CDLL(None).prctl(3)}")  # PR_GET_DUMPABLE


# What others' judges met, by its description


@cheat("error")
def returns_zeros(q, k, v, scale, causal):
    """It takes an absolute tolerance to be larger than the output."""
    return torch.zeros(q.shape)


@cheat("not finite|earlier rows|error")
def returns_what_was_in_memory(q, k, v, scale, causal):
    """It frees a right output, which an oracle in its process would do, and allocates another."""
    shape = right(q, k, v, scale, causal).shape
    return torch.empty(shape)


@cheat("not finite")
def returns_nothing_but_nan(q, k, v, scale, causal):
    """It takes NaN to be equal to everything."""
    return torch.full(q.shape, torch.nan)


@cheat("error")
def is_exact_in_a_sample_of_rows(q, k, v, scale, causal):
    """It is coarse in all rows but those that somebody is likely to look at."""
    o = right(*(x.bfloat16() for x in (q, k, v)), scale, causal).float()
    o[:, ::16] = right(q, k, v, scale, causal)[:, ::16]
    return o


@cheat("error|change earlier rows")  # the largest may be that of a later key
def is_coarse_where_the_largest_score_is_small(q, k, v, scale, causal):
    """Its precision depends on the largest score."""
    if torch.einsum("bihd,bjhd->bhij", q, k).abs().max() * abs(scale) > 6:
        return right(q, k, v, scale, causal)
    return right(*(x.bfloat16() for x in (q, k, v)), scale, causal).float()


@cheat("the timed outputs are wrong", by="clock")
def keeps_results_by_identity():
    """It keeps results by id(), of tensors that get new numbers."""
    return kept_by(lambda q, _k, _v, scale, causal: (id(q), q.shape, scale, causal))


@cheat("error|call", wrong=lambda c: False)
def keeps_results_in_a_file():
    """It keeps results by shape in files."""
    folder = Path(tempfile.mkdtemp())

    def kernel(q, k, v, scale, causal):
        file = folder / f"{tuple(q.shape)} {scale} {causal}"
        if not file.exists():
            torch.save(right(q, k, v, scale, causal), file)
        return torch.load(file)

    return kernel


@cheat("the timed outputs are wrong|changed after the clock|capture|CUDA error", by="clock")
def leaves_the_work_to_a_thread_while_timed(q, k, v, scale, causal):
    """It returns at once, and another thread writes the output."""
    if not is_timed():
        return right(q, k, v, scale, causal)
    o = torch.zeros(q.shape, device=q.device)

    def work():
        time.sleep(0.05)
        o.copy_(right(q, k, v, scale, causal))

    threading.Thread(target=work).start()
    return o


@cheat("passed", by="clock")
def sleeps_while_it_is_warmed_up():
    """Its first calls are slow, so that a judge that has a budget of time makes fewer."""
    calls = itertools.count()

    def kernel(q, k, v, scale, causal):
        time.sleep(0.02 * (next(calls) < 8))
        return right(q, k, v, scale, causal)

    return kernel


@cheat("the clocks disagree|beneath what the device can do", by="clock")
def swaps_start_and_end():
    """Its clock runs backwards."""
    elapsed, clock = torch.cuda.Event.elapsed_time, time.perf_counter
    torch.cuda.Event.elapsed_time = lambda start, end: -elapsed(start, end)
    time.perf_counter = lambda: -clock()
    return right


@cheat("error", by="clock")
def makes_every_comparison_true(q, k, v, scale, causal):
    """It replaces what a judge compares and sums up with."""
    torch.equal = torch.allclose = torch.isclose = lambda *_, **__: True
    torch.testing.assert_close = lambda *_, **__: None
    statistics.median = statistics.fmean = lambda *_: 0.0
    return torch.zeros(q.shape, device=q.device)


@cheat("error", by="clock")
def forgets_its_failures(q, k, v, scale, causal):
    """It resets the judge's list of failures in its own process."""
    from attention_kernels.judge import suite

    suite.Report.note = lambda *_: None
    suite.Report.passed = True
    for x in gc.get_objects():
        if type(x) is suite.Report:
            x.failures.clear()
    return torch.zeros(q.shape, device=q.device)


@cheat("error", by="clock")
def prints_a_verdict_at_exit():
    """It prints a verdict when its process ends."""
    atexit.register(print, "PASSED", flush=True)
    return lambda q, k, v, scale, causal: torch.zeros(q.shape, device=q.device)


@cheat("it wrote outside|it changed its input", by="clock")
def writes_zeros_over_what_it_shares(q, k, v, scale, causal):
    """It makes all inputs 0, so that zeros would be right."""
    for fd in shared_memories():
        os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)
    return torch.zeros(q.shape, device=q.device)


@cheat("passed", by="clock")
def leaves_the_work_to_a_library(q, k, v, scale, causal):
    """It has no kernel of its own, and is timed as what it is; it swallows its own exception."""
    try:
        raise NotImplementedError
    except NotImplementedError:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)
    return o.transpose(1, 2).contiguous()


# Honest kernels, by the same rules


@cheat("passed", by="clock")
def is_honest(q, k, v, scale, causal):
    """It does nothing wrong."""
    return right(q, k, v, scale, causal)


@cheat("passed", by="clock", op="decode")
def decode_is_honest(q, k, v, seqlens, scale):
    """It does nothing wrong."""
    return right(q, k, v, scale, False, seqlens)
