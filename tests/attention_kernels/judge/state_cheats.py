"""Backends that keep something from one call to another; see cheats.py."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.attention_kernels.judge.cheats import attention, made, right


@made("call .* of 5000", missed=0.999**5000, slow=True)
def leaves_the_last_row_once_in_a_thousand_calls():
    draw = random.Random(0)

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        if draw.random() < 1e-3:
            o[:, -1] = torch.nan
        return o

    return kernel


@made("call|error")
def returns_its_first_answer_again():
    answers = {}

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        return answers.setdefault((q.shape, scale, causal), o).clone()

    return kernel


@made("error")
def answers_by_the_contents_of_q():
    answers = {}

    def kernel(q, k, v, scale, causal):
        key = q.shape, q.contiguous().numpy().tobytes(), scale, causal
        if key not in answers:
            answers[key] = right(q, k, v, scale, causal)
        return answers[key].clone()

    return kernel


@made("a later call changed an output", slow=True)
def has_one_buffer():
    buffers = {}

    def kernel(q, k, v, scale, causal):
        buffer = buffers.setdefault(q.shape, torch.empty(q.shape))
        return buffer.copy_(right(q, k, v, scale, causal))

    return kernel


@made("two runs|error|change earlier rows")
def is_wrong_in_every_seventh_call():
    calls = iter(range(10**9))

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        return o * 1.001 if next(calls) % 7 == 6 else o

    return kernel


@made("call .* of 5000", slow=True)
def is_wrong_after_a_thousand_calls():
    calls = iter(range(10**9))

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        return o * 1.001 if next(calls) > 1000 else o

    return kernel


@made("two runs|error")
def carries_over_from_the_call_before():
    before = {}

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        mixed = o + 1e-4 * before.get(q.shape, 0)
        before[q.shape] = o
        return mixed

    return kernel


@made("calls|error")
def keeps_what_a_longer_call_left():
    """Scratch that is cleared when it grows, and not again."""
    scratch = [torch.zeros(0)]

    def kernel(q, k, v, scale, causal):
        o = right(q, k, v, scale, causal)
        if scratch[0].numel() > o.numel():
            o = o + 1e-4 * scratch[0][: o.numel()].view(o.shape)
        else:
            scratch[0] = o.flatten().clone()
        return o

    return kernel


@made("calls", slow=True)
def answers_by_address():
    answers = {}

    def kernel(q, k, v, scale, causal):
        key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] < 100:
            return right(q, k, v, scale, causal)
        if key not in answers:
            answers[key] = right(q, k, v, scale, causal)
        return answers[key].clone()

    counts: dict[Any, int] = {}
    return kernel


@attention("it changed torch's float32 matmul precision")
def makes_plain_pytorch_worse(q, k, v, scale, causal):
    torch.set_float32_matmul_precision("medium")
    return right(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale, causal).float()


@attention("1 thread,|error")  # the tests may run with one thread throughout
def needs_more_than_one_thread(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o if torch.get_num_threads() > 1 else o * 1.001


@attention("5 threads", slow=True)
def is_wrong_with_many_threads(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o * 1.001 if torch.get_num_threads() > 4 else o


@attention("thread", slow=True)
def is_wrong_in_inference_mode(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    return o * 1.001 if torch.is_inference_mode_enabled() else o
