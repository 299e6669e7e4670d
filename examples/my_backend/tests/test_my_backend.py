"""Each kernel of this package is right in a few cases; `gpt2-infer verify NAME` tries hundreds."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch

from attention_kernels import UnsupportedError, get_backend, list_backends
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import run_case
from attention_kernels.registry import device_for

NAMES = [spec.name for spec in list_backends() if spec.family == "my-backend"]


def test_the_package_is_installed() -> None:
    """Without its entry points there is nothing to test."""
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_right(name: str) -> None:
    """It is as near to float64 as plain PyTorch: on a GPU, or emulated on the CPU."""
    spec = get_backend(name)
    device = device_for(spec)
    decodes = spec.has_decode(device)
    for dtype, head_dim in product(spec.dtypes, spec.head_dims or (64,)):
        of = getattr(torch, dtype)
        causal, full = Case(70, head_dim, dtype=of), Case(33, head_dim, 8.0, 2, 1, False, dtype=of)
        for case in [DecodeCase(head_dim, of)] if decodes else [causal, full]:
            with contextlib.suppress(UnsupportedError):  # a kernel may refuse what it cannot do
                assert run_case(spec, case, device).passed, str(case)
