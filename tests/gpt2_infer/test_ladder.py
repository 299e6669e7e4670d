"""The ladders inside the model: every version writes the text that plain PyTorch writes."""

from __future__ import annotations

import functools

import pytest
import torch

from attention_kernels import list_backends
from gpt2_infer import GPT2, generate
from gpt2_infer.bench.diverge import diverge
from gpt2_infer.cli import DTYPES
from tests.conftest import DEVICES, usable

HEAD_DIM = 64  # the bundled model's
NAMES = [
    spec.name
    for spec in list_backends()
    if spec.family not in ("pytorch", "numpy")
    and HEAD_DIM in (spec.head_dims or (HEAD_DIM,))
    and {*spec.dtypes} & {*DTYPES}
]
PROMPT = "Once upon a time there was a"
NEW_TOKENS = {"cuda": 512, "cpu": 12}  # emulated on the CPU


@functools.cache
def load(device: str, dtype: torch.dtype = torch.float32) -> GPT2:
    return GPT2.from_pretrained("demo", device=device, dtype=dtype, attention="NAIVE_PYTORCH")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plain_pytorchs(name, device):
    """Equal token by token, or parted where rounding explains both tokens: see diverge()."""
    spec = usable(name, device)
    # Interpreted, each dtype takes long; two are enough.
    for dtype in [dtype for dtype in DTYPES if dtype in spec.dtypes][
        : 3 if device == "cuda" else 2
    ]:
        model = load(device, getattr(torch, dtype))
        found = diverge(model, "NAIVE_PYTORCH", spec, PROMPT, max_new_tokens=NEW_TOKENS[device])
        assert found.passed, str(found)
        if dtype == "float32" and found.step is not None:
            assert min(found.a.margin, found.b.margin) < 1e-4, str(found)


@pytest.mark.parametrize("name", ["CUSTOM_CUDA_VERSION_1", "CUSTOM_CUDA_VERSION_12"])
def test_a_batch_and_a_cache_through_the_ladder(name):
    usable(name, "cpu")
    plain = load("cpu")
    prompts = [PROMPT, "The", '"Come here," said the old man']
    for mode in ("recompute", "kv-cache"):
        got, expected = (
            generate(m, prompts, max_new_tokens=6, mode=mode, ignore_eos=True)
            for m in (plain.with_attention(name), plain)
        )
        assert got.attention == name
        assert got.tokens == expected.tokens
    assert got.decode_attention == "PYTORCH_SDPA_FLASH_ATTENTION"
