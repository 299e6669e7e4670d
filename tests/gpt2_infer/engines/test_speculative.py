"""Guesses of the next tokens change how many passes a text takes, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpt2_infer import GPT2, RequestError, Sampling, engines, generate
from gpt2_infer.engines import base, fused, speculative
from gpt2_infer.engines.fused import Fused, State, Step, StepShape
from gpt2_infer.engines.speculative import BURST, RECENT, Text
from tests import removal
from tests.gpt2_infer.engines.common import SMALL, imitate_graphs, published, random_model
from tests.gpt2_infer.engines.test_fused import CONFIG, LONG, ONE_KERNEL, state_after, step_of

REPEATING = replace(SMALL, n_positions=96)  # tied random weights repeat one token
OPEN = replace(REPEATING, tie_word_embeddings=False)
GREEDY = {"mode": "kv-cache", "ignore_eos": True}


@pytest.fixture
def captured(monkeypatch):
    """Let the CPU run the engine; return the list of captured graphs."""
    removal.use_droppable_step(monkeypatch)

    def shape_on(model, batch):
        return StepShape(model.config, model.dtype, batch, 6, 227 * 1024)

    monkeypatch.setattr(fused, "shape_on", shape_on)
    monkeypatch.setattr(Fused, "refusals", lambda *_: [])
    monkeypatch.setattr(engines, "room", lambda device: 2**30)

    def record(engine, body):
        engine.reset()  # unlike a real graph, an imitated one runs when it is captured
        engine.prefill()
        return Fused.record(engine, body)

    monkeypatch.setattr(speculative.Speculative, "record", record)
    return imitate_graphs(monkeypatch, base)


@pytest.mark.parametrize("config", [REPEATING, pytest.param(OPEN, marks=pytest.mark.gpu)])
def test_the_text_is_the_same_in_fewer_passes_where_it_repeats(config, captured):
    model, prompt = random_model(config), [[7, 3, 9]]
    for new_tokens in (1, 2, BURST + 1, 94, 60):  # 94 fill all positions
        plain = generate(model, prompt, max_new_tokens=new_tokens, engine="eager", **GREEDY)
        found = generate(model, prompt, max_new_tokens=new_tokens, guesses=3, **GREEDY)
        assert found.tokens == plain.tokens
        assert (found.engine, plain.passes) == ("fused", None)
        assert found.passes <= new_tokens - 1
    assert found.passes < 40 if config is REPEATING else found.passes > 40
    graphs = len(captured)
    again = generate(model, prompt, max_new_tokens=60, guesses=3, **GREEDY)
    assert (again.tokens, again.passes, len(captured)) == (plain.tokens, found.passes, graphs)


@pytest.mark.slow
@pytest.mark.parametrize(("eos", "stop"), [(56, ()), (100, ["Yumu"]), (100, ["umum"]), (100, [])])
def test_a_text_is_streamed_and_ends_as_without_guesses(eos, stop, captured, demo):
    model = random_model(replace(OPEN, eos_token_id=(eos,)))
    model.tokenizer = demo.tokenizer
    streamed = []
    for options in ({"engine": "eager"}, {"guesses": 3}, {"guesses": 3}):
        pieces = []
        options |= {"max_new_tokens": 60, "mode": "kv-cache", "stop": stop}
        found = generate(
            model, [[7, 3, 9]], on_text=lambda _, x, to=pieces: to.append(x), **options
        )
        assert "".join(pieces) == found.texts[0]
        assert found.passes is None or found.passes < len(found.tokens[0])
        streamed.append((found.tokens, found.texts, found.finish_reasons))
    assert streamed[1:] == streamed[:1] * 2
    assert found.finish_reasons == ["end-of-text" if eos == 56 else "stop" if stop else "length"]


@pytest.mark.parametrize("new_tokens", [pytest.param(3, marks=pytest.mark.slow), 12])
def test_no_pass_goes_beyond_the_last_position(new_tokens, captured, monkeypatch):
    class Within(Step):
        def __init__(self, model, state, is_greedy, **options):
            super().__init__(model, state, is_greedy, **options)
            self.state = state

        def __call__(self):
            cache, rows = self.state.cache, len(self.state.newest)
            assert int(cache.seqlens[0]) + rows <= cache.kv.shape[4]
            super().__call__()

    monkeypatch.setattr(speculative, "Step", Within)
    model, prompt = random_model(REPEATING), [[7] * (REPEATING.n_positions - new_tokens)]
    plain = generate(model, prompt, max_new_tokens=new_tokens, engine="eager", **GREEDY)
    found = generate(model, prompt, max_new_tokens=new_tokens, guesses=3, **GREEDY)
    assert found.tokens == plain.tokens


@torch.inference_mode()
def check_guesses(model, length: int, guesses: int, right: int, **how) -> None:
    """Compare a pass of which `right` guesses are right with as many plain steps, bit for bit.

    length: at least 6 + guesses, so that the tokens that came first end before the last three.
    """
    plain, state = (state_after(model, [length]) for _ in range(2))
    step = step_of(model, plain, **how)
    expected = []
    for _ in range(right + 1):
        step()
        expected.append(step.logits[0].clone())
    # The last three tokens came first, too; what follows now followed, and then something else.
    later = plain.tokens[0, length + 1 :].clone()
    later[right] = (later[right] + 1) % model.config.vocab_size
    for each in (plain, state):
        each.tokens[0, :3] = each.tokens[0, length - 2 : length + 1]
        each.tokens[0, 3 : 4 + guesses] = later[: 1 + guesses]
    read = torch.zeros(1 + guesses, dtype=torch.long, device=model.device)
    read[0] = state.newest[0]
    several = State(state.cache, read, state.tokens, state.lengths)
    guess = step_of(model, several, has_guesses=True, **how)
    guess()
    for row, logits in enumerate(expected):
        assert torch.equal(guess.logits[row], logits)
    count = length + 2 + right
    assert (int(state.lengths[0]), int(state.cache.seqlens[0])) == (count, count - 1)
    assert torch.equal(state.tokens[0, length:count], plain.tokens[0, length:count])
    assert torch.equal(state.cache.kv[..., : count - 1, :], plain.cache.kv[..., : count - 1, :])
    assert int(read[0]) == int(plain.newest[0])


@pytest.mark.parametrize(
    ("config", "length", "guesses", "right", "how"),
    [
        (LONG, 254, 3, 2, {}),  # the rows' keys begin a split
        pytest.param(ONE_KERNEL, 20, 3, 3, {}, marks=pytest.mark.slow),
        pytest.param(ONE_KERNEL, 20, 3, 0, {}, marks=pytest.mark.gpu),
        pytest.param(ONE_KERNEL, 126, 7, 5, {}, marks=pytest.mark.slow),
        pytest.param(CONFIG, 126, 1, 1, {"portable": True}, marks=pytest.mark.slow),
    ],
)
def test_a_pass_with_guesses_gives_the_bits_of_plain_steps(
    config, length, guesses, right, how, monkeypatch
):
    removal.use_droppable_step(monkeypatch)
    model = random_model(replace(config, tie_word_embeddings=False))
    check_guesses(model, length, guesses, right, **how)


@pytest.mark.slow
@pytest.mark.usefixtures("race_checked")
def test_nothing_races_in_a_pass_with_guesses():
    check_guesses(random_model(replace(LONG, tie_word_embeddings=False)), 254, 3, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("guesses", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pass_with_guesses_gives_the_bits_of_plain_steps_on_a_gpu(dtype, guesses, portable):
    model = published("gpt2", dtype)
    for length in (20, 126, 900):
        for right in (0, guesses):
            check_guesses(model, length, guesses, right, portable=portable)


@pytest.mark.gpu
@pytest.mark.parametrize("guesses", [1, 3, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_models_text_is_the_same_on_a_gpu(dtype, guesses):
    model = GPT2.from_pretrained("demo", device="cuda", dtype=dtype)
    options = {"max_new_tokens": 504, "engine": "fused", **GREEDY}
    plain = generate(model, "Once upon a time", **options)
    found = generate(model, "Once upon a time", guesses=guesses, **options)
    assert found.tokens == plain.tokens
    assert found.passes <= 503


def test_a_text_knows_whether_it_repeats():
    text = Text(range(20))
    assert not text.repeats
    text.add([*range(5), *range(5, 5 + RECENT)])
    assert text.repeats
    text.add(range(100, 100 + RECENT))
    assert not text.repeats


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"guesses": 2}, "1, 3 or 7 guesses"),
        ({"mode": "recompute"}, "a KV cache"),
        ({"sampling": Sampling(0.7)}, "greedy sampling"),
        ({"engine": "graph"}, "the fused engine"),
        ({"prompts": [[1], [2]]}, "a single prompt"),
        ({}, "it needs a CUDA device"),
    ],
)
def test_what_guesses_need(options, reason):
    options = {"prompts": [[1]], "guesses": 3, "mode": "kv-cache"} | options
    with pytest.raises(RequestError, match=reason):
        generate(random_model(SMALL), max_new_tokens=4, **options)
