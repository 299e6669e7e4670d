from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.backends import pytorch
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import GPT2, RequestError, Sampling, generate
from gpt2_infer import sampling as torch_sampling
from gpt2_infer.engines import continuous, slots
from gpt2_infer.engines.continuous import NOT_FINITE, Continuous
from tests.conftest import DEVICES
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.engines.common import RecordedGraph, published, request_for

SAMPLING = Sampling(1.0, top_k=50, top_p=0.95, seed=3)


def make_model(device: str) -> GPT2:
    decode = "NAIVE_PYTORCH" if device == "cpu" else None
    return GPT2.from_pretrained("demo", device=device, decode_attention=decode)


def make_requests(model, count, *, sampling=SAMPLING, **fields):
    """Return requests with prompts of 1 to 20 tokens."""
    rng = random.Random(0)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(300, 8000) for _ in range(rng.randint(1, 20))]
        drawn = dataclasses.replace(sampling, seed=sampling.seed + i)
        options = {"max_new_tokens": 10, "mode": "kv-cache", "sampling": drawn, **fields}
        requests.append((i, request_for(model, [prompt], **options)))
    return requests


def test_torchs_default_device_changes_nothing():
    model = make_model("cpu")
    requests = make_requests(model, 2)
    expected = dict(Continuous(model, batch=2).run(requests))
    with torch.device("meta"):
        assert dict(Continuous(model, batch=2).run(requests)) == expected


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
        alone = generate(
            model,
            request.rows,
            max_new_tokens=10,
            mode="kv-cache",
            sampling=request.sampling,
            **fields,
        )
        assert done[i].tokens == alone.tokens[0]
        assert done[i].text == alone.texts[0]
        assert done[i].finish_reason == alone.finish_reasons[0]
    if not sampling.is_greedy:
        assert {one.finish_reason for one in done.values()} == {"length", "stop"}


def same_in_any_batch(model):
    requests = make_requests(model, 16)
    done = dict(Continuous(model, batch=8).run(requests))
    random.Random(1).shuffle(requests)
    for some in (requests[:1], requests[:7], requests):
        again = dict(Continuous(model, batch=8).run(some))
        assert again == {i: done[i] for i, _ in some}


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_bitwise_equal_in_any_batch(device):
    same_in_any_batch(make_model(device))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING])
def test_a_second_run_prepares_nothing_and_gives_the_same(sampling, monkeypatch):
    captured: list[RecordedGraph] = []

    def capture(body, shared_with=None):
        captured.append(RecordedGraph(body))
        return captured[-1]

    def visible(k_cache, seqlens):
        positions = k_cache.shape[1]
        return positions, torch.arange(positions) < seqlens[:, None, None, None]

    monkeypatch.setattr(slots, "capture", capture)
    monkeypatch.setattr(slots, "pool_bytes", lambda graph: 1000)
    monkeypatch.setattr(continuous, "room", lambda device: 2**30)
    # On a CPU these read values, which a graph cannot do.
    monkeypatch.setattr(pytorch, "_visible", visible)
    monkeypatch.setattr(torch_sampling, "_largest", lambda logits: logits.max(-1))
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_unaligned_logits_do_not_depend_on_the_batch(dtype):
    same_in_any_batch(published("gpt2", dtype))


def test_logprob_is_that_of_the_tokens_in_the_models_own_distribution(demo):
    ((_, request),) = make_requests(demo, 1)
    ((_, completion),) = Continuous(demo, batch=2).run([(0, request)])
    ids = request.rows[0] + completion.tokens
    logits = demo(torch.tensor([ids]), logits_to_keep=0)[0].double()
    each = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    expected = each[-len(completion.tokens) :].sum().item()
    assert completion.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.gpu  # batch/test_job.py tests the CPU
def test_a_row_that_is_not_finite_does_not_affect_others():
    model = make_model("cuda")
    model.lm_head = torch.nn.Linear(256, 8192, bias=False, device="cuda").requires_grad_(False)
    model.lm_head.weight.copy_(model.wte.weight)
    requests = make_requests(model, 8)
    expected = dict(Continuous(model, batch=2).run(requests))
    model.wte.weight[7] = torch.nan
    requests[4][1].rows[0][0] = 7
    done = dict(Continuous(model, batch=2).run(requests))
    assert done == expected | {4: NOT_FINITE}


def test_prompts_up_to_the_last_position(save_checkpoint):
    folder, _ = save_checkpoint()
    model = GPT2.from_pretrained(str(folder), device="cpu")
    rows = [[5] * 60, [6] * 3, [7] * 33]
    options = {"max_new_tokens": 4, "mode": "kv-cache", "ignore_eos": True}
    requests = [(i, request_for(model, [row], **options)) for i, row in enumerate(rows)]
    done = dict(Continuous(model, batch=2).run(requests))
    alone = generate(model, rows, **options)
    assert [done[i].tokens for i in range(3)] == alone.tokens


@pytest.mark.parametrize(
    ("per_batch", "short", "long", "expected"),
    [
        (2, 9, 7, [(16, 4), (16, 4), (16, 1), (32, 4), (32, 3)]),
        # One row is a small group, but without it a fourth round would decode that row alone.
        (1, 15, 9, [(16, 8), (16, 7), (32, 1), (32, 8)]),
        (1, 15, 8, [(16, 8), (16, 7), (32, 8)]),
    ],
)
def test_rows_of_the_next_length_fill_the_slots_that_a_length_leaves(
    per_batch, short, long, expected, monkeypatch
):
    """Otherwise slots are idle for as long as a row takes."""
    groups = []
    monkeypatch.setattr(slots, "GROUPS", per_batch)
    join = slots.Slots.join
    monkeypatch.setattr(
        slots.Slots, "join", lambda *args: groups.append((args[1], len(args[2]))) or join(*args)
    )
    decode = "DECODE_SPLIT_KV_VERSION_1"
    model = GPT2.from_pretrained("demo", device="cpu", decode_attention=decode)
    options = {"max_new_tokens": 2, "mode": "kv-cache", "ignore_eos": True}
    rows = [[300 + i] * length for i, length in enumerate([3] * short + [20] * long)]
    requests = [(i, request_for(model, [row], **options)) for i, row in enumerate(rows)]
    done = dict(Continuous(model, batch=8).run(requests))
    assert groups == expected
    for i in (0, short - 1, short, len(rows) - 1):
        alone = generate(model, [rows[i]], **options)
        assert done[i].tokens == alone.tokens[0]


def test_an_idle_device_gets_work_before_texts_are_decoded(demo, monkeypatch):
    """It would otherwise wait while the host decodes the texts of rows that ended together."""
    monkeypatch.setattr(slots.Work, "is_done", True)
    events = []
    read = slots.Work.results
    monkeypatch.setattr(slots.Work, "results", lambda one: events.append("step") or read(one))
    requests = make_requests(demo, 12, sampling=Sampling(), ignore_eos=True)
    for _ in Continuous(demo, batch=4).run(requests):
        events.append("text")
    assert events.count("text") == 12
    # At most a batch of texts is left over: that of the first four rows while the next four run.
    before = events[: events.index("text")]
    assert before.count("step") > 2 * 10
    rest = events[len(before) :]
    assert rest[:5] == ["text"] * 4 + ["step"]


def test_the_callers_device_is_current_between_two_results(demo, monkeypatch):
    inside = []

    @contextlib.contextmanager
    def on_device():
        inside.append(True)
        yield
        inside.pop()

    step = slots.Slots.step
    monkeypatch.setattr(slots.Slots, "step", lambda one: step(one) if inside else 1 / 0)
    engine = Continuous(demo, batch=2)
    monkeypatch.setattr(engine.model, "on_device", on_device)
    for _ in engine.run(make_requests(demo, 4)):
        assert not inside
        assert not torch.is_inference_mode_enabled()


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch-size must be 1 or more, not 0"),
        ({"batch": 1, "engine": "fused"}, "eager or the graph engine, not in 'fused'"),
        ({"batch": 1, "engine": "graph"}, "the graph engine needs a CUDA device"),
    ],
)
def test_unsupported_settings_are_refused(demo, fields, message):
    with pytest.raises(RequestError, match=message):
        Continuous(demo, **fields)
