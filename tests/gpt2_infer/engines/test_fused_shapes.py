"""The shapes that the fused step is compiled for: what fits in a GPU's shared memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention_kernels.inspection import resources
from attention_kernels.ladder import compilers
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines.fused import StepShape


@pytest.mark.parametrize(
    ("size", "dtype", "most_rows"),
    [
        ((768, 12), torch.float32, 4),
        ((1024, 16), torch.float32, 0),  # FC2 takes 128 KB
        ((768, 12), torch.bfloat16, 8),
        ((1024, 16), torch.bfloat16, 8),
        ((1280, 20), torch.float16, 8),
        ((1600, 25), torch.bfloat16, 0),  # FC2 takes 100 KB
    ],
)
def test_what_fits_in_99_kb(size, dtype, most_rows):
    """A block has 99 KB of shared memory on RTX 40 and 50."""
    width, heads = size
    config = GPT2Config(n_embd=width, n_head=heads)
    shapes = [StepShape(config, dtype, batch, 128, 99 * 1024) for batch in (1, 2, 4, 8)]
    assert [shape.fits for shape in shapes] == [shape.batch <= most_rows for shape in shapes]
    assert len({tuple(shape.products.values()) for shape in shapes}) == 1  # packed once


@pytest.mark.parametrize(
    ("width", "dtype", "shared_kb", "missing"),
    [
        (768, torch.float32, 99, []),
        (1600, torch.bfloat16, 99, []),
        (
            1600,
            torch.float32,
            99,
            ["a block of LOGITS needs 115 KB of shared memory, and this device has 99 KB"],
        ),
    ],
)
def test_what_fits_where_the_portable_step_runs(width, dtype, shared_kb, missing):
    config = GPT2Config(n_embd=width, n_head=width // 64)
    shape = StepShape(config, dtype, 8, 128, shared_kb * 1024, is_portable=True)
    assert shape.refusals == missing
    # Batches give the same bits as single rows.
    assert shape.products == dataclasses.replace(shape, batch=1).products


@pytest.mark.parametrize(
    ("size", "shared_kb", "different", "expected"),
    [
        ((768, 12), 227, {}, True),
        ((768, 12), 227, {"batch": 2}, False),
        ((768, 12), 227, {"is_portable": True}, False),
        ((768, 12), 227, {"clusters": 11}, False),
        ((768, 12), 99, {}, False),
        ((1024, 16), 227, {}, False),
        ((1600, 25), 227, {}, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_runs_all_layers_of_gpt2_small(size, shared_kb, different, expected, dtype):
    config = GPT2Config(n_embd=size[0], n_head=size[1])
    shape = StepShape(config, dtype, 1, 132, shared_kb * 1024)
    assert dataclasses.replace(shape, **different).is_one_kernel == expected


@pytest.mark.slow
@pytest.mark.skipif(not compilers.find_nvcc(), reason="needs nvcc")
@pytest.mark.parametrize(
    ("dtype", "archs"),
    [(torch.float32, {"80", "120"}), (torch.bfloat16, {"89", "90"})],
)
def test_nvcc_compiles_the_portable_step(dtype, archs):
    for arch in compilers.nvcc_architectures() & archs:
        shared = resources.LIMITS[arch].shared_kb_per_block * 1024
        shape = StepShape(GPT2Config(), dtype, 1, 128, shared, is_portable=True)
        assert len(resources.compile_version(shape.version(), arch)) == 8
