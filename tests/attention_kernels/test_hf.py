"""Models of transformers with every backend, compared with transformers' eager attention."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)

from attention_kernels import (
    BackendSpec,
    UnknownBackendError,
    UnsupportedError,
    get_backend,
    hf,
    list_backends,
    register,
)
from attention_kernels.contract import Kernels, dtype_name
from attention_kernels.judge.truth import error_budget, naive_attention
from tests.conftest import DEVICES

ROOT = Path(__file__).parents[2]
SPECS = [spec for spec in list_backends() if spec.family != "decode"]
# The emulator runs the first of each family, which is enough to test the adapter; a GPU runs all.
FIRST = {spec.family: spec.name for spec in reversed(SPECS) if spec.family != "pytorch"}
EMULATED = [
    pytest.param(name, "cpu", marks=[pytest.mark.slow] * (family not in ("fp32", "numpy")))
    for family, name in FIRST.items()
]
PYTORCH = [spec.name for spec in SPECS if spec.family == "pytorch"]
ON_GPU = [pytest.param(spec.name, "cuda", marks=pytest.mark.gpu) for spec in SPECS]
LADDER = "CUSTOM_CUDA_VERSION_15"
VOCABULARY = 97
REFUSAL = f"attention backend {LADDER} cannot take this call: "


@pytest.fixture(autouse=True)
def clean_interfaces(monkeypatch):
    """Undo what a test registers with transformers, and let hf warn again."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    hf._warn.cache_clear()


def prompt(batch=2, seqlen=7, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def random_model(config, name="eager"):
    """A model in eval mode whose biases and norms are random, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation(name)
    return model


def gpt2(name="eager", **fields):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": VOCABULARY}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    # Weights large enough that greedy text is not a single repeated token.
    weights = {"initializer_range": 0.2, "tie_word_embeddings": False}
    return random_model(GPT2Config(**{**sizes, **tokens, **weights, **fields}), name)


def llama(name="eager", config=LlamaConfig, **fields):
    """A model with four query heads of 32 and, by default, two key and value heads."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    other = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return random_model(config(**{**sizes, **heads, **other, **fields}), name)


def usable(name, device):
    """The dtype and head_dim to test a backend with; skips the test if it cannot run."""
    spec = get_backend(name)
    if reason := spec.unavailable_reason(device):
        pytest.skip(reason)
    dtypes = [*spec.dtypes]
    if name == "PYTORCH_SDPA_FLASH_ATTENTION" and device == "cuda":
        dtypes.remove("float32")  # there, torch's kernel takes half precision only
    dtype = "float32" if "float32" in dtypes else dtypes[0]
    head_dim = 32 if not spec.head_dims or 32 in spec.head_dims else spec.head_dims[0]
    return getattr(torch, dtype), head_dim


def with_backend(model, name):
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    return model


@torch.no_grad()
def errors(eager, name, **inputs):
    """The largest error of the backend's logits, against float64, and its budget, from eager's."""
    reference = copy.deepcopy(eager).double()(**inputs).logits
    got = with_backend(eager, name)(**inputs).logits
    assert got.dtype == eager.dtype
    assert reference.std() > 0.1  # equal logits would prove nothing
    error = (eager(**inputs).logits - reference).abs().max().item()
    precision = get_backend(name).precisions[dtype_name(eager.dtype)]
    budget = error_budget(precision, eager.dtype, error, reference.abs().max().item())
    return (got - reference).abs().max().item(), budget


@torch.no_grad()
def greedy(model, ids, new_tokens=6, **options):
    """Return the new tokens of each row, by default with a tokenizer's attention_mask of ones."""
    options = {"attention_mask": torch.ones_like(ids), **options}
    out = model.generate(
        ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return out[:, ids.shape[1] :].tolist()


@torch.no_grad()
def assert_same_text(eager, name, ids, got, expected):
    """Check that tokens are equal, or that the first two that differ tie for the backend.

    Two tokens tie if their float64 logits are within twice the budget of its precision class.
    """
    assert len({token for row in expected for token in row}) > 4
    for row, ours, theirs in zip(ids.tolist(), got, expected, strict=True):
        differs = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
        if differs:
            prefix = torch.tensor([row + theirs[: differs[0]]], device=ids.device)
            logits = copy.deepcopy(eager).double()(prefix).logits[0, -1]
            _, budget = errors(eager, name, input_ids=prefix)
            apart = (logits[theirs[differs[0]]] - logits[ours[differs[0]]]).item()
            assert apart <= 2 * budget, f"token {differs[0]} differs, and it is not a tie"


# The same results as eager


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in PYTORCH), *EMULATED, *ON_GPU],
)
def test_gpt2s_logits_are_within_the_budget_of_eager(name, device):
    dtype, head_dim = usable(name, device)
    eager = gpt2(n_embd=2 * head_dim, scale_attn_by_inverse_layer_idx=True).to(device, dtype)
    error, budget = errors(eager, name, input_ids=prompt(seqlen=33, device=device))
    assert error <= budget


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in PYTORCH),
        pytest.param(LADDER, "cpu", marks=pytest.mark.slow),
        *ON_GPU,
    ],
)
def test_a_checkpoint_generates_the_text_of_eager(name, device, tmp_path):
    dtype, head_dim = usable(name, device)
    scaled = {"scale_attn_by_inverse_layer_idx": True}
    gpt2(n_embd=2 * head_dim, **scaled).save_pretrained(tmp_path)
    eager, model = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=which, dtype=dtype)
        .to(device)
        .eval()
        for which in ("eager", name)
    )
    assert model.config._attn_implementation == name
    ids = prompt(device=device)
    for use_cache in (False, True):
        got, expected = (greedy(m, ids, use_cache=use_cache) for m in (model, eager))
        assert_same_text(eager, name, ids, got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["NAIVE_PYTORCH", LADDER])
def test_llama_with_grouped_queries_matches_eager(name, kv_heads, device):
    usable(name, device)
    eager, ids = llama(num_key_value_heads=kv_heads).to(device), prompt(device=device)
    error, budget = errors(eager, name, input_ids=ids)
    assert error <= budget
    got, expected = (greedy(m, ids) for m in (with_backend(eager, name), eager))
    assert_same_text(eager, name, ids, got, expected)


def test_cross_attention_of_the_same_length_matches_eager():
    encoded = torch.randn(2, 7, 64)
    eager = gpt2(add_cross_attention=True)
    inputs = {"encoder_hidden_states": encoded.double(), "input_ids": prompt()}
    with torch.no_grad():
        reference = copy.deepcopy(eager).double()(**inputs).logits
        inputs["encoder_hidden_states"] = encoded
        plain, got = (m(**inputs).logits for m in (eager, with_backend(eager, LADDER)))
    assert (got - reference).abs().max() <= 2 * (plain - reference).abs().max() + 1e-6


def test_beam_search_matches_eager():
    eager, ids = gpt2(), prompt()
    expected = greedy(eager, ids, num_beams=3)
    assert greedy(with_backend(eager, LADDER), ids, num_beams=3) == expected


def test_a_wrong_backend_exceeds_the_budget(clean_registry):
    for wrong, options in (("FUTURE", {"is_causal": False}), ("FLAT", {"softmax_scale": 0.1})):
        register_naive(f"WRONG_{wrong}", **options)
    hf.register()
    eager, ids = gpt2(), prompt()
    for name in ("WRONG_FUTURE", "WRONG_FLAT"):
        error, budget = errors(eager, name, input_ids=ids)
        assert error > budget
        assert greedy(with_backend(eager, name), ids, use_cache=False) != greedy(eager, ids)


def register_naive(name, *, decode=None, **options):
    @register(name=name, family="test", summary="For a test.", precisions={"float32": "ieee-fp32"})
    def load():
        def attention(q, k, v, softmax_scale, is_causal):
            arguments = {"softmax_scale": softmax_scale, "is_causal": is_causal, **options}
            return naive_attention(q, k, v, **arguments)

        return Kernels(attention, decode)


# How transformers calls a backend


@pytest.mark.slow
def test_importing_is_free_and_registers_every_backend(tmp_path):
    code = f"""
import sys, torch
import attention_kernels, gpt2_infer
assert attention_kernels.list_backends()
assert not {{"triton", "transformers", "torch.utils.cpp_extension"}} & {{*sys.modules}}
import attention_kernels.hf
from transformers import AttentionInterface, AttentionMaskInterface
names = {{spec.name for spec in attention_kernels.list_backends()}}
assert names <= {{*AttentionInterface()}} and names <= {{*AttentionMaskInterface()}}
assert {LADDER!r} in names and {LADDER.lower()!r} not in AttentionInterface()
assert not [spec.name for spec in attention_kernels.list_backends() if spec._kernels]
assert not torch.cuda.is_initialized()
"""
    cache = tmp_path / "cache"
    environment = {**os.environ, "ATTENTION_KERNELS_CACHE": str(cache)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert not cache.exists()


def test_a_backend_registered_later_needs_a_second_call(clean_registry):
    register_naive("LATER")
    with pytest.raises(ValueError, match="LATER"):
        gpt2("LATER")
    hf.register()
    assert torch.allclose(gpt2("LATER")(prompt()).logits, gpt2()(prompt()).logits, atol=1e-5)


@pytest.fixture
def calls(monkeypatch):
    """Return a list that collects each call of a backend: (backend, method, q, k, v)."""
    seen = []

    def watch(method, call):
        def spy(self, q, k, v, **options):
            seen.append((self.name, method, q, k, v))
            return call(self, q, k, v, **options)

        monkeypatch.setattr(BackendSpec, method, spy)

    watch("attention", BackendSpec.attention)
    watch("decode", BackendSpec.decode)
    return seen


def decoders(calls):
    return {name for name, method, *_ in calls if method == "decode"}


def test_the_default_decode_backend_is_named_once(calls, caplog):
    model = gpt2(LADDER)
    with caplog.at_level(logging.WARNING, logger="attention_kernels.hf"):
        greedy(model, prompt(), 4)
        greedy(model, prompt(), 4)
    assert decoders(calls) == {"PYTORCH_SDPA_FLASH_ATTENTION"}
    assert [record.message for record in caplog.records] == [
        f"{LADDER} has no decode kernel on cpu: with a cache, PYTORCH_SDPA_FLASH_ATTENTION decodes "
        "(attention_kernels.hf.register(decode_backend=...) names another)"
    ]
    assert [method for _, method, *_ in calls[:8]] == ["attention"] * 2 + ["decode"] * 6


def test_the_number_of_heads_in_the_batch_decides_what_decodes(calls, monkeypatch):
    def default(device, dtype, head_dim, heads):
        return get_backend("NAIVE_PYTORCH" if heads >= 6 else "PYTORCH_SDPA_MATH")

    monkeypatch.setattr(hf, "default_decode_backend", default)
    model = gpt2(LADDER)  # two heads
    for batch, expected in ((2, "PYTORCH_SDPA_MATH"), (3, "NAIVE_PYTORCH")):
        calls.clear()
        greedy(model, prompt(batch), 3)
        assert decoders(calls) == {expected}


def test_a_named_decode_backend_decodes_for_all(calls, caplog):
    hf.register(decode_backend="pytorch-sdpa-math")
    eager, ids = gpt2(), prompt()
    for name in (LADDER, "NAIVE_PYTORCH"):
        got, expected = (greedy(m, ids) for m in (with_backend(eager, name), eager))
        assert_same_text(eager, name, ids, got, expected)
    assert decoders(calls) == {"PYTORCH_SDPA_MATH"}
    assert not caplog.records
    with pytest.raises(UnknownBackendError, match="NAIVE_PYTORCH"):
        hf.register(decode_backend="NAIVE")
    hf.register(decode_backend=LADDER)
    with pytest.raises(UnsupportedError, match=f"{LADDER} .* it has no decode kernel on cpu"):
        greedy(gpt2("NAIVE_PYTORCH"), ids)


# Refusals


def second_chunk(model, cache=None):
    cache = model(prompt(), past_key_values=cache, use_cache=True).past_key_values
    return model(prompt(seqlen=3), past_key_values=cache)


def padded_and_not_causal(model):
    model.config.is_causal = False
    mask = torch.ones(2, 7)
    mask[1, 6] = 0
    return model(prompt(), attention_mask=mask)


SPECIAL = "a sliding window shorter than the text or another special mask"
WEIGHTS = "output_attentions (the weights are never stored)"


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (padded_and_not_causal, "an attention_mask that hides padding from queries that also see"),
        (
            lambda m: m(prompt(), attention_mask=torch.ones(2, 9), use_cache=False),
            "7 keys with an attention_mask for 9",
        ),
        (
            lambda m: m(prompt(), attention_mask=torch.ones(2, 1, 7, 7)),
            "an attention_mask of shape (2, 1, 7, 7)",
        ),
        (second_chunk, "3 queries against 10 keys, as in prefill by chunks"),
        (
            lambda m: second_chunk(m, StaticCache(config=m.config, max_cache_len=16)),
            "3 queries against 16 keys, as in prefill by chunks",
        ),
        (lambda m: greedy(m, prompt(), prefill_chunk_size=4), "3 queries against 7 keys"),
        (lambda m: m(prompt(), output_attentions=True), WEIGHTS),
        (
            lambda m: greedy(m, prompt(), output_attentions=True, return_dict_in_generate=True),
            WEIGHTS,
        ),
        (
            lambda m: m(prompt(), labels=prompt()).loss.backward(),
            "a backward pass (backends are for inference)",
        ),
        (lambda m: m(prompt(), softcap=30.0), "softcap, which it does not compute"),
        (lambda m: m.double()(prompt()), "dtype float64 (it takes float32)"),
        (
            lambda m: m.half()(prompt()),
            'dtype float16 (it takes float32); load the model with dtype="float32"',
        ),
    ],
)
def test_unsupported_calls_are_refused(make, call, reason):
    assert_refused(lambda: call(make(LADDER)), reason)


def assert_refused(call, reason):
    with pytest.raises(UnsupportedError) as caught:
        call()
    assert str(caught.value).startswith(REFUSAL + reason)


def test_assisted_decoding_is_refused():
    with pytest.raises(UnsupportedError, match=r"\d queries against \d+ keys.*assisted decoding"):
        greedy(gpt2(LADDER), prompt(1).repeat(1, 3), prompt_lookup_num_tokens=3)


def test_dropout_is_refused_in_training():
    assert_refused(lambda: gpt2(LADDER).train()(prompt()), "dropout of 0.1 (model.eval() switches")
    gpt2(LADDER, attn_pdrop=0.0).train()(prompt())


def test_cross_attention_of_another_length_is_refused():
    model, other = gpt2(LADDER, add_cross_attention=True), torch.randn(2, 5, 64)
    assert_refused(lambda: model(prompt(), encoder_hidden_states=other), "7 queries against 5 keys")


def test_a_sliding_window_is_refused_if_it_hides_a_token():
    assert_refused(lambda: llama(LADDER, MistralConfig, sliding_window=6)(prompt()), SPECIAL)
    for window in (7, None):
        eager = llama(config=MistralConfig, sliding_window=window)
        error, budget = errors(eager, LADDER, input_ids=prompt())
        assert error <= budget


def test_a_model_that_computes_attention_itself_is_refused():
    model = random_model(BloomConfig(n_layer=1, n_head=2, hidden_size=64, vocab_size=VOCABULARY))
    model.config._attn_implementation = LADDER
    reason = "the model reads the mask, so it computes attention itself or changes the mask"
    assert_refused(lambda: model(prompt()), reason)
    mask = AttentionMaskInterface()[LADDER](batch_size=1, q_length=3, kv_length=3)
    with pytest.raises(AttributeError, match=reason):
        mask.shape  # noqa: B018


@pytest.mark.parametrize(
    "argument",
    [
        {"s_aux": torch.zeros(2)},
        {"sinks": torch.zeros(2)},
        {"position_bias": torch.zeros(1, 2, 3, 3)},
        {"cu_seq_lens_q": torch.tensor([0, 3])},
        {"an_argument_of_next_year": 0},
    ],
)
def test_arguments_not_known_to_be_harmless_are_refused(argument):
    attention = AttentionInterface()[LADDER]
    q, k, v = torch.randn(3, 1, 2, 3, 32)
    module = torch.nn.Identity()
    (name,) = argument
    reason = f"{name}, which it does not compute"
    assert_refused(lambda: attention(module, q, k, v, None, **argument), reason)
    o, weights = attention(module, q, k, v, None, **{name: None})
    assert weights is None
    assert o.shape == (1, 3, 2, 32)
    with pytest.raises(UnsupportedError) as caught:
        attention(
            module, q, k, v, None, dropout=0.5, output_attentions=True, sliding_window=2, **argument
        )
    assert caught.value.reasons[1] == "a sliding_window of 2 in a text of 3 tokens"
    assert len(caught.value.reasons) == 4
