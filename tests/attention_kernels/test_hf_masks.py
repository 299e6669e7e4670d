"""Masks, caches and grouped queries of transformers' models, compared with transformers' sdpa.

Run as a program, it makes every check and prints how many were answered, refused and wrong.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    StaticCache,
)

from attention_kernels import BackendSpec, UnsupportedError, hf  # noqa: F401 (registers the backends)

VOCABULARY, STEPS = 97, 3
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64, vocab_size=VOCABULARY),
    "llama": LlamaConfig(**LLAMA, num_key_value_heads=2),
    "qwen": Qwen2Config(**LLAMA, num_key_value_heads=1),
    "mistral": MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=12),
}
BACKENDS = (
    "NAIVE_PYTORCH",
    "PYTORCH_SDPA_MATH",
    "PYTORCH_SDPA_FLASH_ATTENTION",
    "NUMPY_BASIC",
    "CUSTOM_CUDA_VERSION_15",
)
SHAPES = ((1, 1), (1, 7), (2, 7), (3, 16), (4, 33))
PADDINGS = ("no mask", "ones", "left", "right", "both", "holes", "a row")
USES = ("logits", "cache", "static cache", "generate", "chunks", "packed", "4-d mask")


@dataclass(frozen=True)
class Check:
    model: str
    shape: tuple[int, int]
    padding: str
    use: str
    backend: str

    def __str__(self) -> str:
        return f"{self.model}, {self.shape}, {self.padding}, {self.use}, {self.backend}"


def checks() -> list[Check]:
    """Return every combination that makes sense."""
    found = [Check(*x) for x in itertools.product(CONFIGS, SHAPES, PADDINGS, USES, BACKENDS)]
    return [x for x in found if x.use not in ("packed", "4-d mask") or x.padding == "no mask"]


@functools.cache
def model(name: str, implementation: str):
    """A model whose weights are so large that attention is not uniform."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])  # each model writes its implementation into its own
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.set_attn_implementation(implementation)
    return made


def mask_of(padding: str, batch: int, seqlen: int) -> Tensor | None:
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


@torch.no_grad()
def run(check: Check, implementation: str) -> Tensor:
    """Return the logits of a check, prompt and steps, or the text; those of padding are 0.

    At the end of a row, padding counts: generate() reads its logits.
    """
    network, (batch, seqlen) = model(check.model, implementation), check.shape
    ids = torch.randint(
        VOCABULARY, (batch, seqlen + STEPS), generator=torch.Generator().manual_seed(1)
    )
    prompt, mask = ids[:, :seqlen], mask_of(check.padding, batch, seqlen)
    keep = torch.ones(batch, seqlen) if mask is None else mask.clone()
    keep[:, -1] = 1
    if check.use == "generate":
        mask = torch.ones_like(prompt) if mask is None else mask
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return network.generate(
            prompt, attention_mask=mask, max_new_tokens=STEPS, **settings
        ).float()
    if check.use == "packed":
        places = torch.arange(seqlen).where(torch.arange(seqlen) < 5, torch.arange(seqlen) - 5)
        return network(prompt, position_ids=places[None], use_cache=False).logits
    if check.use == "4-d mask":
        mask = torch.ones(batch, 1, seqlen, seqlen, dtype=torch.bool).tril()
    if check.use in ("logits", "4-d mask"):
        return network(prompt, attention_mask=mask, use_cache=False).logits * keep[:, :, None]
    cache = None
    if check.use == "static cache":
        cache = StaticCache(config=network.config, max_cache_len=seqlen + STEPS + 2)
    ends = [seqlen, *range(seqlen + 1, seqlen + STEPS + 1)]
    if check.use == "chunks":
        ends = [-(-seqlen // 2), seqlen][seqlen == 1 :]
    logits, start = [], 0
    for end in ends:
        if mask is not None and end > mask.shape[1]:
            mask = torch.cat([mask, torch.ones(batch, 1, dtype=torch.long)], dim=1)
        seen = None if mask is None else mask[:, :end]
        out = network(ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, end
        logits.append(out.logits)
    keep = torch.cat([keep, torch.ones(batch, start)], dim=1)[:, :start]
    return torch.cat(logits, dim=1) * keep[:, :, None]


@functools.cache
def expected(check: Check) -> Tensor:
    return run(check, "sdpa")


def outcome(check: Check) -> str:
    """Return "answered", "wrong" or why the backend refuses a check."""
    right = expected(Check(check.model, check.shape, check.padding, check.use, ""))
    try:
        got = run(check, check.backend)
    except UnsupportedError as error:
        return "; ".join(error.reasons)
    return "answered" if (got - right).abs().max() <= 1e-4 * right.abs().max() else "wrong"


def is_refused(check: Check) -> bool:
    """Return whether no kernel takes the queries and keys of a check."""
    _, seqlen = check.shape
    longest = seqlen - 5 if check.use == "packed" and seqlen > 5 else seqlen
    slides = check.model == "mistral" and longest > CONFIGS["mistral"].sliding_window
    return slides or check.use == "4-d mask" or (check.use == "chunks" and seqlen > 1)


def check_all(some: list[Check]) -> None:
    found = {check: outcome(check) for check in some}
    assert [str(check) for check in some if found[check] == "wrong"] == []
    assert [str(x) for x in some if (found[x] != "answered") != is_refused(x)] == []


def test_some_checks_equal_sdpas():
    some = [check for check in checks() if check.backend != "CUSTOM_CUDA_VERSION_15"][::167]
    check_all(some)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
def test_an_emulated_kernel_takes_a_padded_batch(name):
    for padding in ("left", "right"):
        check_all([Check(name, (2, 7), padding, "cache", "CUSTOM_CUDA_VERSION_15")])


@pytest.mark.slow
def test_more_checks_equal_sdpas():
    check_all(checks()[1::19])  # every value of a field with every value of every other field


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("name", "padding"), [("gpt2", "left"), ("qwen", "no mask")])
def test_a_compiled_model_computes_the_same(name, padding):
    """Prefill and steps of a compiled model.

    Dynamo's graphs run as they are: a compiler behind it never sees our kernels.
    """
    torch._dynamo.reset()
    compiled = torch.compile(model(name, "NAIVE_PYTORCH"), backend="eager")
    ids = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(2))
    caches, mask = [None, None], mask_of(padding, 3, 7)
    for start, end in ((0, 7), (7, 8), (8, 9)):
        if mask is not None and end > 7:
            mask = functional.pad(mask, (0, 1), value=1)
        outs = [
            one(ids[:, start:end], attention_mask=mask, past_key_values=cache, use_cache=True)
            for one, cache in zip((compiled, model(name, "sdpa")), caches, strict=True)
        ]
        caches = [out.past_key_values for out in outs]
        got, right = (out.logits[:, -1] for out in outs)
        torch.testing.assert_close(got, right, rtol=0, atol=1e-4 * right.abs().max().item())


@pytest.fixture
def calls(monkeypatch):
    """Return a list that collects the tensors of each call of attention or decode."""
    seen = []
    for method in ("attention", "decode"):
        inner = getattr(BackendSpec, method)

        def spy(self, q, k, v, inner=inner, **options):
            seen.append((q, k, v))
            return inner(self, q, k, v, **options)

        monkeypatch.setattr(BackendSpec, method, spy)
    return seen


def attend(name, q, k, v, attention_mask):
    """Call a backend as a layer of a model does; return o, (batch, seqlen, num_heads, head_dim)."""
    lengths = {"q_length": q.shape[2], "kv_length": k.shape[2]}
    offset = k.shape[2] - q.shape[2]
    mask = AttentionMaskInterface()[name](
        batch_size=len(q), q_offset=offset, attention_mask=attention_mask, **lengths
    )
    return AttentionInterface()[name](torch.nn.Identity(), q, k, v, mask)[0]


def test_a_padded_batch_is_computed_on_views_of_its_tokens(calls):
    qkv = torch.randn(3, 4, 2, 7, 32)
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[:2, :3] = mask[2, :1] = False
    o = attend("NAIVE_PYTORCH", *qkv, mask)
    assert [tuple(q.shape) for q, _, _ in calls] == [(2, 4, 2, 32), (1, 6, 2, 32), (1, 7, 2, 32)]
    memory = qkv.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() == memory for call in calls for x in call)
    assert not o[~mask].any()
    assert o[mask].all()
    del calls[:]
    attend("NAIVE_PYTORCH", qkv[0, :, :, -1:], *qkv[1:], mask)
    assert [tuple(k.shape) for _, k, _ in calls] == [(2, 4, 2, 32), (1, 6, 2, 32), (1, 7, 2, 32)]


def test_padding_on_the_right_needs_one_call_and_one_for_each_last_position(calls):
    q, k, v = torch.randn(3, 3, 2, 7, 32)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[:2, 4:] = False
    o = attend("NAIVE_PYTORCH", q, k, v, mask)
    assert [tuple(q.shape) for q, _, _ in calls] == [(3, 7, 2, 32), (2, 1, 2, 32)]
    last = functional.scaled_dot_product_attention(q[:2, :, -1:], k[:2, :, :4], v[:2, :, :4])
    torch.testing.assert_close(o[:2, -1], last[:, :, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["NUMPY_BASIC", "CUSTOM_CUDA_VERSION_15", "NAIVE_PYTORCH"])
def test_key_heads_are_repeated_only_for_a_backend_that_needs_it(name, calls):
    q, kv = torch.randn(1, 4, 7, 32), torch.randn(2, 1, 2, 7, 32)
    o = attend(name, q, *kv, None)
    heads = calls[0][1].shape[2]
    assert heads == (4 if name == "NUMPY_BASIC" else 2)
    right = functional.scaled_dot_product_attention(q, *kv, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(o, right.transpose(1, 2), rtol=0, atol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for check in checks():
        found = outcome(check)
        kind = found if found in ("answered", "wrong") else "refused"
        total[kind] += 1
        counts[f"{check.use}, {check.padding}", kind] += 1
        if kind == "wrong":
            print("wrong:", check)
        elif kind == "refused":
            refusals["".join(x for x in found if not x.isdigit())] += 1
    for (what, kind), count in sorted(counts.items()):
        print(f"{what:28} {kind:10} {count}")
    for reason, count in refusals.most_common():
        print(f"{count:5} {reason}")
    print(dict(total))
