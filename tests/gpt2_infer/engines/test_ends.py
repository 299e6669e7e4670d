"""The two ends of our own forward pass, emulated on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpt2_infer.config import GPT2Config
from gpt2_infer.engines.ends import Ends
from gpt2_infer.sampling import Sampling
from tests.gpt2_infer.engines.common import random_model

CONFIG = GPT2Config(vocab_size=3001, n_positions=40, n_embd=160, n_layer=1, n_head=2)
INF = float("inf")


pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17])
@torch.inference_mode()
def test_logits_are_the_modules(batch):
    model = random_model(dataclasses.replace(CONFIG, n_embd=416))  # two loops over a row
    ours = Ends(model)
    ours.begin(torch.zeros(batch, 1, dtype=torch.long), packs=False)
    x = torch.randn(batch, 416)
    torch.testing.assert_close(ours.logits(x), model.head(x), rtol=0, atol=1e-4)


@torch.inference_mode()
def test_weights_that_were_laid_out_on_a_cpu():
    model, tokens = random_model(CONFIG), torch.randint(0, 3001, (1, 5))
    wanted, x = model.embed(tokens), torch.randn(1, 160)
    logits = model.head(x)
    model.wte.weight = torch.nn.Parameter(model.wte.weight.t().contiguous().t())
    ours = Ends(model)
    assert torch.equal(ours.begin(tokens, packs=False)[0], wanted)
    torch.testing.assert_close(ours.logits(x), logits, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_the_token_is_the_samplers():
    cases = torch.randn(9, 3001)
    cases[0] = -cases[0].abs()
    cases[1, [2000, 70, 71]] = 9.0  # the first of equals
    cases[2, 1234] = INF
    cases[3] = -INF
    cases[4, :3000] = -INF
    cases[5, 8] = float("nan")
    cases[6, 8] = -float("nan")
    cases[7, 3000] = 1e30
    cases[8] = -0.0
    cases[8, 5:] = 0.0
    model = random_model(CONFIG)
    model.wte.weight.zero_()
    ours, x = Ends(model), torch.zeros(1, 160)
    x[0, 0] = 1.0
    newest = torch.zeros(1, dtype=torch.long)
    wanted = Sampling(0.0).choose(cases, newest)
    assert wanted.tolist()[1:] == [70, -1, -1, 3000, -1, -1, 3000, 0]
    for logits, token in zip(cases, wanted, strict=True):
        model.wte.weight[:, 0] = logits
        lengths, tokens = torch.tensor([2]), torch.full((1, 4), 55)
        ours.begin(tokens[:, :1], packs=False)
        ours.logits(x)
        ours.choose(tokens, lengths, newest)
        assert newest.item() == token
        assert lengths.item() == 3
        assert tokens.tolist() == [[55, 55, token, 55]]


@pytest.mark.usefixtures("race_checked")
@torch.inference_mode()
def test_nothing_races():
    model = random_model(CONFIG)
    ours, x = Ends(model), torch.randn(3, 160)
    ours.begin(torch.randint(0, 3001, (3, 2)), packs=True)
    largest = ours.logits(x).argmax(1)
    lengths, newest = torch.tensor([1, 0, 2]), torch.zeros(3, dtype=torch.long)
    tokens = torch.zeros(3, 4, dtype=torch.long)
    ours.choose(tokens, lengths, newest)
    assert torch.equal(newest, largest)
    assert torch.equal(tokens[range(3), [1, 0, 2]], largest)
    assert lengths.tolist() == [2, 1, 3]
