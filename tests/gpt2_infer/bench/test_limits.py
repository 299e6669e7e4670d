"""The probe counts its operations correctly, in the emulator and on a GPU."""

from __future__ import annotations

import pytest

from gpt2_infer.bench.limits import KINDS, THREADS, instruction_tflops, rate
from tests.conftest import needs_compiler

FRAGMENT = {"mma_float16": 16 * 8 * 16, "mma_tf32": 16 * 8 * 8}  # multiply-adds


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_is_counted(kind):
    run, counts = rate(kind, blocks=2, iterations=3, device="cpu")
    run()
    each = 16 * THREADS if kind == "ffma" else 8 * FRAGMENT[kind] * THREADS // 32
    assert counts.double().sum() == 2 * 3 * each


@pytest.mark.gpu
def test_tensor_cores_do_more_than_ffma():
    rates = instruction_tflops()
    assert rates["ffma_tflops"] < rates["mma_tf32_tflops"] < rates["mma_float16_tflops"]
