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
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    StaticCache,
)

from attention_kernels import UnsupportedError, hf  # noqa: F401 (registers the backends)

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
    "CUSTOM_CUDA_VERSION_25",
)
SHAPES = ((1, 1), (1, 7), (2, 7), (3, 16), (4, 33))
PADDINGS = ("no mask", "ones", "left", "right", "both", "holes", "a row")
USES = ("logits", "cache", "static cache", "chunks", "packed", "4-d mask")


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
    """Return the logits of a check's tokens, prompt and steps, of padding 0."""
    network, (batch, seqlen) = model(check.model, implementation), check.shape
    ids = torch.randint(
        VOCABULARY, (batch, seqlen + STEPS), generator=torch.Generator().manual_seed(1)
    )
    prompt, mask = ids[:, :seqlen], mask_of(check.padding, batch, seqlen)
    keep = torch.ones(batch, seqlen) if mask is None else mask
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
