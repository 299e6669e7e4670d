from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch

from attention_kernels import KernelError, OutputError, UnavailableBackendError, UnsupportedError
from attention_kernels.contract import Kernels
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import GPT2, NotFiniteError, Request, RequestError, Sampling, generate
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.generation import run
from gpt2_infer.request import MODES
from tests.conftest import DEVICES
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.engines.common import request_for

PROMPTS = [
    "Once upon a time",
    "The",
    '"I don\'t know," said the old man, and he shut the door of the',
]
BACKENDS = ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION")


@pytest.fixture(scope="module")
def expected():
    """Return the token ids of a prompt, and the 40 that transformers generates after them."""
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint("demo")
    ids = checkpoint.tokenizer.encode(PROMPTS[0])
    theirs = AutoModelForCausalLM.from_pretrained(str(checkpoint.folder), dtype=torch.float32)
    text = theirs.eval().generate(
        torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids, text[0, len(ids) :].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_equal_transformers_generate(backend, mode, expected, demo):
    ids, tokens = expected
    got = generate(
        demo.with_attention(backend), [ids], max_new_tokens=40, mode=mode, ignore_eos=True
    )
    assert got.tokens == [tokens]
    assert got.finish_reasons == ["length"]
    assert got.attention == backend
    assert len({*tokens}) > 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampling", [pytest.param(Sampling(), marks=pytest.mark.slow), Sampling(0.9, 50, 0.95, seed=3)]
)
def test_a_batch_equals_its_members_alone(sampling, mode, device):
    model = GPT2.from_pretrained("demo", device=device)
    together = generate(model, PROMPTS, max_new_tokens=16, mode=mode, sampling=sampling)
    for row, prompt in enumerate(PROMPTS):
        own = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + row)
        alone = generate(model, prompt, max_new_tokens=16, mode=mode, sampling=own)
        assert together.tokens[row] == alone.tokens[0]
        assert together.texts[row] == alone.texts[0]
        assert together.finish_reasons[row] == alone.finish_reasons[0]


@pytest.mark.parametrize("mode", MODES)
def test_warm_up_prefill_and_generation_are_timed_separately(mode, demo, monkeypatch):
    """The fake clock advances by one at each reading."""
    moments = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(moments)))
    monkeypatch.setattr("gpt2_infer.generation.time", clock)
    done = generate(demo, PROMPTS[:2], max_new_tokens=4, mode=mode, ignore_eos=True)
    assert (done.warm_up_s, done.prefill_s, done.generation_s) == (1.0, 1.0, 2.0)
    assert (done.new_tokens, done.tokens_per_second) == (8, 4.0)


@pytest.mark.parametrize("new_tokens", [1, 5])
@pytest.mark.parametrize("run", [*MODES, "continuous"])
def test_each_token_takes_one_forward_pass(run, new_tokens, demo, monkeypatch):
    passes = 0

    def counting(original):
        def one(*arguments, **options):
            nonlocal passes
            passes += 1
            return original(*arguments, **options)

        return one

    for name in ("forward", "decode"):
        monkeypatch.setattr(GPT2, name, counting(getattr(GPT2, name)))
    if run == "continuous":
        request = request_for(demo, "Once", max_new_tokens=new_tokens, ignore_eos=True)
        ((_, done),) = Continuous(demo, batch=1).run([(0, request)])
        assert len(done.tokens) == new_tokens
    else:
        options = {"mode": run, "ignore_eos": True, "engine": "eager"}
        done = generate(demo, "Once", max_new_tokens=new_tokens, **options)
        assert done.new_tokens == new_tokens
    assert passes == new_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_graphs_and_devices_agree(mode, demo):
    model = GPT2.from_pretrained("demo", device="cuda")
    graphs = generate(model, PROMPTS, max_new_tokens=60, mode=mode)
    eager = generate(model, PROMPTS, max_new_tokens=60, mode=mode, engine="eager")
    assert graphs.engine != "eager"
    assert eager.engine == "eager"
    assert graphs.tokens == eager.tokens == generate(demo, PROMPTS, max_new_tokens=60).tokens


@pytest.mark.parametrize("engine", ["recompute", "kv-cache", "fused", "batch"])
def test_one_new_token_and_a_full_context(engine, save_checkpoint):
    """The last token needs no position: nothing is computed from it."""
    folder, theirs = save_checkpoint(n_positions=32)
    model = GPT2.from_pretrained(str(folder), device="cpu")
    options = {"mode": "recompute" if engine == "recompute" else "kv-cache", "ignore_eos": True}
    if engine == "fused":
        options["engine"] = "fused"
    for prompt, new_tokens in (([1, 2], 1), ([5] * 31, 2), ([5] * 32, 1), ([5], 32)):
        request = request_for(model, [prompt], max_new_tokens=new_tokens, **options)
        if engine == "batch":
            ((_, done),) = Continuous(model, batch=2).run([(0, request)])
        else:
            done = run(model, request)
        text = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        )
        assert text[0, len(prompt) :].tolist() in (done.tokens, *done.tokens)
    with pytest.raises(RequestError, match=r"2 prompt tokens and 32 new ones need 33 pos.* has 32"):
        generate(model, [[5, 5]], max_new_tokens=32)


def end_of_text_after(model: GPT2, prompt: str, steps: int) -> GPT2:
    """Make the token that the model generates in step `steps` its end-of-text token."""
    import dataclasses

    token = generate(model, prompt, max_new_tokens=steps, ignore_eos=True).tokens[0][-1]
    model.config = dataclasses.replace(model.config, eos_token_id=(token,))
    return model


@pytest.mark.parametrize("mode", MODES)
def test_end_of_text_ends_a_row_and_is_not_part_of_it(mode):
    model = GPT2.from_pretrained("demo", device="cpu")
    plain = generate(model, PROMPTS[:2], max_new_tokens=20, ignore_eos=True)
    model = end_of_text_after(model, PROMPTS[0], 12)
    ended = generate(model, PROMPTS[:2], max_new_tokens=20, mode=mode)
    for row in range(2):
        full = plain.tokens[row]
        eos = model.config.eos_token_id[0]
        expected = full[: full.index(eos)] if eos in full else full
        assert ended.tokens[row] == expected
        assert ended.finish_reasons[row] == ("end-of-text" if eos in full else "length")
    assert ended.finish_reasons[0] == "end-of-text"
    ignored = generate(model, PROMPTS[:2], max_new_tokens=20, mode=mode, ignore_eos=True)
    assert ignored.tokens == plain.tokens


@pytest.mark.parametrize("length", [1, 9, 24])
def test_a_stop_string_ends_the_text_before_it(length, demo):
    full = generate(demo, PROMPTS[0], max_new_tokens=24).texts[0]
    stop = full[30 : 30 + length]
    pieces: list[str] = []
    cut = generate(
        demo,
        PROMPTS[0],
        max_new_tokens=24,
        stop=["never in the text", stop],
        on_text=lambda _row, piece: pieces.append(piece),
    )
    assert cut.texts[0] == full[: full.index(stop)]
    assert cut.finish_reasons == ["stop"]
    assert "".join(pieces) == cut.texts[0]
    assert cut.new_tokens < 24
    assert generate(demo, PROMPTS[0], max_new_tokens=24, stop=stop).texts == cut.texts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("watched", [True, False])
def test_ctrl_c_keeps_what_was_generated(mode, watched, demo, monkeypatch):
    full = generate(demo, PROMPTS[0], max_new_tokens=20, ignore_eos=True).tokens[0]
    calls = 0
    original = Sampling.choose

    def interrupt(self, logits, uniform):
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return original(self, logits, uniform)

    monkeypatch.setattr(Sampling, "choose", interrupt)
    options = {"max_new_tokens": 20, "mode": mode, "engine": "eager"}
    cut = generate(demo, PROMPTS[0], ignore_eos=not watched, **options)
    assert cut.tokens == [full[:7]]
    assert cut.finish_reasons == ["interrupted"]
    calls = 7  # interrupt the next call in its first pass
    assert generate(demo, PROMPTS[0], **options).tokens == [[]]


def spoiled(where: str) -> Kernels:
    """Return plain attention with NaN in the second row, or in decoding."""

    def attention(q, k, v, softmax_scale, is_causal):
        o = naive_attention(q, k, v, softmax_scale, is_causal)
        if where == "row":
            o[1] *= torch.nan
        return o

    def decode(q, k_cache, v_cache, seqlens, softmax_scale):
        return q * torch.nan

    return Kernels(attention, decode if where == "decode" else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 50, 0.95)])
@pytest.mark.parametrize("where", ["row", "decode"])
def test_logits_that_are_not_finite_end_generation(
    where, sampling, watched, device, clean_registry
):
    kernels = spoiled(where)
    add("TEST_NAN", kernels.attention, kernels.decode)
    model = GPT2.from_pretrained("demo", device=device, attention="TEST_NAN")
    options = {"sampling": sampling, "ignore_eos": not watched, "max_new_tokens": 5}
    if where == "row":
        with pytest.raises(NotFiniteError, match=r"TEST_NAN in float32.* position 0 of prompt 2"):
            generate(model, [[5, 6, 7], [8]], **options)
        spared = generate(model, [[5, 6, 7], [8]], check_finite=False, **options)
        assert spared.tokens[1] == [0] * 5
    else:
        with pytest.raises(NotFiniteError, match=r"TEST_NAN in float32.* position 3 of prompt 1"):
            generate(model, [[5, 6, 7]], mode="kv-cache", **options)


def test_a_request_belongs_to_its_configuration(demo, save_checkpoint):
    folder, _ = save_checkpoint()
    other = GPT2.from_pretrained(str(folder), device="cpu")
    with pytest.raises(RequestError, match="another configuration"):
        run(other, request_for(demo, "The"))


def test_an_empty_prompt_is_the_start_of_a_document(demo):
    empty = generate(demo, "", max_new_tokens=10)
    assert empty.prompts == [[8191]]
    assert empty.tokens == generate(demo, "<|endoftext|>", max_new_tokens=10).tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[]]}, "a list of token ids must not be empty"),
        ({"prompts": [[8192]]}, "outside the vocabulary of 8192"),
        ({"max_new_tokens": 0}, "max-new-tokens must be an integer of 1 or more, not 0"),
        ({"max_new_tokens": 1025}, "need 1025 positions, but this model has 1024"),
        ({"mode": "magic"}, "mode must be one of recompute, kv-cache"),
        ({"stop": [""]}, "stop strings must be non-empty texts"),
        ({"stop": [3]}, "stop strings must be non-empty texts"),
        ({"prompts": 3}, "a text or a list of token ids: 'int' object is not iterable"),
        ({"prompts": [1, 2]}, "a text or a list of token ids: 'int' object is not iterable"),
        ({"prompts": [[1.5]]}, "a text or a list of token ids: 'float' object cannot be"),
        ({"prompts": torch.tensor([[0.5]])}, "a text or a list of token ids: 'float' object"),
        ({"max_new_tokens": 2.0}, "max-new-tokens must be an integer of 1 or more, not 2.0"),
        ({"sampling": 0}, "sampling must be a Sampling, not 0"),
        ({"stop": b"x"}, "stop strings must be non-empty texts"),
        ({"stop": 3}, "stop must be a Sequence, not 3"),
        ({"prompts": [b"ab"]}, "a text or a list of token ids: bytes are neither"),
        ({"prompts": [[True]]}, "a text or a list of token ids: True is not a token id"),
        ({"max_new_tokens": True}, "max-new-tokens must be an integer of 1 or more, not True"),
        ({"ignore_eos": "no"}, "ignore_eos must be a bool, not 'no'"),
        ({"on_text": 3}, "on_text must be callable, not 3"),
        ({"on_text": ""}, "on_text must be callable, not ''"),
    ],
)
def test_invalid_requests_are_refused(arguments, words, demo):
    with pytest.raises(RequestError, match=words):
        generate(demo, **({"prompts": "The"} | arguments))


def test_a_name_in_place_of_a_model_is_refused():
    with pytest.raises(RequestError, match="model must be a GPT2, not 'demo'"):
        generate("demo", "The")


@pytest.mark.parametrize(
    "prompts", [torch.tensor([[40, 50]]), np.array([[40, 50]]), [[np.int64(40), 50]], [(40, 50)]]
)
def test_token_ids_in_other_containers(prompts, demo):
    assert Request(config=demo.config, tokenizer=None, prompts=prompts).rows == [[40, 50]]


@pytest.mark.parametrize("mode", MODES)
def test_torchs_default_device_changes_nothing(mode, demo):
    options = {"max_new_tokens": 4, "mode": mode, "sampling": Sampling(1.0, seed=3)}
    expected = generate(demo, PROMPTS, **options).tokens
    with torch.device("meta"):
        assert generate(demo, PROMPTS, **options).tokens == expected
        model = GPT2.from_pretrained("demo", device="cpu")
        assert generate(model, PROMPTS, **options).tokens == expected


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_changes_nothing(device):
    model = GPT2.from_pretrained("demo", device=device)
    requests = [
        request_for(model, PROMPTS[:1], max_new_tokens=4, mode=mode, sampling=Sampling(1.0, seed=3))
        for mode in MODES
    ]

    def results():
        logits = model(torch.tensor(requests[0].rows, device=device))
        batch = dict(Continuous(model, batch=2).run(list(enumerate(requests[1:]))))
        model.release()
        return logits.tolist(), batch[0].tokens, [run(model, one).tokens for one in requests]

    expected = results()
    with torch.autocast(device, torch.bfloat16):
        assert results() == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_function_computes_attention(mode, demo):
    calls = 0

    def my_attention(q, k, v, softmax_scale, is_causal):
        nonlocal calls
        calls += 1
        return naive_attention(q, k, v, softmax_scale, is_causal)

    result = generate(demo.with_attention(my_attention), PROMPTS, max_new_tokens=3, mode=mode)
    assert result.tokens == generate(demo, PROMPTS, max_new_tokens=3, mode=mode).tokens
    assert result.attention == "my_attention"
    assert calls == (6 if mode == "kv-cache" else 18)  # 6 layers, in the prefill or for each token
    assert result.decode_attention != "my_attention"


def test_errors_in_a_function_name_it(demo):
    def my_attention(q, k, v):
        return q

    with pytest.raises(KernelError, match="my_attention raised TypeError"):
        generate(demo.with_attention(my_attention), "The")
    with pytest.raises(OutputError, match="<lambda> returned"):
        generate(demo.with_attention(lambda q, k, v, scale, causal: q.mT), "The")
    for wrong in ({"attention": 3}, {"attention": None, "decode_attention": my_attention}):
        with pytest.raises(RequestError, match="attention must be a backend or its name, not"):
            demo.with_attention(**wrong)


def test_backends_are_checked_before_the_work():
    for kind in ("attention", "decode_attention"):
        with pytest.raises(UnavailableBackendError, match="runs on cuda only, not on cpu"):
            GPT2.from_pretrained("demo", device="cpu", **{kind: "PYTORCH_SDPA_CUDNN_ATTENTION"})


def test_a_backend_without_a_decode_kernel(clean_registry):
    add("TEST_PREFILL_ONLY", naive_attention)
    DECODES = "PYTORCH_SDPA_FLASH_ATTENTION"
    model = GPT2.from_pretrained("demo", device="cpu", attention="TEST_PREFILL_ONLY")
    result = generate(model, "The", max_new_tokens=3, mode="kv-cache", engine="eager")
    assert (result.attention, result.decode_attention) == ("TEST_PREFILL_ONLY", DECODES)
    with pytest.raises(UnsupportedError, match="no decode kernel on cpu"):
        model.with_attention(None, "TEST_PREFILL_ONLY").check_backends(decode=True)
    with pytest.raises(UnsupportedError, match=r"TEST_PREFILL_ONLY.*no decode kernel on cpu"):
        GPT2.from_pretrained("demo", device="cpu", decode_attention="TEST_PREFILL_ONLY")


def test_intervals_between_tokens_are_timed_if_tokens_are_read_and_else_every_64th(demo):
    watched = generate(demo, "Once", max_new_tokens=5, mode="kv-cache", stop="no such text")
    assert len(watched.intervals_s) == len(watched.tokens[0]) - 1 == 4
    assert 0 < sum(watched.intervals_s) <= watched.generation_s - watched.prefill_s
    assert not watched.marks_s
    long = generate(demo, "Once", max_new_tokens=129, mode="kv-cache", ignore_eos=True)
    assert not long.intervals_s
    assert len(long.marks_s) == 2
    assert long.prefill_s < long.marks_s[0] < long.marks_s[1] < long.generation_s


def test_an_engine_that_cannot_run_says_why(demo):
    with pytest.raises(RequestError, match="the graph engine does not support this: it needs"):
        generate(demo, "Once", max_new_tokens=2, mode="kv-cache", engine="graph")
    with pytest.raises(RequestError, match="engine must be one of auto, eager, graph, fused"):
        generate(demo, "Once", max_new_tokens=2, engine="warp")
