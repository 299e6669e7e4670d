"""A step of a large batch in 16 bits: a library's products, and our own kernels between them.

The backends compute attention, as elsewhere.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_kernels.contract import dtype_name
from attention_kernels.ladder.op import c_struct, launch
from attention_kernels.registry import MANY_HEADS
from gpt2_infer.engines.base import kernel_refusals
from gpt2_infer.linear import Linear, weight_and_bias
from gpt2_infer.model import GPT2, MLP, Attention, Block, KVCache, keep
from gpt2_infer.product import own_op

DTYPES = ("float16", "bfloat16")  # those that v04_batch_step.cu takes
SOURCE = Path(__file__).parent / "csrc" / "v04_batch_step.cu"
BEGIN, APPEND, ATTEND, ADD, CHOOSE = range(5)
ATTENTION = "DECODE_SPLIT_KV_VERSION_3"  # what attend() computes, bit for bit
CHUNK = 8  # elements in 16 bytes
MAX_WIDTH = 8192
# A product of at most MANY rows and at least LONG terms is divided into two, so that more
# multiprocessors work on it.
MANY, LONG = 1024, 2048


def refusals(model: GPT2, batch: int) -> list[str]:
    """Return the reasons why a batch cannot run in these kernels; small ones were not measured."""
    config = model.config
    reasons = kernel_refusals(model, DTYPES)
    if (heads := batch * config.n_head) < MANY_HEADS:
        reasons.append(f"{heads} rows times heads (it takes {MANY_HEADS} or more)")
    if config.n_embd > MAX_WIDTH:
        reasons.append(f"n_embd {config.n_embd} (it takes up to {MAX_WIDTH})")
    if config.head_dim % CHUNK:
        reasons.append(f"head_dim {config.head_dim} (it takes multiples of {CHUNK})")
    return reasons


KernelParams = c_struct(
    (c_void_p, "tokens lengths seqlens active logprobs wte wpe ln_weight ln_bias x heads qkv"),
    (c_void_p, "sums bias normed logits kv slots"),
    (c_int64, "row_stride kv_stride"),
    (c_int, "kernel rows parts width vocab_size seqlen num_heads max_seqlen"),
    (c_float, "epsilon softmax_scale"),
)
"""The C struct StructParams of the kernels."""


@dataclass(eq=False)
class BatchStep:
    """The passes of one model over one cache; each call enqueues its kernels.

    tokens, int64 (batch,): each row's newest token. lengths, int32 (batch,): its tokens in the
    cache; choose() adds `active` to them.
    """

    model: GPT2
    cache: KVCache
    tokens: Tensor
    lengths: Tensor
    active: Tensor
    logprobs: Tensor

    def __post_init__(self) -> None:
        model = self.model
        tables = {"wte": model.wte, "wpe": model.wpe}
        self.embeddings = {name: table.weight.contiguous() for name, table in tables.items()}
        self.blocks = [*model.blocks()]
        self.norms = [*(block.ln_1 for block in self.blocks), model.ln_f]
        self._op = own_op(SOURCE, "batch_step_", model.device.type, dtype_name(model.dtype))

    def logits(self) -> Tensor:
        """Append the newest tokens to the cache; return the logits, (batch, vocab_size)."""
        model = self.model
        shape = len(self.tokens), model.config.n_embd
        x, normed = (model.wte.weight.new_empty(shape) for _ in range(2))
        state = {"tokens": self.tokens, "lengths": self.lengths, "seqlens": self.cache.seqlens}
        norm = self._norm(self.norms[0])
        self._run(BEGIN, len(x), x=x, normed=normed, **state, **self.embeddings, **norm)
        for layer, (block, next_norm) in enumerate(zip(self.blocks, self.norms[1:], strict=True)):
            heads = self._attend(layer, block.attn, block.attn.c_attn.forward(normed))
            normed = self._finish(block, x, heads, next_norm)
        return model.head(normed)

    def prompts(
        self, model: GPT2, cache: KVCache, tokens: Tensor, seqlens: Tensor, slots: Tensor
    ) -> Tensor:
        """Run prompts as GPT2.forward() does, and fill these slots of a cache.

        tokens: int64 (prompts, seqlen). seqlens, slots: int64 (prompts,).
        """
        shape, x = tokens.shape, model.embed(tokens)
        normed = self.norms[0](x)
        for block, next_norm, kv in zip(self.blocks, self.norms[1:], cache.kv, strict=True):
            qkv = block.attn.c_attn.forward(normed)
            self._append(qkv, kv, slots=slots, seqlen=shape[1])
            heads = block.attn.attend(qkv, shape, model.attention)
            if block is self.blocks[-1]:
                # From here on positions are independent: keep only those whose logits are wanted.
                x, heads = (keep(rows.view(*shape, -1), seqlens) for rows in (x, heads))
            normed = self._finish(block, x, heads, next_norm)
        return model.head(normed)

    def choose(self, logits: Tensor) -> None:
        """Replace the tokens by the most likely next ones, and add `active` to the lengths."""
        lengths = {"lengths": self.lengths, "active": self.active}
        self._choose(logits, self.tokens, self.logprobs, **lengths)

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely token of each row (see Sampling.choose()), and its logprob."""
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        logprobs = torch.empty(len(logits), device=logits.device)
        self._choose(logits, tokens, logprobs)
        return tokens, logprobs

    def _choose(self, logits: Tensor, tokens: Tensor, logprobs: Tensor, **lengths: Tensor) -> None:
        if logits.stride(0) % CHUNK:  # the model's weights were replaced by some without room
            logits = F.pad(logits, (0, -logits.shape[1] % CHUNK))[:, : logits.shape[1]]
        sizes = {"row_stride": logits.stride(0), "vocab_size": logits.shape[1]}
        results = {"tokens": tokens, "logprobs": logprobs}
        self._run(CHOOSE, len(logits), logits=logits, **results, **lengths, **sizes)

    def _attend(self, layer: int, attn: Attention, qkv: Tensor) -> Tensor:
        """Store new keys and values, and attend from the newest token of each row."""
        kv, seqlens, backend = self.cache.kv[layer], self.cache.seqlens, self.model.decode_attention
        if backend.name != ATTENTION or attn.upcast:
            self._append(qkv, kv, seqlens=seqlens)
            q = qkv.view(-1, 3, attn.num_heads, attn.head_dim).narrow(1, 0, 1)
            return attn.attend_newest(q, backend, *self.cache.layers[layer][:2], seqlens)
        heads = qkv.new_empty(len(qkv), self.model.config.n_embd)
        fields = {"qkv": qkv, "heads": heads, "lengths": self.lengths, **_cache_fields(kv)}
        self._run(ATTEND, len(qkv), softmax_scale=attn.softmax_scale, **fields)
        return heads

    def _append(self, qkv: Tensor, kv: Tensor, **rows: Any) -> None:
        """Store keys and values in a layer's cache; rows: the fields that say where."""
        self._run(APPEND, len(qkv), qkv=qkv, **_cache_fields(kv), **rows)

    def _finish(self, block: Block, x: Tensor, heads: Tensor, next_norm: nn.LayerNorm) -> Tensor:
        """Add both projections to the residual stream x in place; return next_norm of it."""
        normed = self._add(x, heads, block.attn.c_proj, block.ln_2)
        return self._add(x, _hidden(block.mlp, normed), block.mlp.c_proj, next_norm)

    def _add(self, x: Tensor, y: Tensor, linear: Linear, norm: nn.LayerNorm) -> Tensor:
        """Add a product of y to x in place; return the norm of x."""
        normed, (weight, bias) = torch.empty_like(x), weight_and_bias(linear)
        sums = _sums(y, weight)
        fields = {"x": x, "sums": sums, "bias": bias, "normed": normed, "parts": len(sums)}
        self._run(ADD, len(x), **fields, **self._norm(norm))
        return normed

    def _norm(self, norm: nn.LayerNorm) -> dict[str, Any]:
        weight, bias = weight_and_bias(norm)
        return {"ln_weight": weight, "ln_bias": bias, "epsilon": norm.eps}

    def _run(self, kernel: int, rows: int, **fields: Any) -> None:
        """Launch a kernel for some rows; fields: those of StructParams that it reads."""
        sizes = {"kernel": kernel, "rows": rows, "width": self.model.config.n_embd}
        launch(self._op, self.tokens, KernelParams, **sizes, **fields)


def _cache_fields(kv: Tensor) -> dict[str, Any]:
    """Return the fields that describe a layer's cache."""
    heads, capacity = kv.shape[2:4]
    return {"kv": kv, "kv_stride": kv.stride(0), "num_heads": heads, "max_seqlen": capacity}


def _hidden(mlp: MLP, x: Tensor) -> Tensor:
    """Return the hidden units before c_proj; on CUDA, cuBLASLt applies GELU's tanh form."""
    if not x.is_cuda:
        return mlp.forward(x)
    weight, bias = weight_and_bias(mlp.c_fc)
    return torch._addmm_activation(bias, x, weight, use_gelu=True)


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return float32 (parts, rows, outs), whose sum is x W."""
    ins, outs = weight.shape
    parts = 2 if ins >= LONG and len(x) <= MANY and ins % 2 == 0 else 1
    factors = x.view(len(x), parts, ins // parts).transpose(0, 1)
    weights = weight.reshape(parts, ins // parts, outs)
    if x.is_cuda:
        return torch.bmm(factors, weights, out_dtype=torch.float32)
    return torch.bmm(factors.float(), weights.float())
