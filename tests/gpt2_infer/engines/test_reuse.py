"""Calls of the same shape share an engine: what it captured, packed and allocated."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpt2_infer import GPT2, Sampling, engines, generate
from gpt2_infer.engines import base, fused, lend_engine
from gpt2_infer.engines.fused import Fused, StepShape
from gpt2_infer.prepared import MAX_ENGINES, Prepared
from gpt2_infer.request import MODES
from tests.gpt2_infer.engines.common import SMALL, imitate_graphs, random_model, request_for

CONFIG = replace(SMALL, tie_word_embeddings=False)  # tied random weights would repeat one token
PROMPTS = [[7, 3], [5, 6, 90, 2]]
OTHERS = [[9, 4, 4, 1], [70]]
SHORTER = [[8, 3, 5], [55, 10]]
DRAWN = Sampling(0.9, 50, 0.95, seed=3)


@pytest.fixture
def captured(monkeypatch):
    """Let the CPU run all engines; return the list of captured graphs."""

    def shape_on(model, batch):
        return StepShape(model.config, model.dtype, batch, 6, 227 * 1024)

    monkeypatch.setattr(base, "GRAPH_LENGTH_STEP", 8)
    monkeypatch.setattr(fused, "shape_on", shape_on)
    for kind in (engines.Recompute, engines.Cached, Fused):
        monkeypatch.setattr(kind, "refusals", lambda *_: [])
    monkeypatch.setattr(engines, "room", lambda device: 2**30)
    monkeypatch.setattr(engines, "FusedOnCPU", Fused)
    return imitate_graphs(monkeypatch, base)


def call(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 6, "ignore_eos": True, "engine": "graph"} | options
    return generate(model, prompts, **options).tokens


@pytest.mark.parametrize("drawn", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["graph", "fused"])
def test_a_second_call_prepares_nothing_and_writes_the_same(engine, mode, drawn, captured):
    model = random_model(CONFIG)

    def both(prompts, new_tokens=6):
        options = {"mode": mode, "sampling": drawn, "max_new_tokens": new_tokens}
        before = len(captured)
        text = call(model, prompts, engine=engine, **options)
        assert text == call(model, prompts, engine="eager", **options)
        return len(captured) - before, text

    both(PROMPTS, 1)  # which runs no step with a KV cache
    first, text = both(PROMPTS)
    assert first > 0 or mode == "recompute"
    assert both(PROMPTS) == (0, text)
    assert both(OTHERS)[0] == 0  # prompts of equal length
    new, _ = both(SHORTER)
    assert new == (0 if mode == "recompute" else 1)  # a prompt of another length
    both(PROMPTS, 1)
    assert both(PROMPTS)[1] == text


@pytest.mark.parametrize("mode", MODES)
def test_only_calls_of_the_same_shape_share_an_engine(mode, captured):
    model = random_model(CONFIG)
    shapes = (
        {},
        {"prompts": PROMPTS[:1]},
        {"max_new_tokens": 20},
        {"sampling": DRAWN},
        {"sampling": Sampling(0.8, 50, 0.95)},
        {"engine": "fused"},
    )
    for options in (*shapes, *shapes):
        wanted = call(model, mode=mode, **options | {"engine": "eager"})
        assert call(model, mode=mode, **options) == wanted
        other = model.with_attention("NAIVE_PYTORCH", "NAIVE_PYTORCH")
        assert call(other, mode=mode, **options) == wanted


@pytest.mark.parametrize("engine", ["graph", "fused"])
@pytest.mark.parametrize("mode", MODES)
def test_changed_weights_are_used(mode, engine, captured):
    model = random_model(CONFIG)
    before = call(model, mode=mode, engine=engine)
    model.h[1].mlp.c_fc.weight.data.mul_(-1)
    model.weights_changed()
    changed = call(model, mode=mode, engine=engine)
    assert changed == call(model, mode=mode, engine="eager") != before
    model.load_state_dict(random_model(CONFIG).state_dict())
    model.double().float()
    assert call(model, mode=mode, engine=engine) == before


def waiting(model):
    return [engine for _, engine in model.prepared._waiting]


def test_nan_of_the_last_call_is_not_in_the_cache(captured):
    model = random_model(CONFIG)
    wanted = call(model, mode="kv-cache")
    (engine,) = waiting(model)
    with torch.inference_mode():
        engine.cache.kv.fill_(torch.nan)
    assert call(model, mode="kv-cache") == wanted
    assert waiting(model) == [engine]


def test_neither_models_nor_engines_outlive_their_use(captured):
    model = random_model(CONFIG)
    for discard in (model.release, lambda: None):
        call(model, mode="kv-cache", engine="fused")
        (engine,) = map(weakref.ref, waiting(model))
        discard()
        gc.collect()
        assert (engine() is None) == (discard == model.release)
    alive = weakref.ref(model)
    del model, discard
    gc.collect()
    assert alive() is engine() is None


def test_a_copied_model_starts_with_an_empty_cache(captured):
    model = random_model(CONFIG)
    call(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not waiting(other)
        assert call(other) == call(model)


def lend(model):
    return lend_engine(model, request_for(model, PROMPTS, max_new_tokens=5, engine="graph"))


@torch.inference_mode()
def test_an_engine_serves_one_call_at_a_time(captured):
    model = random_model(CONFIG)
    (one, keep_one), (two, keep_two) = lend(model), lend(model)
    assert one is not two
    keep_one()
    keep_two()
    lent = lend(model), lend(model)
    assert {engine for engine, _ in lent} == {one, two}
    model.release()
    for _, keep in lent:
        keep()
    assert not waiting(model)


def test_a_failed_call_leaves_no_engine(captured, monkeypatch):
    model = random_model(CONFIG)
    call(model)
    with monkeypatch.context() as patch:
        patch.setattr(base.Engine, "accept", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(model, max_new_tokens=30)
    assert not waiting(model)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_out_of_memory_frees_cached_engines_and_retries(engine, captured, monkeypatch):
    model, other = random_model(CONFIG), random_model(CONFIG)
    wanted = call(model, engine=engine)
    call(other)
    forward = GPT2.forward

    def short(*arguments, **options):
        if waiting(other):
            raise torch.OutOfMemoryError
        return forward(*arguments, **options)

    monkeypatch.setattr(GPT2, "forward", short)
    assert call(model, max_new_tokens=4, engine=engine) == [row[:4] for row in wanted]


def test_the_cache_of_engines_is_bounded():
    prepared, one = Prepared(), SimpleNamespace(nbytes=10)
    for key in range(MAX_ENGINES + 2):
        prepared.put(key, one, prepared.stamp, 1000)
    assert [prepared.take(key) is one for key in range(4)] == [False, False, True, True]
    prepared.put("last", SimpleNamespace(nbytes=991), prepared.stamp, 1000)
    assert [prepared.take(key) is None for key in (6, 9, "last")] == [True, True, False]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["graph", "fused"])
def test_calls_on_a_gpu_are_the_same(engine, mode, drawn):
    model = GPT2.from_pretrained("demo", device="cuda")
    options = {"mode": mode, "engine": engine, "sampling": drawn, "max_new_tokens": 60}
    first = call(model, **options)
    (kept,) = waiting(model)
    assert 0 < kept.nbytes < 2**30
    assert call(model, **options) == first
    assert waiting(model) == [kept]
    for prompts in (OTHERS, SHORTER):
        fresh = GPT2.from_pretrained("demo", device="cuda")
        assert call(model, prompts, **options) == call(fresh, prompts, **options)
    assert waiting(model) == [kept]
    model.release()
    assert not waiting(model)
    assert call(model, **options) == first


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_threads_may_generate_at_once_on_a_gpu(mode):
    model = GPT2.from_pretrained("demo", device="cuda")
    prompts = [[[5 + i, 300, 90, 2 + i]] for i in range(8)]
    fresh = GPT2.from_pretrained("demo", device="cuda")
    expected = [call(fresh, one, mode=mode, max_new_tokens=40) for one in prompts]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda one: call(model, one, mode=mode, max_new_tokens=40), prompts * 4)
        assert [*found] == expected * 4
