"""Models of transformers with every backend, compared with transformers' own attention."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from typing import NamedTuple

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attention_kernels import BackendSpec, UnsupportedError, hf, register
from attention_kernels.contract import Kernels
from attention_kernels.judge.truth import naive_attention
from tests.conftest import DEVICES, python, usable

LADDER, FLASH = "CUSTOM_CUDA_VERSION_15", "PYTORCH_SDPA_FLASH_ATTENTION"
VOCABULARY, STEPS = 97, 3
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": VOCABULARY}
WEIGHTS = {"initializer_range": 0.2, "tie_word_embeddings": False}
OTHER = {"bos_token_id": 0, "eos_token_id": 0, "scale_attn_by_inverse_layer_idx": True}
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
CONFIGS = {
    # Weights so large that greedy text is not a single repeated token, and a scale for each layer.
    "gpt2": transformers.GPT2Config(**GPT2, **WEIGHTS, **OTHER),
    "qwen": transformers.Qwen2Config(**LLAMA, num_key_value_heads=1),
    "mistral": transformers.MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=12),
    "bloom": transformers.BloomConfig(n_layer=1, n_head=2, hidden_size=64, vocab_size=VOCABULARY),
}


@pytest.fixture(autouse=True)
def clean_interfaces(monkeypatch):
    """Undo what a test registers with transformers, and let hf warn again."""
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    logging.Logger.warning_once.cache_clear()


def prompt(batch=2, seqlen=7, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def new_model(name, implementation="eager"):
    """A model in eval mode whose biases and norms are random, too."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])  # each model writes its implementation into its own
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def greedy(model, ids, new_tokens=6, **options):
    """Return the new tokens of each row, by default with a tokenizer's attention_mask of ones."""
    options = {"attention_mask": torch.ones_like(ids), **options}
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, max_new_tokens=new_tokens, **settings, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", ["gpt2", "qwen"])
def test_a_checkpoint_generates_the_text_of_eager(config, device, tmp_path):
    """In float32, where the backend's error is far below the distance of the two best tokens."""
    usable(LADDER, device)
    new_model(config).save_pretrained(tmp_path)
    eager, model = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name).to(device).eval()
        for name in ("eager", LADDER)
    )
    ids = prompt(device=device)
    for options in ({"use_cache": False}, {}, {"num_beams": 3}):
        expected = greedy(eager, ids, **options)
        assert len(expected.unique()) > 4
        assert torch.equal(greedy(model, ids, **options), expected)


@pytest.mark.slow
def test_importing_is_free_and_registers_every_backend(tmp_path):
    code = f"""
import sys, torch
import attention_kernels, gpt2_infer
names = {{spec.name for spec in attention_kernels.list_backends()}}
assert not {{"triton", "transformers", "torch.utils.cpp_extension"}} & {{*sys.modules}}
import attention_kernels.hf
from transformers import AttentionInterface, AttentionMaskInterface
assert {LADDER!r} in names <= {{*AttentionInterface()}} & {{*AttentionMaskInterface()}}
assert not [spec.name for spec in attention_kernels.list_backends() if spec._kernels]
assert not torch.cuda.is_initialized()
"""
    cache = tmp_path / "cache"
    done = python("-c", code, ATTENTION_KERNELS_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert not cache.exists()


# Which kernel is called


@pytest.fixture
def calls(monkeypatch):
    """Return a list that collects each call of a backend: (backend, method, q, k, v)."""
    seen = []
    for method in ("attention", "decode"):
        inner = getattr(BackendSpec, method)

        def spy(self, q, k, v, method=method, inner=inner, **options):
            seen.append((self.name, method, q, k, v))
            return inner(self, q, k, v, **options)

        monkeypatch.setattr(BackendSpec, method, spy)
    return seen


def test_a_default_or_named_backend_decodes(calls, caplog):
    with caplog.at_level(logging.WARNING, logger="attention_kernels.hf"):
        for _ in range(2):
            greedy(new_model("gpt2", LADDER), prompt(), 4)
    assert [method for _, method, *_ in calls[:8]] == ["attention"] * 2 + ["decode"] * 6
    assert {name for name, method, *_ in calls if method == "decode"} == {FLASH}
    (record,) = caplog.records
    assert record.message.startswith(f"{LADDER} has no decode kernel on cpu: with a cache, {FLASH}")
    hf.register(decode_backend="pytorch-sdpa-math")
    calls.clear()
    for name in (LADDER, "NAIVE_PYTORCH"):
        greedy(new_model("gpt2", name), prompt(), 4)
    assert {name for name, method, *_ in calls if method == "decode"} == {"PYTORCH_SDPA_MATH"}
    hf.register(decode_backend=LADDER)
    with pytest.raises(UnsupportedError, match=f"{LADDER} .* it has no decode kernel on cpu"):
        greedy(new_model("gpt2", "NAIVE_PYTORCH"), prompt())


def test_a_padded_batch_is_computed_on_views_of_its_tokens(calls):
    qkv = torch.randn(3, 4, 2, 7, 32)
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[:2, :3] = mask[2, :1] = False
    sizes = {"batch_size": 4, "q_offset": 0, "q_length": 7, "kv_length": 7}
    given = transformers.AttentionMaskInterface()["NAIVE_PYTORCH"](attention_mask=mask, **sizes)
    o, _ = transformers.AttentionInterface()["NAIVE_PYTORCH"](torch.nn.Identity(), *qkv, given)
    shapes = [(2, 4, 2, 32), (1, 6, 2, 32), (1, 7, 2, 32)]
    assert [q.shape for *_, q, _, _ in calls] == shapes
    memory = qkv.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() == memory for call in calls for x in call[2:])
    assert not o[~mask].any()
    assert o[mask].all()


# Masks and caches


class Check(NamedTuple):
    model: str
    shape: tuple[int, int]
    padding: str
    use: str
    backend: str


CHECKS = [
    Check(*values)
    for values in itertools.product(
        ("gpt2", "qwen", "mistral"),
        ((1, 1), (1, 7), (2, 7), (3, 16), (4, 33)),
        ("no mask", "ones", "left", "right", "both", "holes", "a row"),
        ("logits", "cache", "static cache", "generate"),
        ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", FLASH, "NUMPY_BASIC"),
    )
]
ON_LADDER = [
    Check(config, (2, 7), padding, "cache", LADDER)
    for config, padding in itertools.product(("gpt2", "qwen"), ("left", "right"))
]
cached_model = functools.cache(new_model)


def mask_of(padding, batch, seqlen):
    """Return an attention_mask, in which rows have different numbers of tokens."""
    mask = torch.ones(batch, seqlen, dtype=torch.long)
    for row in range(batch):
        pad = min(seqlen - 1, 1 + row // 2 * 2)  # some neighbours have the same
        if padding in ("left", "both"):
            mask[row, :pad] = 0
        if padding in ("right", "both"):
            mask[row, max(seqlen - pad, 1) :] = 0
        if padding == "holes":
            mask[row, row + 1 :: 3] = 0
    if padding == "a row":
        mask[-1] = 0
    return None if padding == "no mask" else mask


@functools.cache
@torch.no_grad()
def run(check):
    """Return the logits of a check, prompt and steps, or the text; those of padding are 0.

    At the end of a row, padding counts: generate() reads its logits.
    """
    network, (batch, seqlen) = cached_model(check.model, check.backend), check.shape
    ids = prompt(batch, seqlen + STEPS)
    mask = mask_of(check.padding, batch, seqlen)
    ones = torch.ones(batch, seqlen + STEPS, dtype=torch.long)
    if check.use == "generate":
        mask = ones[:, :seqlen] if mask is None else mask
        return greedy(network, ids[:, :seqlen], STEPS, attention_mask=mask).float()
    cache = None
    if check.use == "static cache":
        cache = transformers.StaticCache(config=network.config, max_cache_len=seqlen + STEPS + 2)
    use_cache, logits, start = check.use != "logits", [], 0
    for end in range(seqlen, seqlen + STEPS * use_cache + 1):
        seen = None if mask is None else torch.cat([mask, ones], dim=1)[:, :end]
        options = {"attention_mask": seen, "past_key_values": cache, "use_cache": use_cache}
        out = network(ids[:, start:end], **options)
        cache, start = out.past_key_values, end
        logits.append(out.logits)
    keep = ones if mask is None else torch.cat([mask, ones], dim=1)
    keep[:, seqlen - 1] = 1
    return torch.cat(logits, dim=1) * keep[:, :start, None]


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(CHECKS[::167] + ON_LADDER, id="some"),
        # Every value of a field with every value of every other field.
        pytest.param(CHECKS[1::19], id="more", marks=pytest.mark.slow),
    ],
)
def test_masks_and_caches_give_the_numbers_of_sdpa(checks):
    window = CONFIGS["mistral"].sliding_window
    for check in checks:
        right = run(check._replace(backend="sdpa"))
        try:
            got = run(check)
        except UnsupportedError:
            assert check.model == "mistral", check
            assert check.shape[1] > window, check
        else:
            assert check.model != "mistral" or check.shape[1] <= window, check
            assert (got - right).abs().max() <= 1e-4 * right.abs().max(), check


@pytest.mark.parametrize("wrong", [{"is_causal": False}, {"softmax_scale": 0.1}])
def test_a_wrong_backend_gives_other_numbers(wrong, clean_registry):
    def attention(q, k, v, softmax_scale, is_causal):
        right = {"softmax_scale": softmax_scale, "is_causal": is_causal}
        return naive_attention(q, k, v, **right | wrong)

    name = f"WRONG_{next(iter(wrong))}".upper()
    fields = {"family": "test", "summary": "Wrong.", "precisions": {"float32": "ieee-fp32"}}
    register(name=name, **fields)(lambda: Kernels(attention))
    hf.register()
    got, right = (run(Check("gpt2", (2, 7), "no mask", "logits", x)) for x in (name, "sdpa"))
    assert (got - right).abs().max() > 0.01 * right.abs().max()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_computes_the_same():
    """Dynamo's graphs run as they are: a compiler behind it never sees our kernels."""
    compiled = torch.compile(new_model("gpt2", "NAIVE_PYTORCH"), backend="eager")
    got, right = (
        network(prompt(3), attention_mask=mask_of("left", 3, 7)).logits[:, -1]
        for network in (compiled, new_model("gpt2", "sdpa"))
    )
    torch.testing.assert_close(got, right, rtol=0, atol=1e-4 * right.abs().max().item())


# Refusals


def too_long_a_mask(model):
    return model(prompt(), attention_mask=torch.ones(2, 9), use_cache=False)


def padded_and_not_causal(model):
    model.config.is_causal = False
    mask = torch.ones(2, 7)
    mask[1, 6] = 0
    return model(prompt(), attention_mask=mask)


def packed(model):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    return model(prompt(1), position_ids=positions, use_cache=False)


def computes_itself(model):
    model.config._attn_implementation = LADDER
    return model(prompt())


DENSE = torch.ones(2, 1, 7, 7)
SPECIAL = "a sliding window shorter than the text, packed sequences or another special mask"
WEIGHTS = "output_attentions (the weights are never stored)"
HALF = 'dtype float16 (it takes float32); load the model with dtype="float32"'
READ = "the model reads the mask, so it computes attention itself or changes the mask"


@pytest.mark.parametrize(
    ("config", "call", "reason"),
    [
        ("gpt2", padded_and_not_causal, SPECIAL),
        ("qwen", packed, SPECIAL),
        ("mistral", lambda m: m(prompt(seqlen=13)), SPECIAL),
        ("gpt2", too_long_a_mask, "7 keys with an attention_mask for 9"),
        ("qwen", lambda m: m(prompt(), attention_mask=DENSE), "an attention_mask of shape (2, 1,"),
        ("qwen", lambda m: greedy(m, prompt(), prefill_chunk_size=4), "3 queries against 7 keys"),
        ("gpt2", lambda m: m(prompt(), output_attentions=True), WEIGHTS),
        ("gpt2", lambda m: m(prompt(), labels=prompt()).loss.backward(), "a backward pass"),
        ("gpt2", lambda m: m.train()(prompt()), "dropout of 0.1 (model.eval() switches it off)"),
        ("qwen", lambda m: m.half()(prompt()), HALF),
        ("bloom", computes_itself, READ),
    ],
)
def test_unsupported_calls_are_refused(config, call, reason):
    model = new_model(config, "eager" if config == "bloom" else LADDER)
    with pytest.raises(UnsupportedError) as caught:
        call(model)
    text = str(caught.value)
    assert text.startswith(f"attention backend {LADDER} cannot take this call: {reason}")


def test_every_argument_not_known_to_be_harmless_is_refused():
    attention = functools.partial(transformers.AttentionInterface()[LADDER], torch.nn.Identity())
    qkv, options = torch.randn(3, 1, 2, 3, 32), {"sliding_window": 2, "dropout": 0.5}
    unknown = {"sinks": torch.zeros(2), "an_argument_of_next_year": 0}
    with pytest.raises(UnsupportedError) as caught:
        attention(*qkv, None, output_attentions=True, **options, **unknown)
    assert caught.value.reasons[:3] == [
        *(f"{name}, which it does not compute" for name in unknown),
        "a sliding_window of 2 in a text of 3 tokens",
    ]
    assert len(caught.value.reasons) == 5
    harmless = {**dict.fromkeys(unknown), "use_cache": True}
    o, weights = attention(*qkv, None, **harmless)
    assert (o.shape, weights) == ((1, 3, 2, 32), None)
