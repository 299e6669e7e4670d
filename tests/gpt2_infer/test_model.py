from __future__ import annotations

import random

import pytest
import torch

from attention_kernels import UnsupportedError, get_backend
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import GPT2, ConfigError, GPT2Config, RequestError, generate
from gpt2_infer.model import KVCache
from tests.gpt2_infer.bench.common import TWO, add

ACTIVATIONS = ["gelu_new", "gelu", "relu", "silu", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"]
BACKENDS = (*TWO, "PYTORCH_SDPA_FLASH_ATTENTION")
SEEDS = range(len(ACTIVATIONS) * len(BACKENDS))  # every pair of activation and backend


def random_fields(seed: int) -> dict:
    draw = random.Random(seed)
    n_head = draw.choice([1, 2, 3, 4])
    switches = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    return {
        "n_layer": draw.choice([1, 2, 3]),
        "n_head": n_head,
        "n_embd": n_head * draw.choice([4, 10, 16, 32]),
        "n_inner": draw.choice([None, 24, 100]),
        "n_positions": draw.choice([40, 64]),
        "vocab_size": draw.choice([50, 131]),
        "activation_function": ACTIVATIONS[seed % len(ACTIVATIONS)],
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3, 0.1]),
        **{name: draw.random() < 0.5 for name in (*switches, "tie_word_embeddings")},
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_equal_transformers(seed, save_checkpoint):
    folder, theirs = save_checkpoint(**random_fields(seed))
    ours = GPT2.from_pretrained(str(folder), device="cpu", attention=BACKENDS[seed % len(BACKENDS)])
    tokens = torch.randint(
        0, ours.config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.01  # equal logits would prove nothing
    assert (ours(tokens, logits_to_keep=0) - expected).abs().max() < 1e-4
    assert (ours(tokens) - expected[:, -1:]).abs().max() < 1e-4
    # Also with a cache: a prefill of 7 tokens, then one token at a time.
    cache = KVCache.allocate(ours, 3, 40)
    logits = [ours(tokens[:, :7], cache=cache)[:, 0]]
    logits += [ours.decode(tokens[:, i], cache) for i in range(7, 40)]
    assert (torch.stack(logits, 1) - expected[:, 6:]).abs().max() < 1e-4


def test_logits_to_keep_is_as_in_transformers(save_checkpoint):
    folder, theirs = save_checkpoint(vocab_size=50)
    ours, tokens = GPT2.from_pretrained(str(folder), device="cpu"), torch.randint(0, 50, (2, 9))
    for keep in (1, 3, 0, torch.tensor([0, 4, 8])):
        expected = theirs(tokens, logits_to_keep=keep).logits
        torch.testing.assert_close(ours(tokens, logits_to_keep=keep), expected, atol=1e-4, rtol=0)


def test_invalid_calls_are_refused(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    model = GPT2.from_pretrained(str(folder), device="cpu")
    tokens, cache = torch.zeros(3, 12, dtype=torch.long), KVCache.allocate(model, 1, 8)
    for wrong in (tokens[0], tokens.float(), tokens[:0]):
        with pytest.raises(RequestError, match="tokens must be"):
            model(wrong)
    for call in (model, lambda ids: model.decode(ids[0], cache)):
        with pytest.raises(RequestError, match="token ids must be from 0 to 49"):
            call(torch.tensor([[50]]))
    with pytest.raises(RequestError, match=r"from 1 to 64 tokens .*, not 65"):
        model(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("upcast", [False, True])
def test_half_precision_stays_near_float32(dtype, upcast, save_checkpoint):
    folder, theirs = save_checkpoint(vocab_size=50, reorder_and_upcast_attn=upcast)
    model = GPT2.from_pretrained(str(folder), device="cpu", dtype=dtype)
    tokens = torch.randint(0, 50, (2, 30))
    expected, half = theirs(tokens).logits, theirs.to(dtype)(tokens).logits.float()
    error = (model(tokens, logits_to_keep=0).float() - expected).abs().max()
    assert error <= 2 * (half - expected).abs().max() + 1e-3


def test_a_model_that_upcasts_asks_its_backend_for_float32(save_checkpoint, clean_registry):
    spec = add("TEST_FLOAT32", naive_attention, get_backend("NAIVE_PYTORCH").load().decode)
    options = {"device": "cpu", "dtype": torch.bfloat16, "attention": spec.name}
    folder, _ = save_checkpoint(vocab_size=50, reorder_and_upcast_attn=True)
    model = GPT2.from_pretrained(str(folder), **options)
    assert generate(model, [[1, 2]], max_new_tokens=2, mode="kv-cache").attention == spec.name
    with pytest.raises(UnsupportedError, match="dtype bfloat16"):
        GPT2.from_pretrained("demo", **options)


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ConfigError, match="activation_function 'wavelet' is not known"):
        GPT2(GPT2Config(activation_function="wavelet"))
