"""The fused engine of recompute: its products, emulated on the CPU, inside a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gpt2_infer.model
from gpt2_infer import GPT2, RequestError, generate, linear
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines.base import capture
from gpt2_infer.engines.recompute import Forward, Recompute
from gpt2_infer.model import KVCache
from gpt2_infer.product import KERNELS
from gpt2_infer.request import MODES
from tests.gpt2_infer.engines.common import SIZES, SMALL, published, random_model, request_for

CONFIG = dataclasses.replace(SMALL, n_layer=3, scale_attn_by_inverse_layer_idx=True)


def with_emulated_products(model, products, monkeypatch):
    monkeypatch.setattr(gpt2_infer.model, "check_products", lambda *_: None)
    return model.with_products(products)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "config", [CONFIG, dataclasses.replace(CONFIG, n_layer=1, tie_word_embeddings=False)]
)
@torch.inference_mode()
def test_the_logits_and_the_cache_are_those_of_the_modules(config, kernel, monkeypatch):
    model, (products, *_) = random_model(config), kernel.split(",")
    monkeypatch.setattr(linear, "kernel_for", lambda *_: kernel)
    other = with_emulated_products(model, products, monkeypatch)
    tokens, seqlens = torch.randint(0, 101, (3, 37)), torch.tensor([37, 1, 20])
    cache, wanted = (KVCache.allocate(model, 3, 40) for _ in range(2))
    expected = model(tokens, seqlens=seqlens, cache=wanted)[:, 0]
    logits = Forward(other)(other, tokens, seqlens, cache)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(cache.kv, wanted.kv, rtol=0, atol=1e-4)
    assert cache.seqlens.tolist() == [37, 1, 20]
    torch.testing.assert_close(other(tokens, seqlens=seqlens)[:, 0], expected, rtol=0, atol=1e-4)
    assert torch.equal(Forward(other)(other, tokens, seqlens), logits)


@torch.inference_mode()
def test_release_frees_packed_weights(monkeypatch):
    model = with_emulated_products(random_model(CONFIG), "3xfp16", monkeypatch)
    tokens = torch.randint(0, 101, (1, 9))
    before = model(tokens)
    for parameter in model.h[0].mlp.parameters():
        parameter.data *= 2  # which PyTorch does not track
    model.release()
    after = model(tokens)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model.with_products("ieee-fp32")(tokens), rtol=0, atol=1e-4)


def test_products_that_cannot_be_used_are_refused():
    model = random_model(CONFIG)
    with pytest.raises(RequestError, match=r"3xfp16 cannot be used: it needs a CUDA device$"):
        model.with_products("3xfp16")


def test_all_reasons_are_listed():
    config = GPT2Config(vocab_size=101, n_embd=96, n_layer=1, n_head=2, activation_function="relu")
    model = GPT2(config).requires_grad_(False).to(torch.bfloat16)
    request = request_for(model, [[1] * 1000] * 3, max_new_tokens=1)
    reasons = Recompute.refusals(model, request, "fused")
    for word in ("CUDA device", "bfloat16", "96 and 384", "relu", "3000 positions"):
        assert sum(word in reason for reason in reasons) == 1
    with pytest.raises(RequestError, match="does not support this: it needs a CUDA device; dtype"):
        generate(model, [[1]], max_new_tokens=1, engine="fused")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("prompts", "count"),
    [([[15496, 11, 616, 1438, 318, 1757, 13, 314]], 504), ([[1], [4] * 40, [5, 6]], 100)],
)
def test_greedy_text_of_all_engines_is_the_same(prompts, count, mode):
    model = published("gpt2")
    eager = generate(model, prompts, max_new_tokens=count, mode=mode, engine="eager")
    for engine in ("graph", "auto"):
        text = generate(model, prompts, max_new_tokens=count, mode=mode, engine=engine)
        assert text.engine == ("fused" if engine == "auto" else engine)
        assert text.tokens == eager.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
@torch.inference_mode()
def test_every_size_on_a_gpu(name):
    model = published(name)
    forward = Forward(model)
    for batch, seqlen in ((1, 1), (1, 500), (2, 1024)):
        tokens = torch.randint(0, 50257, (batch, seqlen), device="cuda")
        seqlens = torch.arange(seqlen, seqlen - batch, -1, device="cuda")
        expected = model(tokens, seqlens=seqlens)[:, 0]
        torch.testing.assert_close(forward(model, tokens, seqlens), expected, rtol=0, atol=5e-5)
    assert generate(model, [[1, 2, 3]], max_new_tokens=40, engine="fused").engine == "fused"


@pytest.mark.gpu
@torch.inference_mode()
def test_a_repeated_pass_gives_the_same_bits():
    """A race shows only in some of the repetitions."""
    model = published("gpt2")
    forward = Forward(model)
    tokens, seqlens = torch.randint(0, 50257, (1, 256)).cuda(), torch.tensor([250]).cuda()
    expected, logits = forward(model, tokens, seqlens), torch.empty(1, 50257, device="cuda")
    graph = capture(lambda: logits.copy_(forward(model, tokens, seqlens)))
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(500):
        graph.replay()
        same &= (logits == expected).all()
    assert same
