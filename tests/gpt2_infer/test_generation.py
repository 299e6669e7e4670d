from __future__ import annotations

import dataclasses
import itertools
import types

import numpy as np
import pytest
import torch

from attention_kernels import KernelError, UnavailableBackendError, UnsupportedError
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


def test_greedy_tokens_equal_transformers_generate(demo):
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint("demo")
    ids = checkpoint.tokenizer.encode(PROMPTS[0])
    theirs = AutoModelForCausalLM.from_pretrained(str(checkpoint.folder), dtype=torch.float32)
    text = theirs.eval().generate(
        torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens = text[0, len(ids) :].tolist()
    assert len({*tokens}) > 10
    for backend, mode in itertools.product(BACKENDS, MODES):
        model = demo.with_attention(backend)
        got = generate(model, [ids], max_new_tokens=40, mode=mode, ignore_eos=True)
        assert (got.tokens, got.finish_reasons) == ([tokens], ["length"])
        assert got.attention == backend


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_equals_its_members_alone(mode, device):
    model = GPT2.from_pretrained("demo", device=device)
    options = {"max_new_tokens": 16, "mode": mode}
    together = generate(model, PROMPTS, sampling=Sampling(0.9, 50, 0.95, seed=3), **options)
    for row, prompt in enumerate(PROMPTS):
        own = Sampling(0.9, 50, 0.95, seed=3 + row)
        alone = generate(model, prompt, sampling=own, **options)
        assert together.tokens[row] == alone.tokens[0]
        assert together.texts[row] == alone.texts[0]
        assert together.finish_reasons[row] == alone.finish_reasons[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_parts_of_a_call_are_timed(mode, demo, monkeypatch):
    """The fake clock advances by one at each reading."""
    moments = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(moments)))
    monkeypatch.setattr("gpt2_infer.generation.time", clock)
    done = generate(demo, PROMPTS[:2], max_new_tokens=4, mode=mode, ignore_eos=True)
    assert (done.warm_up_s, done.prefill_s, done.generation_s) == (1.0, 1.0, 2.0)
    assert (done.new_tokens, done.tokens_per_second) == (8, 4.0)
    watched = generate(demo, "Once", max_new_tokens=5, mode=mode, stop="no such text")
    assert (done.intervals_s, watched.intervals_s) == ([], [1.0] * 4)


@pytest.mark.parametrize("engine", ["recompute", "kv-cache", "fused", "batch"])
def test_one_new_token_and_a_full_context(engine, save_checkpoint):
    """The last token needs no position: nothing is computed from it."""
    folder, theirs = save_checkpoint(n_positions=32)
    model = GPT2.from_pretrained(str(folder), device="cpu")
    options = {"mode": "recompute" if engine == "recompute" else "kv-cache", "ignore_eos": True}
    options["engine"] = "fused" if engine == "fused" else "auto"
    for prompt, count in (([1, 2], 1), ([5] * 31, 2), ([5] * 32, 1), ([5], 32)):
        request = request_for(model, [prompt], max_new_tokens=count, **options)
        if engine == "batch":
            tokens = dict(Continuous(model, batch=2).run([(0, request)]))[0].tokens
        else:
            (tokens,) = run(model, request).tokens
        how = {"do_sample": False, "eos_token_id": None}
        text = theirs.generate(torch.tensor([prompt]), max_new_tokens=count, **how)
        assert text[0].tolist() == prompt + tokens
    with pytest.raises(RequestError, match=r"2 prompt tokens and 32 new ones need 33 pos.* has 32"):
        generate(model, [[5, 5]], max_new_tokens=32)


@pytest.mark.parametrize("mode", MODES)
def test_end_of_text_ends_a_row_and_is_not_part_of_it(mode):
    model = GPT2.from_pretrained("demo", device="cpu")
    options = {"max_new_tokens": 20, "mode": mode}
    plain = generate(model, PROMPTS[:2], ignore_eos=True, **options)
    eos = plain.tokens[0][11]
    model.config = dataclasses.replace(model.config, eos_token_id=(eos,))
    ended = generate(model, PROMPTS[:2], **options)
    for full, tokens, reason in zip(plain.tokens, ended.tokens, ended.finish_reasons, strict=True):
        assert tokens == (full[: full.index(eos)] if eos in full else full)
        assert reason == ("end-of-text" if eos in full else "length")
    assert generate(model, PROMPTS[:2], ignore_eos=True, **options).tokens == plain.tokens


@pytest.mark.parametrize("length", [1, 24])
def test_a_stop_string_ends_the_text_before_it(length, demo):
    full = generate(demo, PROMPTS[0], max_new_tokens=24).texts[0]
    stop, pieces = full[30 : 30 + length], []
    options = {"max_new_tokens": 24, "stop": ["never in the text", stop]}
    cut = generate(demo, PROMPTS[0], on_text=lambda _, piece: pieces.append(piece), **options)
    assert cut.texts == ["".join(pieces)] == [full[: full.index(stop)]]
    assert cut.finish_reasons == ["stop"]
    assert cut.new_tokens < 24
    assert generate(demo, PROMPTS[0], **options).texts == cut.texts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("watched", [True, False])
def test_ctrl_c_keeps_what_was_generated(mode, watched, demo, monkeypatch):
    options = {"max_new_tokens": 20, "mode": mode, "engine": "eager", "ignore_eos": not watched}
    full, choose = generate(demo, PROMPTS[0], **options).tokens[0], Sampling.choose
    for count in (7, 0):
        left = iter(range(count))

        def interrupt(self, logits, uniform, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return choose(self, logits, uniform)

        monkeypatch.setattr(Sampling, "choose", interrupt)
        cut = generate(demo, PROMPTS[0], **options)
        assert (cut.tokens, cut.finish_reasons) == ([full[:count]], ["interrupted"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 50, 0.95)])
def test_logits_that_are_not_finite_end_generation(sampling, watched, device, clean_registry):
    def attention(q, k, v, softmax_scale, is_causal):
        o = naive_attention(q, k, v, softmax_scale, is_causal)
        o[1:2] *= torch.nan
        return o

    add("TEST_NAN", attention, lambda q, *_: q * torch.nan)
    model = GPT2.from_pretrained("demo", device=device, attention="TEST_NAN")
    options = {"sampling": sampling, "ignore_eos": not watched, "max_new_tokens": 5}
    with pytest.raises(NotFiniteError, match=r"TEST_NAN in float32.* position 0 of prompt 2"):
        generate(model, [[5, 6, 7], [8]], **options)
    with pytest.raises(NotFiniteError, match=r"TEST_NAN in float32.* position 3 of prompt 1"):
        generate(model, [[5, 6, 7]], mode="kv-cache", **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[8192]]}, "outside the vocabulary of 8192"),
        ({"max_new_tokens": 0}, "max-new-tokens must be an integer of 1 or more, not 0"),
        ({"mode": "magic"}, "mode must be one of recompute, kv-cache"),
        ({"stop": [""]}, "stop strings must be non-empty texts"),
        ({"prompts": [1, 2]}, "a text or a list of token ids: 'int' object is not iterable"),
        ({"prompts": torch.tensor([[0.5]])}, "a text or a list of token ids: 'float' object"),
        ({"prompts": [b"ab"]}, "a text or a list of token ids: bytes are neither"),
        ({"prompts": [[True]]}, "a text or a list of token ids: True is not a token id"),
        ({"engine": "warp"}, "engine must be one of auto, eager, graph, fused"),
        ({"sampling": 0}, "sampling must be a Sampling, not 0"),
        ({"stop": 3}, "stop must be a Sequence, not 3"),
        ({"ignore_eos": "no"}, "ignore_eos must be a bool, not 'no'"),
        ({"on_text": ""}, "on_text must be callable, not ''"),
    ],
)
def test_invalid_requests_are_refused(arguments, words, demo):
    with pytest.raises(RequestError, match=words):
        generate(demo, **{"prompts": "The", **arguments})


@pytest.mark.parametrize(
    "prompts", [torch.tensor([[40, 50]]), np.array([[40, 50]]), [[np.int64(40), 50]], [(40, 50)]]
)
def test_token_ids_in_other_containers(prompts, demo):
    assert Request(config=demo.config, tokenizer=None, prompts=prompts).rows == [[40, 50]]


@pytest.mark.parametrize("device", DEVICES)
def test_neither_autocast_nor_torchs_default_device_changes_anything(device):
    model = GPT2.from_pretrained("demo", device=device)
    options = {"max_new_tokens": 4, "sampling": Sampling(1.0, seed=3)}
    requests = [request_for(model, PROMPTS[:1], mode=mode, **options) for mode in MODES]

    def results():
        logits = model(torch.tensor(requests[0].rows, device=device))
        batch = dict(Continuous(model, batch=2).run(list(enumerate(requests[1:]))))
        model.release()
        return logits.tolist(), batch[0].tokens, [run(model, one).tokens for one in requests]

    expected = results()
    with torch.autocast(device, torch.bfloat16):
        assert results() == expected
    if device == "cpu":
        with torch.device("meta"):
            assert results() == expected
            model = GPT2.from_pretrained("demo", device="cpu")
            assert results() == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_function_computes_attention(mode, demo):
    calls = []

    def my_attention(*arguments):
        calls.append(arguments)
        return naive_attention(*arguments)

    options = {"max_new_tokens": 3, "mode": mode}
    result = generate(demo.with_attention(my_attention), PROMPTS, **options)
    assert result.tokens == generate(demo, PROMPTS, **options).tokens
    assert result.attention == "my_attention" != result.decode_attention
    assert len(calls) == (6 if mode == "kv-cache" else 18)  # 6 layers, once or for each token


def test_a_request_belongs_to_its_configuration(demo, save_checkpoint):
    folder, _ = save_checkpoint()
    other = GPT2.from_pretrained(str(folder), device="cpu")
    with pytest.raises(RequestError, match="another configuration"):
        run(other, request_for(demo, "The"))
    with pytest.raises(RequestError, match="model must be a GPT2, not 'demo'"):
        generate("demo", "The", max_new_tokens=1)
    with pytest.raises(RequestError, match="model must be a name or a folder, not None"):
        GPT2.from_pretrained(None)


def test_what_is_not_a_backend_is_refused(demo):
    for wrong in ({"attention": 3}, {"attention": None, "decode_attention": naive_attention}):
        with pytest.raises(RequestError, match="attention must be a backend or its name, not"):
            demo.with_attention(**wrong)
    with pytest.raises(KernelError, match="<lambda> raised TypeError"):
        generate(demo.with_attention(lambda q, k, v: q), "The")


def test_backends_are_checked_before_the_work(clean_registry):
    for kind in ("attention", "decode_attention"):
        with pytest.raises(UnavailableBackendError, match="runs on cuda only, not on cpu"):
            GPT2.from_pretrained("demo", device="cpu", **{kind: "PYTORCH_SDPA_CUDNN_ATTENTION"})
    add("TEST_PREFILL_ONLY", naive_attention)
    model = GPT2.from_pretrained("demo", device="cpu", attention="TEST_PREFILL_ONLY")
    result = generate(model, "The", max_new_tokens=3, mode="kv-cache", engine="eager")
    assert result.decode_attention == "PYTORCH_SDPA_FLASH_ATTENTION"
    with pytest.raises(UnsupportedError, match=r"TEST_PREFILL_ONLY.*no decode kernel on cpu"):
        GPT2.from_pretrained("demo", device="cpu", decode_attention="TEST_PREFILL_ONLY")
