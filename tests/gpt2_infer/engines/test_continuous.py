from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import GPT2, Sampling, generate
from gpt2_infer.engines import continuous, slots
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.generation import run
from gpt2_infer.prepared import Prepared
from tests.conftest import DEVICES
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.engines.common import imitate_graphs, published, request_for

SAMPLING = Sampling(1.0, top_k=50, top_p=0.95, seed=3)


def make_model(device: str) -> GPT2:
    decode = "NAIVE_PYTORCH" if device == "cpu" else None
    return GPT2.from_pretrained("demo", device=device, decode_attention=decode)


def make_requests(model, count, *, sampling=SAMPLING, most_tokens=20, **fields):
    """Return requests with random prompts."""
    rng = random.Random(0)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(300, 8000) for _ in range(rng.randint(1, most_tokens))]
        drawn = dataclasses.replace(sampling, seed=sampling.seed + i)
        options = {"max_new_tokens": 10, "mode": "kv-cache", "sampling": drawn, **fields}
        requests.append((i, request_for(model, [prompt], **options)))
    return requests


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("sampling", "fields"), [(SAMPLING, {"stop": ["ing", "."]}), (Sampling(), {"ignore_eos": True})]
)
@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_equal_rows_run_alone(device, sampling, fields, ahead, monkeypatch):
    monkeypatch.setitem(continuous.AHEAD, device, ahead)
    model = make_model(device)
    requests = make_requests(model, 8, sampling=sampling, **fields)
    done = dict(Continuous(model, batch=4).run(requests))
    assert sorted(done) == [*range(8)]
    for i, request in requests:
        alone = run(model, request)
        assert done[i].tokens == alone.tokens[0]
        assert done[i].text == alone.texts[0]
        assert done[i].finish_reason == alone.finish_reasons[0]
    if not sampling.is_greedy:
        assert {one.finish_reason for one in done.values()} == {"length", "stop"}


def check_any_batch(model, requests, batch):
    """Check that each row's completion is the same in any batch; return the completions."""
    done = dict(Continuous(model, batch=batch).run(requests))
    random.Random(1).shuffle(requests)
    for some in (requests[:1], requests[:7], requests):
        again = dict(Continuous(model, batch=batch).run(some))
        assert again == {i: done[i] for i, _ in some}
    return done


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_bitwise_equal_in_any_batch(device):
    model = make_model(device)
    check_any_batch(model, make_requests(model, 16), 8)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING])
def test_a_second_run_prepares_nothing_and_gives_the_same(sampling, monkeypatch):
    captured = imitate_graphs(monkeypatch, slots)
    monkeypatch.setattr(continuous, "room", lambda device: 2**30)
    model = GPT2.from_pretrained(
        "demo", device="cpu", attention="NAIVE_PYTORCH", decode_attention="NAIVE_PYTORCH"
    )
    requests = make_requests(model, 6, sampling=sampling, ignore_eos=True)
    expected = dict(Continuous(model, batch=3).run(requests))
    for _ in range(2):
        engine = Continuous(model, batch=3)
        engine.engine = "graph"
        assert dict(engine.run(requests)) == expected
        assert len(captured) == 2  # a step, and a group of prompts
    model.wte.weight[:] *= 1.5
    engine.model.weights_changed()
    changed = dict(engine.run(requests))
    assert len(captured) == 4
    assert changed == dict(Continuous(model, batch=3).run(requests)) != expected


def test_slots_that_do_not_fit_free_the_idle_engines_of_other_models(demo, monkeypatch):
    other, requests = Prepared(), make_requests(demo, 3)
    expected = dict(Continuous(demo, batch=3).run(requests))

    class Short(slots.Slots):
        def __init__(self, *arguments):
            if other.take("idle"):
                raise torch.OutOfMemoryError
            super().__init__(*arguments)

    monkeypatch.setattr(continuous, "Slots", Short)
    for key in ("idle", "another"):
        other.put(key, SimpleNamespace(nbytes=1), other.stamp, 10)
    assert dict(Continuous(demo, batch=3).run(requests)) == expected
    assert other.take("another") is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_unaligned_logits_do_not_depend_on_the_batch(dtype):
    model = published("gpt2", dtype)
    check_any_batch(model, make_requests(model, 16), 8)


def test_logprob_is_that_of_the_tokens_in_the_models_own_distribution(demo):
    ((_, request),) = make_requests(demo, 1)
    ((_, completion),) = Continuous(demo, batch=2).run([(0, request)])
    ids = request.rows[0] + completion.tokens
    logits = demo(torch.tensor([ids]), logits_to_keep=0)[0].double()
    each = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    expected = each[-len(completion.tokens) :].sum().item()
    assert completion.logprob == pytest.approx(expected, abs=1e-4)


def test_rows_of_the_next_length_fill_the_slots_that_a_length_leaves(monkeypatch):
    """Otherwise slots are idle for as long as a row takes."""
    groups, join = [], slots.Slots.join

    def spy(self, length, requests, free):
        groups.append((length, len(requests)))
        return join(self, length, requests, free)

    monkeypatch.setattr(slots, "GROUPS", 1)
    monkeypatch.setattr(slots.Slots, "join", spy)
    decode = "DECODE_SPLIT_KV_VERSION_1"
    model = GPT2.from_pretrained("demo", device="cpu", decode_attention=decode)
    options = {"max_new_tokens": 2, "mode": "kv-cache", "ignore_eos": True}
    rows = [[300 + i] * length for i, length in enumerate([3] * 15 + [20] * 9)]
    requests = [(i, request_for(model, [row], **options)) for i, row in enumerate(rows)]
    done = dict(Continuous(model, batch=8).run(requests))
    # One row is a small group, but without it a fourth round would decode that row alone.
    assert groups == [(16, 8), (16, 7), (32, 1), (32, 8)]
    for i in (0, 14, 15, 23):
        assert done[i].tokens == generate(model, [rows[i]], **options).tokens[0]


def test_an_alias_is_resolved_by_row_length(clean_registry):
    def choose(dtype, head_dim, device_type, seqlen=None):
        return get_backend("NAIVE_PYTORCH" if seqlen in (None, 32) else "PYTORCH_SDPA_MATH")

    add("ALIAS", naive_attention, chooses=choose)
    model = GPT2.from_pretrained("demo", device="cpu", attention="ALIAS")
    requests = make_requests(model, 16)
    done = dict(Continuous(model, batch=4).run(requests))
    for i, request in requests:
        is_short = len(request.rows[0]) <= 16
        assert done[i].backend == ("PYTORCH_SDPA_MATH" if is_short else "NAIVE_PYTORCH")
    assert len({one.backend for one in done.values()}) == 2
