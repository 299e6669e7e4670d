"""What the suite covers, whatever the seed: a row of a table is a fault that some case must meet.

No kernel runs: a fault that shows under a condition is found if a case meets the condition.
"""

from __future__ import annotations

import functools

import pytest
import torch

from attention_kernels import BackendSpec
from attention_kernels.contract import PLAIN_PRECISIONS, Kernels
from attention_kernels.judge.cases import Case, DecodeCase
from attention_kernels.judge.conformance import suite
from attention_kernels.judge.worker import Runner

SEEDS = range(6)
HEAD_DIMS = {"some": (32, 64, 128), "any": ()}


@functools.cache
def cases_of(seed, head_dims, *, is_emulated):
    spec = BackendSpec(
        name="COVERED",
        family="test",
        summary="It is never called.",
        loader=lambda: Kernels(lambda *_: None, lambda *_: None),
        precisions=PLAIN_PRECISIONS,
        head_dims=HEAD_DIMS[head_dims],
        emulated_on=("cpu",) * is_emulated,
    )
    found = suite(Runner(spec, "cpu"), [torch.float32], seed)
    split = ([case for case in found if isinstance(case, kind)] for kind in (Case, DecodeCase))
    return dict(zip(("attention", "decode"), split, strict=True))


def batch(case):
    return len(case.lengths)


FAULTS = {
    "no row from 8 on of a batch": lambda c: c.batch > 8,
    "a batch of 33": lambda c: c.batch == 33,
    "the remainder 17 of tiles of 128, causal": lambda c: (
        c.seqlen > 128 and c.seqlen % 128 == 17 and c.is_causal
    ),
    "the remainder 17 of tiles of 128, full": lambda c: (
        c.seqlen > 128 and c.seqlen % 128 == 17 and not c.is_causal
    ),
    "a wide batch of many heads, full and long": lambda c: (
        c.batch > 2 and c.num_heads >= 16 and not c.is_causal and c.seqlen > 256
    ),
    "a wide batch of many heads, causal and long": lambda c: (
        c.batch > 2 and c.num_heads >= 16 and c.is_causal and c.seqlen > 256
    ),
    "TF32 at GPT-2's own shape, long, of unusual inputs": lambda c: (
        c.num_heads == 12 and c.head_dim == 64 and c.seqlen > 512 and c.scale != 1
    ),
    "many heads before positions": lambda c: c.num_heads >= 16 and c.layout == "transposed",
    "a negative scale": lambda c: (c.softmax_scale or 1) < 0,
    "a scale of 0": lambda c: c.softmax_scale == 0 and c.is_causal,
    "a scale above 1": lambda c: (c.softmax_scale or 0) > 1,
    "a long sequence": lambda c: c.seqlen > 1024,
} | {f"{n} heads": lambda c, n=n: c.num_heads == n for n in (*range(1, 33), 48)}
DECODE_FAULTS = {
    "lengths[min(row, 15)]": lambda c: len(set(c.lengths[15:])) > 1,
    "equal lengths": lambda c: batch(c) > 1 and len({*c.lengths}) == 1 and c.lengths[0] > 1,
    "all of length 1": lambda c: batch(c) > 1 and {*c.lengths} == {1},
    "a negative scale": lambda c: (c.softmax_scale or 1) < 0,
    "a scale of 0": lambda c: c.softmax_scale == 0,
    "a scale above 1": lambda c: (c.softmax_scale or 0) > 1,
    "many heads and a wide batch": lambda c: c.num_heads >= 16 and batch(c) > 2,
} | {f"{n} heads": lambda c, n=n: c.num_heads == n for n in (*range(1, 33), 48)}
# Only where nothing is emulated, and only where any head_dim is taken.
NATIVE_FAULTS = {
    "a batch of 512": lambda c: (c.batch if isinstance(c, Case) else batch(c)) == 512,
    "2,048 keys": lambda c: c.seqlen > 2048,
}
WIDE_FAULTS = {
    "one column": lambda c: c.head_dim == 1,
    "below 32": lambda c: 1 < c.head_dim < 32,
    "odd": lambda c: c.head_dim > 1 and c.head_dim % 2,
    "off multiples of 16": lambda c: c.head_dim > 16 and c.head_dim % 16,
    "above 128": lambda c: 128 < c.head_dim < 256,
    "256": lambda c: c.head_dim == 256,
}


@pytest.mark.parametrize("is_emulated", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_fault_meets_a_case(seed, is_emulated):
    found = cases_of(seed, "some", is_emulated=is_emulated)
    for what, faults in (("attention", FAULTS), ("decode", DECODE_FAULTS)):
        missed = [name for name, is_met in faults.items() if not any(map(is_met, found[what]))]
        assert missed == [], what
    if not is_emulated:
        everything = [*found["attention"], *found["decode"]]
        assert [n for n, is_met in NATIVE_FAULTS.items() if not any(map(is_met, everything))] == []


@pytest.mark.parametrize("what", ["attention", "decode"])
def test_every_kind_of_head_dim_is_tried(what):
    found = cases_of(0, "any", is_emulated=False)[what]
    assert [name for name, is_met in WIDE_FAULTS.items() if not any(map(is_met, found))] == []


def test_every_remainder_of_a_tile_of_128_is_met_causal_and_full():
    lengths = range(129, 257)
    for seed in SEEDS:
        met = {
            (case.seqlen, case.is_causal)
            for case in cases_of(seed, "some", is_emulated=True)["attention"]
        }
        assert {(n, is_causal) for n in lengths for is_causal in (True, False)} <= met


def test_every_remainder_of_a_tile_of_32_meets_every_head_dim():
    met = {
        (case.seqlen % 32, case.head_dim, case.is_causal)
        for case in cases_of(0, "some", is_emulated=True)["attention"]
    }
    assert len(met) == 32 * 3 * 2


def test_what_is_emulated_stays_affordable():
    """About what it was when the suite had fewer cases: its time is that of its work."""
    for seed in SEEDS:
        found = cases_of(seed, "some", is_emulated=True)["attention"]
        assert sum(case.work for case in found) < 2.5e9
