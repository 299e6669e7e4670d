"""NVIDIA's compute-sanitizer on the three forms of the fused step.

The models are small; the portable step is built from compute_80's PTX, and its hidden units'
projection goes through a ring. The steps cross the end of a split of attention.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys

import pytest
import torch

from attention_kernels.inspection.sanitize import TOOLS, faults_on_gpu
from gpt2_infer.engines import fused
from gpt2_infer.model import KVCache
from tests.gpt2_infer.engines.common import random_model
from tests.gpt2_infer.engines.test_fused import CONFIG, ONE_KERNEL, step_of

CHAIN = dataclasses.replace(CONFIG, n_layer=2, n_inner=4096)
MANY_HEADS = dataclasses.replace(CONFIG, n_layer=2, n_embd=512, n_head=16, n_positions=300)
# Each form's model, batch and shared memory of a block. With many heads, two blocks attend to three
# splits.
FORMS = {
    "portable": (CHAIN, 1, 50),
    "chain": (CHAIN, 1, 227),
    "chain, many heads": (MANY_HEADS, 8, 227),
    "one kernel": (dataclasses.replace(ONE_KERNEL, n_layer=2), 1, 227),
}
FIRST, STEPS = 126, 3  # cached tokens before the first step, and the number of steps


@torch.inference_mode()
def run_steps(form: str) -> None:
    """Run some steps over a random cache."""
    config, batch, shared_kb = FORMS[form]
    model = random_model(config, torch.bfloat16).to("cuda")
    cache = KVCache.allocate(model, batch, config.n_positions)
    cache.kv.copy_(torch.randn(cache.kv.shape))
    cache.seqlens.fill_(FIRST)
    tokens = torch.zeros(batch, config.n_positions, dtype=torch.long, device="cuda")
    newest, lengths = tokens[:, 0].clone(), torch.full_like(tokens[:, 0], FIRST + 1)
    state = fused.State(cache, newest, tokens, lengths)
    step = step_of(model, state, shared_kb, portable=form == "portable")
    assert fused.shape_on(model, batch).is_one_kernel == (form == "one kernel")
    for _ in range(STEPS):
        step()
    assert step.logits.isfinite().all()
    assert cache.seqlens.tolist() == [FIRST + STEPS] * batch


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tool", [*TOOLS, "synccheck"])
def test_compute_sanitizer_finds_no_fault(tool, form):
    if form != "portable" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("early launches need compute capability 9.0")
    run_steps(form)  # builds it
    assert faults_on_gpu(tool, [__file__, form], timeout_s=60) == []


if __name__ == "__main__":
    run_steps(sys.argv[1])
