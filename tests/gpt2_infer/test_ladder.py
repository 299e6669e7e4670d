"""The float32 ladder inside the model: every version writes the text that plain PyTorch writes."""

from __future__ import annotations

import pytest
import torch

from attention_kernels import backends, get_backend
from gpt2_infer import GPT2, generate
from tests.conftest import DEVICES

NAMES = [spec.name for spec in backends() if spec.family == "custom-cuda"]
PROMPT = "Once upon a time there was a"
TIE = 1e-4  # logits nearer than this may change places by rounding
NEW_TOKENS = {"cuda": 512, "cpu": 24}  # emulated on the CPU


def load(name: str, device: str) -> GPT2:
    if reason := get_backend(name).unavailable_reason(device):
        pytest.skip(reason)
    return GPT2.from_pretrained("demo", device=device, attention=name)


def top_2_margin(model: GPT2, tokens: list[int]) -> float:
    """How far the most likely next token is ahead of the second."""
    logits = model(torch.tensor([tokens], device=model.device))[0, 0]
    first, second = logits.topk(2).values.tolist()
    return first - second


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plain_pytorchs(name, device):
    model, plain = load(name, device), load("NAIVE_PYTORCH", device)
    options = {"max_new_tokens": NEW_TOKENS[device], "ignore_eos": True}
    got, expected = (generate(m, PROMPT, **options) for m in (model, plain))
    assert got.attention == name
    assert len({*expected.tokens[0]}) > 8
    for at, (ours, theirs) in enumerate(zip(got.tokens[0], expected.tokens[0], strict=True)):
        if ours != theirs:
            prefix = expected.prompts[0] + expected.tokens[0][:at]
            assert top_2_margin(plain, prefix) < TIE, f"they part at token {at}, and it is no tie"
            break


@pytest.mark.parametrize("name", [NAMES[0], NAMES[-1]])
def test_a_batch_and_a_cache_through_the_ladder(name):
    model, plain = load(name, "cpu"), load("NAIVE_PYTORCH", "cpu")
    prompts = [PROMPT, "The", '"Come here," said the old man']
    for mode in ("recompute", "kv-cache"):
        got, expected = (
            generate(m, prompts, max_new_tokens=6, mode=mode, ignore_eos=True)
            for m in (model, plain)
        )
        assert got.tokens == expected.tokens
    assert got.decode_attention == "PYTORCH_SDPA_FLASH_ATTENTION"
