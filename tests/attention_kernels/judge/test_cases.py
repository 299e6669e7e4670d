"""What the suite covers, whatever the seed. No kernel runs: see faults.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.judge import cases
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import QUICK_SHARE
from tests.attention_kernels.judge.faults import SINGLE, cases_of, met_by

WIDE_FAULTS = {
    "one column": lambda c: c.head_dim == 1,
    "below 32": lambda c: 1 < c.head_dim < 32,
    "odd": lambda c: c.head_dim > 1 and c.head_dim % 2,
    "off multiples of 16": lambda c: c.head_dim > 16 and c.head_dim % 16,
    "above 128": lambda c: 128 < c.head_dim < 256,
    "256": lambda c: c.head_dim == 256,
}


@pytest.mark.parametrize("is_emulated", [pytest.param(True, marks=pytest.mark.slow), False])
def test_every_planted_fault_meets_a_case_and_most_of_them_a_quick_one(is_emulated):
    whole = cases_of(0, is_emulated=is_emulated)
    quick = cases_of(0, is_emulated=is_emulated, quick=True)
    is_quick = np.array([case in quick for case in whole])
    assert quick == [case for case, is_in in zip(whole, is_quick, strict=True) if is_in]
    assert sum(case.work for case in quick) < 0.44 * sum(case.work for case in whole)
    kinds = np.array([isinstance(case, Case) for case in whole])
    if is_emulated:  # the time of the suite is that of its work
        assert sum(case.work for case in whole if isinstance(case, Case)) < 2.5e9
    found = met_by(whole, is_emulated=is_emulated)
    assert len(found) > 19_000
    assert [fault for fault, which in found.items() if not which.any()] == []
    in_quick = {True: is_quick[kinds], False: is_quick[~kinds]}
    shown = [which[in_quick[fault[0][0] != "decode"]].any() for fault, which in found.items()]
    assert np.mean(shown) >= QUICK_SHARE


@pytest.mark.parametrize("is_emulated", [True, False])
def test_gpt2_small_s_own_batches_are_in_a_quick_run(is_emulated):
    for seed in range(3):
        found = cases_of(seed, is_emulated=is_emulated, quick=True)
        assert any(map(SINGLE["GPT-2 small's batches"], (x for x in found if isinstance(x, Case))))


@pytest.mark.parametrize("kind", [Case, DecodeCase])
def test_every_kind_of_head_dim_is_tried(kind):
    found = [case for case in cases_of(0, is_emulated=False, head_dims=()) if type(case) is kind]
    assert [name for name, is_met in WIDE_FAULTS.items() if not any(map(is_met, found))] == []


@pytest.mark.parametrize("op", ["attention", "decode"])
def test_a_backend_that_is_compiled_for_each_shape_gets_few_shapes(op):
    """Each dtype has one per range of lengths, with every head_dim and all other values."""
    dtypes = torch.float32, torch.float16
    dims = (32, 64, 128)
    found = cases.ordered_cases(op, dims, dtypes, 0)
    few = [case for case, _ in cases.with_few_shapes(found, get_backend("TRITON_FLASH_ATTENTION"))]
    names = cases.SHAPES[type(few[0])]
    for dtype in dtypes:
        shapes = {tuple(getattr(c, name) for name in names) for c in few if c.dtype == dtype}
        assert len(shapes) == len({c.seqlen for c in few if c.dtype == dtype}) <= 4
        for name in ("layout", "kind", "scale", "softmax_scale"):
            values = {getattr(case, name) for case, _ in found if case.dtype == dtype}
            assert {getattr(case, name) for case in few if case.dtype == dtype} == values, name
        assert {case.head_dim for case in few if case.dtype == dtype} == {*dims}
    assert len(few) == len({*few})


@pytest.mark.parametrize("op", ["attention", "decode"])
def test_every_value_is_tried_with_every_group_if_a_backend_declares_it(op):
    arguments = op, (32, 64), (torch.float32, torch.float16), 0
    plain, found = (
        [case for case, _ in cases.ordered_cases(*arguments, has_groups=has_groups)]
        for has_groups in (False, True)
    )
    assert {case.group for case in plain} == {1}
    assert {case.group for case in found} >= {1, 2, 3, 4, 5, 7, 8, 12, 16}
    for group in ([2], [3, 5, 7], [4, 8, 12, 16]):
        of_group = [case for case in found if case.group in group]
        assert len({(case.head_dim, case.dtype) for case in of_group}) == 4
        assert {1} < {case.num_heads for case in of_group}
        assert len({case.layout for case in of_group}) >= len(cases.LAYOUTS)


@pytest.mark.parametrize("op", ["attention", "decode"])
def test_addresses_off_16_bytes_are_for_backends_that_may_take_them(op):
    """The op of a version file refuses them all."""
    for is_aligned in (True, False):
        found = cases.ordered_cases(op, (32,), [torch.float32], 0, is_aligned=is_aligned)
        inputs = [case.inputs("cpu") for case, _ in found if case.layout == "unaligned"]
        assert bool(inputs) is not is_aligned
        for _, k, v, *_ in inputs:
            assert all(4 * x.stride(2) % 16 for x in (k, v))


def test_the_document_has_the_ranges_that_are_drawn():
    text = (Path(__file__).parents[3] / "docs/correctness.md").read_text("utf-8")
    of_length = (*cases.SHORT, *cases.LONG, *cases.LONG_EMULATED, *cases.CACHES)
    ranges = (*of_length, *cases.BATCH_RANGES, *cases.HEAD_RANGES, *cases.COMPILED_RANGES)
    texts = [f"[{x[0]} to {x[-1]}]" for x in ranges if x.step == 1 and len(x) > 3]
    texts += [f"[{x[0]:g} to {x[1]:g}]" for x in cases.SOFTMAX_SCALES if isinstance(x, tuple)]
    texts += [f"{kind} times [{least:g} to {most:g}]" for kind, least, most in cases.NUMBERS]
    assert [x for x in texts if x not in text] == []
