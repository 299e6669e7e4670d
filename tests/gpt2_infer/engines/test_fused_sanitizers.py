"""NVIDIA's compute-sanitizer on the portable step, built from compute_80's PTX.

The model is small, and its hidden units' projection goes through a ring. The steps cross the end of
a split of attention.
"""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from attention_kernels.inspection.sanitize import TOOLS, faults_on_gpu
from gpt2_infer.model import KVCache
from tests.gpt2_infer.engines.common import random_model
from tests.gpt2_infer.engines.test_fused import CONFIG, State, step_of

SMALL = dataclasses.replace(CONFIG, n_layer=2, n_inner=4096)
SHARED_KB = 50
FIRST, STEPS = 126, 3  # cached tokens before the first step, and the number of steps


@torch.inference_mode()
def run_steps(device: str) -> None:
    """Run some steps over a random cache."""
    model = random_model(SMALL, torch.bfloat16).to(device)
    cache = KVCache.allocate(model, 1, SMALL.n_positions)
    cache.kv.copy_(torch.randn(cache.kv.shape))
    cache.seqlens.fill_(FIRST)
    tokens = torch.zeros(1, SMALL.n_positions, dtype=torch.long, device=device)
    newest, lengths = tokens[:, 0].clone(), torch.full_like(tokens[:, 0], FIRST + 1)
    step = step_of(model, State(cache, newest, tokens, lengths), SHARED_KB, portable=True)
    for _ in range(STEPS):
        step()
    assert step.logits.isfinite().all()
    assert cache.seqlens.item() == FIRST + STEPS


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", [*TOOLS, "synccheck"])
def test_compute_sanitizer_finds_no_fault_in_the_portable_step(tool):
    run_steps("cuda")  # builds it
    assert faults_on_gpu(tool, [__file__], timeout_s=60) == []


if __name__ == "__main__":
    run_steps("cuda")
