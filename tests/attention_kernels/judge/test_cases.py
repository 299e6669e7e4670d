"""What the suite covers, whatever the seed. No kernel runs: see faults.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attention_kernels.judge import cases, order
from attention_kernels.judge.conformance import QUICK_SHARE
from attention_kernels.judge.inputs import Case, DecodeCase
from tests.attention_kernels.judge.faults import cases_of, met_by

WIDE_FAULTS = {
    "one column": lambda c: c.head_dim == 1,
    "below 32": lambda c: 1 < c.head_dim < 32,
    "odd": lambda c: c.head_dim > 1 and c.head_dim % 2,
    "off multiples of 16": lambda c: c.head_dim > 16 and c.head_dim % 16,
    "above 128": lambda c: 128 < c.head_dim < 256,
    "256": lambda c: c.head_dim == 256,
}


@pytest.mark.parametrize("is_emulated", [True, False])
def test_every_planted_fault_meets_a_case_and_most_of_them_a_quick_one(is_emulated):
    """python -m tests.attention_kernels.judge.faults tells what 100 seeds miss."""
    whole = cases_of(0, is_emulated=is_emulated)
    quick = cases_of(0, is_emulated=is_emulated, quick=True)
    is_quick = np.array([case in quick for case in whole])
    assert quick == [case for case, is_in in zip(whole, is_quick, strict=True) if is_in]
    assert sum(case.work for case in quick) < 0.4 * sum(case.work for case in whole)
    kinds = np.array([isinstance(case, Case) for case in whole])
    found = met_by(whole, is_emulated=is_emulated)
    assert len(found) > 19_000
    assert [fault for fault, which in found.items() if not which.any()] == []
    in_quick = {True: is_quick[kinds], False: is_quick[~kinds]}
    shown = [which[in_quick[fault[0][0] != "decode"]].any() for fault, which in found.items()]
    assert np.mean(shown) >= QUICK_SHARE


@pytest.mark.parametrize("kind", [Case, DecodeCase])
def test_every_kind_of_head_dim_is_tried(kind):
    found = [case for case in cases_of(0, is_emulated=False, head_dims=()) if type(case) is kind]
    assert [name for name, is_met in WIDE_FAULTS.items() if not any(map(is_met, found))] == []


@pytest.mark.parametrize("kind", [Case, DecodeCase])
def test_a_backend_that_is_compiled_for_each_shape_gets_few_shapes(kind):
    """Each dtype has one per range of lengths, with every head_dim and all other values."""
    dtypes = torch.float32, torch.float16
    dims = (32, 64, 128)
    found = (
        cases.attention_cases(dims, dtypes, 0, is_emulated=False)
        if kind is Case
        else [*cases.decode_cases(dims, dtypes, 0)]
    )
    few = order.with_few_shapes(found)
    names = order.SHAPES[kind]
    for dtype in dtypes:
        shapes = {tuple(getattr(c, name) for name in names) for c in few if c.dtype == dtype}
        assert len(shapes) == len({c.seqlen for c in few if c.dtype == dtype}) <= 4
        for name in {f.name for f in dataclasses.fields(kind)} - {*names}:
            values = {getattr(case, name) for case in found if case.dtype == dtype}
            assert {getattr(case, name) for case in few if case.dtype == dtype} == values, name
        assert {case.head_dim for case in few if case.dtype == dtype} == {*dims}
    assert len(few) == len({*few})


@pytest.mark.parametrize("draw", [cases.attention_cases, cases.decode_cases])
def test_every_value_is_tried_with_every_group_if_a_backend_declares_it(draw):
    arguments = (32, 64), (torch.float32, torch.float16), 0
    plain, found = (
        [*draw(*arguments, is_emulated=True, has_groups=has_groups)] for has_groups in (False, True)
    )
    assert {case.group for case in plain} == {1}
    assert [case for case in found if case.group == 1] == plain
    for name in ("head_dim", "layout", "dtype"):
        wanted = {(getattr(case, name), group) for case in plain for group in cases.GROUPS}
        assert wanted == {(getattr(c, name), c.group) for c in found if c.group > 1}
    for group in cases.GROUPS:
        assert {1} < {case.num_heads for case in found if case.group == group}


def test_what_is_emulated_stays_affordable():
    """The time of the suite is that of its work."""
    found = [case for case in cases_of(0, is_emulated=True) if isinstance(case, Case)]
    assert sum(case.work for case in found) < 2.5e9
