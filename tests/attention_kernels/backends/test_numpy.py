"""The NumPy ladder: any shape and tile, the passes over a tile, and the buffers."""

from __future__ import annotations

import ast
import importlib
import inspect
import tracemalloc
from types import ModuleType

import numpy as np
import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.backends.numpy.memory import BLOCK_M, BLOCK_N, SharedMemory
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.judge.truth import judge

PROGRAMS = ["basic", "gpu_like", "gpu_like_1d", "gpu_like_opt1", "gpu_like_opt2"]
GPU_LIKE = PROGRAMS[1:]
NAMES = [f"NUMPY_{program.upper()}" for program in PROGRAMS]

for_every_program = pytest.mark.parametrize("program", PROGRAMS)
for_every_backend = pytest.mark.parametrize("name", NAMES)


def module_of(program: str) -> ModuleType:
    return importlib.import_module(f"attention_kernels.backends.numpy.{program}")


def arrays(case: Case) -> list[np.ndarray]:
    return [x.numpy() for x in case.inputs("cpu")]


# Right results


@for_every_backend
@pytest.mark.parametrize(("seqlen", "head_dim"), [(1, 1), (17, 1), (18, 3), (33, 40), (40, 256)])
def test_any_seqlen_and_head_dim(name, seqlen, head_dim):
    for is_causal in (True, False):
        case = Case(seqlen, head_dim, batch=2, num_heads=3, is_causal=is_causal)
        assert run_case(get_backend(name), case, "cpu").passed, case


@for_every_program
@pytest.mark.parametrize("blocks", [(32, 8), (8, 32), (5, 7), (1, 1), (64, 64)])
def test_any_tile(program, blocks):
    """Where block_m is greater than block_n, a tile may be hidden from some of the rows only."""
    block_m, block_n = blocks
    for is_causal in (True, False):
        case = Case(43, 32, is_causal=is_causal)
        o = module_of(program).attention(
            *arrays(case), 32**-0.5, is_causal, block_m=block_m, block_n=block_n
        )
        assert judge(torch.from_numpy(o), *case.inputs("cpu"), is_causal=is_causal).passed


def test_the_five_programs_agree():
    case = Case(77, 64, batch=2, dtype=torch.float64)
    for is_causal in (True, False):
        o = [module_of(p).attention(*arrays(case), 0.125, is_causal) for p in PROGRAMS]
        for other in o[1:]:
            np.testing.assert_allclose(other, o[0], rtol=0, atol=1e-14)
        # Other buffers and fewer passes do the same arithmetic.
        assert np.array_equal(o[3], o[2])
        assert np.array_equal(o[4], o[2])


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
@for_every_backend
def test_no_tensor_is_copied(name):
    spec = get_backend(name)
    q, k, v = Case(20, 32).inputs("cpu")
    if spec.needs_contiguous:
        q, k, v = (x.contiguous() for x in (q, k, v))
    with torch.profiler.profile() as profiler:
        spec.attention(q, k, v)
    ran = {event.key for event in profiler.key_averages()}
    assert f"attention_kernels::{name.lower()}" in ran
    assert not ran & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::empty"}


# Tiles, passes and buffers


@pytest.mark.parametrize(("is_causal", "tiles"), [(True, 28), (False, 49)])
@for_every_program
def test_tiles_that_no_row_sees_are_skipped(program, is_causal, tiles, monkeypatch):
    assert (BLOCK_M, BLOCK_N) == (16, 16)
    module, visited = module_of(program), 0
    process_kv_tile = module.process_kv_tile

    def count(*arguments):
        nonlocal visited
        visited += 1
        return process_kv_tile(*arguments)

    monkeypatch.setattr(module, "process_kv_tile", count)
    module.attention(*arrays(Case(100, 8, num_heads=1)), 1.0, is_causal)
    assert visited == tiles


@pytest.mark.parametrize(("program", "passes"), list(zip(GPU_LIKE, (13, 13, 13, 6), strict=True)))
def test_the_number_of_passes_over_a_tile(program, passes):
    (function,) = ast.parse(inspect.getsource(module_of(program).process_kv_tile)).body
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    assert len(calls) == passes
    assert len(function.body) == 1 + passes  # passes and the docstring


# All sizes differ. One vector of block_m numbers is large enough to show in the peak, and the
# numbers in one thread's registers are not.
ROWS, COLUMNS, HEAD_DIM = 4096, 8, 12
MATRIX, VECTOR, OUTPUT = ROWS * COLUMNS, ROWS, ROWS * HEAD_DIM
KEPT = [OUTPUT, COLUMNS * HEAD_DIM, COLUMNS * HEAD_DIM, OUTPUT, VECTOR, VECTOR]
NINE = {
    "scores": MATRIX,
    "scores_shifted": MATRIX,
    "weights": MATRIX,
    "tile_max": VECTOR,
    "row_max_new": VECTOR,
    "tile_sum": VECTOR,
    "row_sum_new": VECTOR,
    "alpha": VECTOR,
    "o_scaled": OUTPUT,
}
GONE_IN_OPT1 = {"scores_shifted", "weights", "tile_max", "tile_sum"}
FIVE = {name: size for name, size in NINE.items() if name not in GONE_IN_OPT1}
TWO = {"scores": MATRIX, "alpha": VECTOR}


def run_and_measure(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """Run one block of threads over two tiles; return its buffers' sizes and the peak in bytes.

    tracemalloc sees what NumPy allocates, the hidden temporaries of expressions, too.
    """
    used: list[SharedMemory] = []

    class Recorded(SharedMemory):
        def __init__(self, dtype):
            super().__init__(dtype)
            used.append(self)

    monkeypatch.setattr(module, "SharedMemory", Recorded, raising=False)
    qkv = arrays(Case(2 * COLUMNS, HEAD_DIM, num_heads=1, dtype=torch.float64))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        module.attention(*qkv, 1.0, True, block_m=ROWS, block_n=COLUMNS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return [buffer.size for shared in used for buffer in shared.buffers], peak - before


def hidden(sizes: list[int], peak: int) -> float:
    """Return the memory in use besides the buffers, in vectors of one number per row of a block."""
    return (peak - 8 * sum(sizes)) / (8 * VECTOR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "temporaries"), list(zip(GPU_LIKE, (NINE, NINE, FIVE, TWO), strict=True))
)
def test_the_claimed_buffers_are_the_only_ones(program, temporaries, monkeypatch):
    assert (len(NINE), len(FIVE), len(TWO)) == (9, 5, 2)
    module = module_of(program)
    assert module.Temporaries._fields == tuple(temporaries)
    sizes, peak = run_and_measure(module, monkeypatch)
    assert sizes == KEPT + list(temporaries.values())
    assert 0 <= hidden(sizes, peak) < 0.5
