"""The kernels inside the model: each generates the same text as plain PyTorch."""

from __future__ import annotations

import functools
from typing import get_args

import pytest
import torch

from attention_kernels import get_backend, list_backends
from gpt2_infer import GPT2
from gpt2_infer.cli.options import Dtype
from gpt2_infer.diverge import diverge
from tests.conftest import usable

DTYPES = get_args(Dtype)
HEAD_DIM = 64  # head_dim of the models in these tests
SPECS = [
    spec
    for spec in list_backends()
    if spec.family not in ("pytorch", "decode")
    and HEAD_DIM in (spec.head_dims or (HEAD_DIM,))
    and {*spec.dtypes} & {*DTYPES}
]
# On the CPU the last of each family is enough: test_every_backend.py tests all of them.
LAST = {spec.family: spec.name for spec in SPECS}.values()


def check_text(model: GPT2, name: str, prompt: str, new_tokens: int) -> None:
    """Check that texts are equal, or part where rounding explains both tokens; see diverge()."""
    spec = usable(name, model.device.type)
    found = diverge(model, "NAIVE_PYTORCH", spec, prompt, max_new_tokens=new_tokens)
    assert found.passed, str(found)
    if model.dtype == torch.float32 and found.step is not None:
        # The error of two logits on each side turns A's choice into B's.
        assert found.a.margin + found.b.margin <= found.a.allowed + found.b.allowed, str(found)


@functools.cache
def on_gpu(dtype: str) -> GPT2:
    return GPT2.from_pretrained("demo", device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("one_tile")
@pytest.mark.parametrize(
    "spec", [s for s in SPECS if "cuda" in s.device_types], ids=lambda spec: spec.name
)
def test_greedy_text_is_plain_pytorchs(spec):
    for dtype in {*spec.dtypes} & {*DTYPES}:
        check_text(on_gpu(dtype), spec.name, "Once upon a time there was a", new_tokens=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST)
def test_greedy_text_on_the_cpu_is_plain_pytorchs(name, save_checkpoint):
    folder, _ = save_checkpoint(n_embd=2 * HEAD_DIM, vocab_size=50)
    dtype = next(dtype for dtype in DTYPES if dtype in get_backend(name).dtypes)
    model = GPT2.from_pretrained(str(folder), device="cpu", dtype=dtype)
    check_text(model, name, "Once upon", new_tokens=4)
