"""The decode step of large batches in our own kernels, emulated on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gpt2_infer import GPT2, Sampling
from gpt2_infer.engines import batch_step
from gpt2_infer.engines.batch_step import BatchStep
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.model import KVCache
from tests.gpt2_infer.engines.test_continuous import check_any_batch, make_requests

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
LENGTHS = [3, 9, 1, 7, 20]


def make_model(dtype: torch.dtype) -> GPT2:
    decoder = "DECODE_SPLIT_KV_VERSION_3"
    return GPT2.from_pretrained("demo", device="cpu", dtype=dtype, decode_attention=decoder)


def filled_cache(model: GPT2) -> KVCache:
    """Return rows of LENGTHS tokens, which are part of a larger cache."""
    whole = KVCache.allocate(model, len(LENGTHS) + 1, 24)
    cache = KVCache(whole.kv[:, :, :-1], whole.seqlens[:-1])
    tokens = torch.randint(300, 8000, (len(LENGTHS), 20), generator=torch.manual_seed(1))
    model(tokens, seqlens=torch.tensor(LENGTHS), cache=cache)
    return cache


def step_over(model: GPT2, cache: KVCache, tokens: Tensor) -> BatchStep:
    lengths, logprobs = torch.tensor(LENGTHS, dtype=torch.int32), torch.zeros(len(LENGTHS))
    active = torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32)
    return BatchStep(model, cache, tokens, lengths, active, logprobs)


def check_exactness(found: Tensor, naive: Tensor, reference: Tensor) -> None:
    budget = 2 * (naive.double() - reference).abs().max()
    assert (found.double() - reference).abs().max() <= budget


@pytest.mark.parametrize("dtype", DTYPES)
# From this many terms on, a product has two parts.
@pytest.mark.parametrize("long", [256, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_step_is_as_exact_as_pytorch(dtype, long, monkeypatch):
    monkeypatch.setattr(batch_step, "LONG", long)
    model, tokens = make_model(dtype), torch.tensor([500, 600, 700, -1, 900])
    exact = GPT2.from_pretrained("demo", device="cpu", dtype="float32").double()
    exact.load_state_dict(model.state_dict())
    expected, theirs, ours = (filled_cache(one) for one in (exact, model, model))
    truth = exact.decode(tokens.clamp(min=0), expected)
    pytorch = model.decode(tokens.clamp(min=0), theirs)
    step = step_over(model, ours, tokens)
    logits = step.logits()
    check_exactness(logits, pytorch, truth)
    check_exactness(ours.kv, theirs.kv, expected.kv)
    assert torch.equal(ours.seqlens, theirs.seqlens)

    step.choose(logits)
    exact_logprobs = logits.double().log_softmax(-1).max(-1).values
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(step.logprobs.double(), exact_logprobs, rtol=0, atol=2e-6)
    assert (step.lengths - torch.tensor(LENGTHS)).tolist() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_attention_is_that_of_the_backend_bit_for_bit(dtype, monkeypatch):
    model, tokens = make_model(dtype), torch.tensor([500, 600, 700, 800, 900])
    found = []
    for name in (batch_step.ATTENTION, "none"):  # the backend whose attention is fused
        monkeypatch.setattr(batch_step, "ATTENTION", name)
        cache = filled_cache(model)
        found.append((step_over(model, cache, tokens).logits(), cache.kv))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_attention_does_not_read_what_the_step_writes(monkeypatch):
    """Attention may start before the work ahead of it on the stream has ended."""
    model, run, found = make_model(torch.float16), BatchStep._run, []

    def too_early(step, kernel, rows, **fields):
        if kernel == batch_step.ATTEND:
            step.cache.seqlens.copy_(step.lengths)  # as before begin()
        run(step, kernel, rows, **fields)

    for each in (run, too_early):
        monkeypatch.setattr(BatchStep, "_run", each)
        found.append(step_over(model, filled_cache(model), torch.full((5,), 500)).logits())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_are_as_exact_as_in_pytorch(dtype):
    model = make_model(dtype)
    exact = GPT2.from_pretrained("demo", device="cpu", dtype="float32").double()
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(300, 8000, (3, 16), generator=torch.manual_seed(1))
    lengths, slots = torch.tensor([5, 16, 1]), torch.tensor([2, 0, 3])
    caches = [KVCache.allocate(one, 4, 24) for one in (exact, model, model)]
    expected, theirs, ours = caches
    for one, cache in ((exact, expected), (model, theirs)):
        cache.slots = slots
        cache.logits = one(tokens, seqlens=lengths, cache=cache)[:, 0]
    step = step_over(model, KVCache.allocate(model, len(LENGTHS), 24), torch.zeros(5).long())
    logits = step.prompts(model, ours, tokens, lengths, slots)
    check_exactness(logits, theirs.logits, expected.logits)
    check_exactness(ours.kv, theirs.kv, expected.kv)
    assert not ours.kv[:, :, 1].any()
    assert not ours.kv[..., 16:, :].any()


@pytest.mark.slow
@pytest.mark.usefixtures("race_checked")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_races(dtype, monkeypatch):
    test_a_step_is_as_exact_as_pytorch(dtype, 256, monkeypatch)
    test_prompts_are_as_exact_as_in_pytorch(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8200, 8195])
def test_a_token_is_chosen_as_pytorch_does(dtype, columns):
    model = make_model(dtype)
    cache = KVCache.allocate(model, len(LENGTHS), 24)
    rows = torch.randn(len(LENGTHS), columns, generator=torch.manual_seed(0)).to(dtype)
    logits = rows[:, :8192]  # the rest is padding
    rows[:, 8192:] = torch.nan
    logits[0, 5] = torch.nan
    logits[1, 8191] = torch.inf
    logits[2] = -torch.inf
    logits[3, :8000] = -torch.inf
    logits[4, [17, 4000, 8191]] = 9.0  # of equals the first
    step = step_over(model, cache, torch.zeros(len(LENGTHS), dtype=torch.long))
    step.choose(logits)
    expected = Sampling().choose(logits.float(), torch.zeros(len(LENGTHS)))
    assert torch.equal(step.tokens, expected)
    assert step.tokens[:3].eq(-1).all()
    assert step.tokens[4] == 17
    logprobs = logits.double().log_softmax(-1).max(-1).values[3:]
    torch.testing.assert_close(step.logprobs[3:].double(), logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "sampling", [pytest.param(Sampling(), marks=pytest.mark.slow), Sampling(1.0, top_k=50, seed=3)]
)
def test_rows_are_those_of_pytorch_and_bitwise_equal_in_any_batch(sampling, monkeypatch):
    model = make_model(torch.float16)
    requests = make_requests(model, 5, sampling=sampling, max_new_tokens=4)
    pytorch = dict(Continuous(model, batch=3).run(requests))
    monkeypatch.setattr(batch_step, "refusals", lambda *_: [])
    done = check_any_batch(model, requests, 3)
    same = [i for i, one in done.items() if one.tokens == pytorch[i].tokens]
    assert len(same) >= 3
    for i in same:
        assert done[i].logprob == pytest.approx(pytorch[i].logprob, abs=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=50, seed=3)])
def test_a_large_batch_on_a_gpu(sampling):
    model = GPT2.from_pretrained("demo", device="cuda", dtype="bfloat16")
    assert not batch_step.refusals(model, 256)
    assert batch_step.refusals(model, 8)
    requests = make_requests(model, 400, sampling=sampling, most_tokens=60, max_new_tokens=6)
    done = dict(Continuous(model, batch=256).run(requests))
    random.Random(1).shuffle(requests)
    assert done == dict(Continuous(model, batch=256).run(requests))
    exact = GPT2.from_pretrained("demo", device="cuda")
    for i, request in requests[:50]:
        if tokens := done[i].tokens:
            ids = torch.tensor(request.rows[0] + tokens, device="cuda")
            logits = exact(ids[None], logits_to_keep=0)[0].log_softmax(-1)[:-1]
            each = logits.gather(1, ids[1:, None])[-len(tokens) :]
            assert done[i].logprob == pytest.approx(each.sum().item(), abs=1.5)
    if sampling.is_greedy:  # rounding moves what is drawn
        eager = Continuous(model, batch=256, engine="eager")
        for other in (eager, Continuous(model, batch=8)):  # a small batch: PyTorch's operations
            found = dict(other.run(requests))
            assert sum(one.tokens == found[i].tokens for i, one in done.items()) >= 280
