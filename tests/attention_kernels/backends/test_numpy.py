"""The NumPy ladder: any shape and tile, and the passes over a tile."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.judge.truth import truth

PROGRAMS = [
    importlib.import_module(f"attention_kernels.backends.numpy.{name}")
    for name in ("basic", "gpu_like", "gpu_like_1d", "gpu_like_opt1", "gpu_like_opt2")
]


def arrays(case: Case) -> list[np.ndarray]:
    return [x.numpy() for x in case.inputs("cpu")]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda x: x.__name__)
def test_any_shape_and_tile(program):
    """Where block_m is greater than block_n, a tile may be hidden from some of the rows only."""
    spec = get_backend(f"NUMPY_{program.__name__.split('.')[-1].upper()}")
    for is_causal in (True, False):
        for seqlen, head_dim in ((1, 1), (17, 1), (18, 3), (33, 40), (40, 256)):
            case = Case(seqlen, head_dim, batch=2, num_heads=3, is_causal=is_causal)
            assert run_case(spec, case, "cpu").passed, case
        case = Case(43, 32, is_causal=is_causal)
        for block_m, block_n in ((32, 8), (8, 32), (5, 7), (1, 1), (64, 64)):
            tile = {"block_m": block_m, "block_n": block_n}
            o = program.attention(*arrays(case), 32**-0.5, is_causal, **tile)
            right = truth(*case.inputs("cpu"), is_causal=is_causal)
            assert right.judge(torch.from_numpy(o)).passed, tile


def test_the_five_programs_agree():
    case = Case(77, 64, batch=2, dtype=torch.float64)
    for is_causal in (True, False):
        o = [program.attention(*arrays(case), 0.125, is_causal) for program in PROGRAMS]
        for other in o[1:]:
            np.testing.assert_allclose(other, o[0], rtol=0, atol=1e-14)
        # Other buffers and fewer passes do the same arithmetic.
        assert np.array_equal(o[3], o[2])
        assert np.array_equal(o[4], o[2])
