"""GPT-2 (Radford et al., 2019) with swappable attention.

The parameters have the names and the (in, out) layout of the published checkpoints, so weights are
loaded without being renamed, transposed or copied. Attention is called only through
`attention_kernels`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from attention_kernels import BackendSpec, UnavailableBackendError, UnsupportedError, ladder
from attention_kernels.contract import AttentionFunction, Kernels, dtype_name
from attention_kernels.precision import PLAIN_PRECISIONS
from attention_kernels.registry import default_backend, default_decode_backend
from gpt2_infer import checkpoint
from gpt2_infer.checkpoint import Checkpoint, open_checkpoint
from gpt2_infer.config import GPT2Config, ProductsName
from gpt2_infer.errors import ConfigError, RequestError, check_integer, check_type
from gpt2_infer.linear import Linear, project, weight_and_bias, with_room, without_autocast
from gpt2_infer.prepared import Prepared
from gpt2_infer.product import check_products
from gpt2_infer.tokenizer import Tokenizer

AttentionChoice = str | BackendSpec | AttentionFunction
"""The choice of attention: a backend's name, the path of a version file (*.cu), a backend, or a
function like those that a backend's loader returns."""


@dataclass
class KVCache:
    """Keys and values of every layer, and the number of cached positions per row."""

    kv: Tensor
    """Keys and values, (n_layer, 2, batch, num_heads, max_seqlen, head_dim); the keys of one head
    and row are contiguous, as a decode kernel reads them."""
    seqlens: Tensor
    """Cached positions per row, int32 (batch,), on the device."""
    slots: Tensor | None = None
    """The rows that a forward pass fills, int64, one per sequence; None: all, in order."""
    rows: Tensor = field(init=False)
    """0, 1, ... batch - 1, for indexing each row's newest position."""
    layers: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)
    """Views of each layer, made once because a view costs as much as a small kernel: keys and
    values, each (batch, max_seqlen, num_heads, head_dim), and both by position, (batch, max_seqlen,
    2, num_heads, head_dim)."""

    def __post_init__(self) -> None:
        self.rows = torch.arange(len(self.seqlens), device=self.seqlens.device)
        self.layers = [
            (*layer.transpose(2, 3).unbind(0), layer.permute(1, 3, 0, 2, 4)) for layer in self.kv
        ]

    @classmethod
    def allocate(cls, model: GPT2, batch: int, max_seqlen: int) -> KVCache:
        """Return an empty cache on the model's device, in its dtype."""
        config, like = model.config, model.wte.weight
        shape = (config.n_layer, 2, batch, config.n_head, max_seqlen, config.head_dim)
        return cls(like.new_zeros(shape), torch.zeros(batch, dtype=torch.int32, device=like.device))

    def fill(self, layer: int, kv: Tensor) -> None:
        """Store a layer's first keys and values, (2, batch, num_heads, seqlen, head_dim)."""
        into = self.kv[layer, :, :, :, : kv.shape[3]]
        if self.slots is None:
            into.copy_(kv)
        else:
            into[:, self.slots] = kv


class Attention(nn.Module):
    """Multi-head causal self-attention; each call is passed the backend to use.

    All methods return the heads' outputs before c_proj, (rows, n_embd).
    """

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.head_dim = config.n_head, config.head_dim
        self.softmax_scale = config.softmax_scale(layer)
        self.upcast = config.reorder_and_upcast_attn
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        _cache_submodules(self)

    def attend(
        self, qkv: Tensor, shape: torch.Size, backend: BackendSpec, cache: KVCache | None = None
    ) -> Tensor:
        """Attend within each sequence, and fill the cache if given.

        qkv: c_attn's output, (batch * seqlen, 3 * n_embd). shape: (batch, seqlen).
        """
        rows, dtype = qkv.shape[0], qkv.dtype
        qkv = qkv.view(*shape, 3, self.num_heads, self.head_dim)
        if cache is not None:
            cache.fill(self.layer, qkv[:, :, 1:].permute(2, 0, 3, 1, 4))
        qkv = qkv.float() if self.upcast else qkv
        q, k, v = qkv.unbind(2)  # views, not copies
        o = backend.attention(q, k, v, softmax_scale=self.softmax_scale)
        return o.view(rows, -1).to(dtype)

    def decode(self, x: Tensor, backend: BackendSpec, cache: KVCache, position: Tensor) -> Tensor:
        """Append one token per row to the cache and attend from it.

        x: (batch, n_embd). position: (batch,), the token's position in its row.
        """
        qkv = self.c_attn.forward(x).view(-1, 3, self.num_heads, self.head_dim)
        k_cache, v_cache, places = cache.layers[self.layer]
        places.index_put_((cache.rows, position), qkv.narrow(1, 1, 2))
        return self.attend_newest(qkv.narrow(1, 0, 1), backend, k_cache, v_cache, cache.seqlens)

    def attend_newest(
        self, q: Tensor, backend: BackendSpec, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor
    ) -> Tensor:
        """Attend from the newest token of each row, whose key and value are in the cache.

        q: (batch, 1, num_heads, head_dim).
        """
        dtype = q.dtype
        if self.upcast:
            q, k_cache, v_cache = q.float(), k_cache.float(), v_cache.float()
        o = backend.decode(q, k_cache, v_cache, seqlens, softmax_scale=self.softmax_scale)
        heads = o.view(len(q), -1)
        return heads.to(dtype) if self.upcast else heads


class MLP(nn.Module):
    """Two projections with the activation between them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, config.inner_dim)
        self.c_proj = Linear(config.inner_dim, config.n_embd)
        # GELU's tanh form is one fused kernel, or part of the product.
        self.is_gelu_tanh = config.is_gelu_tanh
        self.activation = None if self.is_gelu_tanh else _activation(config.activation_function)
        _cache_submodules(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden units before c_proj: (rows, n_embd) -> (rows, inner_dim)."""
        hidden = self.c_fc.forward(x, gelu=self.is_gelu_tanh)
        return hidden if self.activation is None else self.activation(hidden)


class Block(nn.Module):
    """Pre-norm transformer block.

    The submodules' forward() is called directly: on a CPU, nn.Module's own call overhead is as long
    as a small kernel.
    """

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)
        _cache_submodules(self)

    def finish(self, x: Tensor, heads: Tensor) -> Tensor:
        """Add both projections to the residual stream x, (rows, n_embd), which is overwritten."""
        x = self.attn.c_proj.add_to(x, heads)
        mlp = self.mlp
        return mlp.c_proj.add_to(x, mlp.forward(_layer_norm(self.ln_2, x)))


class GPT2(nn.Module):
    """GPT-2 for inference.

    attention: see AttentionChoice; None selects the device's documented default. A function cannot
    decode and is not captured in CUDA graphs.
    decode_attention: the backend that decodes with a KV cache; None selects a given `attention` if
    it has a decode kernel, else the device's documented default.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        attention: AttentionChoice | None = None,
        decode_attention: str | BackendSpec | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._attention, self._decode_attention = _specs(attention, decode_attention)
        self.tokenizer: Tokenizer | None = None
        self.prepared = Prepared()
        """Engines for later calls."""
        self.wte, self.wpe = (
            # Its own initialization would import torch's compiler, which takes a second.
            nn.Embedding(rows, config.n_embd, _weight=torch.empty(rows, config.n_embd))
            for rows in (config.vocab_size, config.n_positions)
        )
        self.h = nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | Checkpoint = checkpoint.DEFAULT_MODEL,
        *,
        revision: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = torch.float32,
        attention: AttentionChoice | None = None,
        decode_attention: str | BackendSpec | None = None,
        products: ProductsName = "ieee-fp32",
        random_weights: bool = False,
        seed: int = 0,
    ) -> GPT2:
        """Load weights and tokenizer, after checking that backends and products can serve them.

        model: "demo", a local folder, a hub id (revision: its branch, tag or commit), or the result
        of open_checkpoint(), which takes revision and random_weights.
        device: None selects cuda if available, else cpu. dtype: a torch dtype or its name.
        attention, decode_attention: see GPT2. products: see with_products(). random_weights: build
        the size that `model` names from `seed`, for timing.
        Raises RequestError, WeightsError, ConfigError, UnavailableDeviceError or an AttentionError,
        before reading any weight where possible.
        """
        device, dtype = checkpoint.resolve_device(device), checkpoint.resolve_dtype(dtype)
        check_integer("the seed", seed, 0, 2**63 - 1)
        prompts, decoder = _specs(attention, decode_attention)
        if not isinstance(model, Checkpoint):
            model = open_checkpoint(model, revision=revision, random_weights=random_weights)
        elif revision is not None or random_weights:
            raise RequestError("give revision and random_weights to open_checkpoint() instead")
        config = model.config
        check_products(products, device, dtype, config)
        kind = _attention_dtype(config, dtype), config.head_dim
        check_backend(prompts or default_backend(device, *kind), config, dtype, device)
        if decoder is not None:
            check_backend(decoder, config, dtype, device, decode=True)
        with torch.device("meta"):
            loaded = cls(config, attention=prompts, decode_attention=decoder)
        model.load_into(loaded, device, dtype, seed)
        loaded.tokenizer = model.tokenizer
        loaded.head_weight.data = with_room(loaded.head_weight.data)
        return loaded.requires_grad_(False).eval().with_products(products)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.wte.weight.device

    def on_device(self) -> AbstractContextManager[object]:
        """Return a context in which the model's GPU, if it has one, is the current CUDA device.

        Events, streams and captured graphs are of the current device.
        """
        return torch.cuda.device_of(self.wte.weight)  # type: ignore[no-untyped-call]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.wte.weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The weights of the logits, (vocab_size, n_embd)."""
        return (self.wte if self.lm_head is None else self.lm_head).weight

    @property
    def step_bytes(self) -> int:
        """The bytes read per decoded token: all weights except embeddings that are not the head."""
        looked_up = [self.wpe] if self.lm_head is None else [self.wpe, self.wte]
        return sum(p.nbytes for p in self.parameters()) - sum(e.weight.nbytes for e in looked_up)

    def release(self) -> None:
        """Free the state cached for later calls: KV caches, captured graphs, packed weights."""
        linears = [module for module in self.h.modules() if isinstance(module, Linear)]
        cleared = [self.prepared.clear(), *(linear.prepared.clear() for linear in linears)]
        if any(cleared) and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def weights_changed(self) -> None:
        """Discard everything made from the weights; call it after changing any of them.

        Otherwise later calls may use packed copies of the old weights, or graphs that read their
        memory. Copies from with_products() need a call of their own. Moving the model calls it.
        """
        self.release()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT2:
        # to(), half(), cuda() and the like
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weights_changed()
        return self

    @property
    def attention(self) -> BackendSpec:
        """The backend for attention over whole sequences; an alias is resolved to its choice."""
        return self._named_attention.chosen(*self._attention_kind, self.device)

    @property
    def _named_attention(self) -> BackendSpec:
        return self._attention or default_backend(self.device, *self._attention_kind)

    @property
    def decode_attention(self) -> BackendSpec:
        """The backend that decodes one token against a cache."""
        if self._decode_attention is not None:
            return self._decode_attention
        if self._attention is not None and self._attention.has_decode(self.device.type):
            return self._attention
        return default_decode_backend(self.device, *self._attention_kind)

    @property
    def _attention_kind(self) -> tuple[torch.dtype, int]:
        return _attention_dtype(self.config, self.dtype), self.config.head_dim

    @property
    def decodes_with_named_backend(self) -> bool:
        """Whether the user named the backend that decodes."""
        return self.decode_attention in (self._decode_attention, self._attention)

    def with_attention(
        self, attention: AttentionChoice | None, decode_attention: str | BackendSpec | None = None
    ) -> GPT2:
        """Return a copy of the model with other backends and shared weights."""
        model = copy.copy(self)
        model._attention, model._decode_attention = _specs(attention, decode_attention)
        return model

    @property
    def products(self) -> ProductsName:
        """How the layers multiply float32 matrices of two rows or more."""
        return next(iter(self.blocks())).mlp.c_fc.products

    def with_products(self, products: ProductsName) -> GPT2:
        """Return a copy of the model with other matrix products and shared weights.

        products: "ieee-fp32", or on CUDA in float32 "3xfp16", three products of float16 numbers on
        tensor cores, which keep a second, packed copy of the layers' weights. Raises RequestError.
        """
        check_products(products, self.device, self.dtype, self.config)
        if products == self.products:
            return self
        model = copy.copy(self)
        shared = {id(weight): weight for weight in self.parameters()}
        model._modules = self._modules | {"h": copy.deepcopy(self.h, shared)}
        for module in model.h.modules():
            if isinstance(module, Linear):
                module.products = products
        return model

    def up_to(self, seqlen: int) -> GPT2:
        """Return the model with an attention alias resolved for sequences up to `seqlen`."""
        if self._named_attention.chooses is None:
            return self
        chosen = self._named_attention.chosen(*self._attention_kind, self.device, seqlen)
        return self.with_attention(chosen, self._decode_attention)

    def for_rows(self, rows: int) -> GPT2:
        """Return the model with the default decode backend for that many rows, if none is named."""
        if self.decodes_with_named_backend:
            return self
        heads = rows * self.config.n_head
        decoder = default_decode_backend(self.device, *self._attention_kind, heads)
        return self.with_attention(self._attention, decoder)

    def blocks(self) -> Iterable[Block]:
        """Return the transformer's blocks, first to last."""
        return cast("Iterable[Block]", self.h)

    def check_backends(self, *, decode: bool = False) -> None:
        """Raise UnavailableBackendError or UnsupportedError now, not halfway through the work."""
        check_backend(self.attention, self.config, self.dtype, self.device)
        if decode:
            check_backend(self.decode_attention, self.config, self.dtype, self.device, decode=True)

    @without_autocast
    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        *,
        seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 1,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the logits of a batch of token ids.

        tokens: int64 (batch, seqlen); if seqlens, int (batch,), gives shorter rows, they are
        right-padded with any id.
        logits_to_keep: as in transformers: the last n positions, 0 for all, or a tensor of
        positions. With seqlens the last position is each row's own, and logits_to_keep must be 1.
        cache: a KVCache to fill, whose rows (or slots) are free. Returns (batch, kept, vocab_size).
        Raises RequestError; but on CUDA, ids outside the vocabulary fail an assertion of torch's.
        """
        check_type("tokens", tokens, Tensor)
        if tokens.dim() != 2 or tokens.dtype != torch.long or not len(tokens):
            raise RequestError(
                "tokens must be int64 (batch, seqlen) with one row or more, not "
                f"{dtype_name(tokens.dtype)} {tuple(tokens.shape)}"
            )
        batch, seqlen = tokens.shape
        if not 1 <= seqlen <= self.config.n_positions:
            raise RequestError(
                f"a row must have from 1 to {self.config.n_positions} tokens (the model's "
                f"positions), not {seqlen}"
            )
        if seqlens is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 1):
            raise RequestError(
                "with seqlens only the last position of each row can be kept: logits_to_keep "
                "must be 1"
            )
        backend = self.attention
        x = self.embed(tokens)
        for block in self.blocks():
            qkv = block.attn.c_attn.forward(_layer_norm(block.ln_1, x))
            heads = block.attn.attend(qkv, tokens.shape, backend, cache)
            if block is self.h[-1]:
                # From here on positions are independent: keep only those whose logits are wanted.
                x, heads = (
                    keep(rows.view(batch, seqlen, -1), seqlens, logits_to_keep)
                    for rows in (x, heads)
                )
            x = block.finish(x, heads)
        if cache is not None:
            index = slice(None) if cache.slots is None else cache.slots
            cache.seqlens[index] = seqlen if seqlens is None else seqlens.int()
        return self.head(self.ln_f(x)).view(batch, -1, self.config.vocab_size)

    @without_autocast
    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Append one token per row and return the logits after it.

        tokens: int64 (batch,). Every row must have room: cache.seqlens < max_seqlen.
        Returns (batch, vocab_size). Raises RequestError as forward() does.
        """
        backend = self.decode_attention
        position = cache.seqlens.long()
        x = _look_up(self.wte.weight, tokens) + self.wpe.weight.index_select(0, position)
        cache.seqlens += 1
        for block in self.blocks():
            normed = _layer_norm(block.ln_1, x)
            x = block.finish(x, block.attn.decode(normed, backend, cache, position))
        return self.head(self.ln_f(x))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token plus position embeddings of tokens (batch, seqlen), as rows."""
        position = self.wpe.weight[: tokens.shape[1]]
        rows = _look_up(self.wte.weight, tokens.flatten())
        return (rows.view(*tokens.shape, -1) + position).flatten(0, 1)

    def head(self, x: Tensor) -> Tensor:
        """Return the logits of rows normalized by ln_f."""
        return project(x, self.head_weight)


def _look_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings of token ids (tokens,), which on CUDA are not checked without waiting.

    Raises RequestError for an id outside the vocabulary on a CPU.
    """
    try:
        return weight.index_select(0, tokens)
    except IndexError:
        raise RequestError(f"token ids must be from 0 to {len(weight) - 1}") from None


def _cache_submodules(module: nn.Module) -> None:
    """Also store the submodules as plain attributes: nn.Module's own lookup is slow."""
    module.__dict__.update(module._modules)


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply norm to rows, in half the time of norm(x) for one row on a CPU."""
    return torch.layer_norm(x, norm.normalized_shape, *weight_and_bias(norm), norm.eps)


def _specs(attention: object, decode_attention: object) -> tuple[BackendSpec | None, ...]:
    """Return both arguments as backends; raises RequestError for a wrong type."""
    if callable(attention):
        attention = function_backend(attention)
    return _spec("attention", attention), _spec("decode_attention", decode_attention)


def _spec(name: str, backend: object) -> BackendSpec | None:
    spec = ladder.resolve(backend) if isinstance(backend, str) else backend
    if not isinstance(spec, BackendSpec | None):
        raise RequestError(f"{name} must be a backend or its name, not {spec!r}")
    return spec


def function_backend(function: AttentionFunction) -> BackendSpec:
    """Return a backend that calls the function and has its name."""
    return BackendSpec(
        name=getattr(function, "__name__", type(function).__name__),
        family="function",
        summary="A Python function.",
        loader=lambda: Kernels(function),
        precisions=PLAIN_PRECISIONS,
        cuda_graphs=False,  # the function may wait for the device, which capture forbids
    )


def _attention_dtype(config: GPT2Config, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.reorder_and_upcast_attn else dtype


def check_backend(
    spec: BackendSpec,
    config: GPT2Config,
    dtype: torch.dtype,
    device: torch.device,
    *,
    decode: bool = False,
) -> None:
    """Raise UnavailableBackendError or UnsupportedError if `spec` cannot serve this model."""
    if reason := spec.unavailable_reason(device):
        raise UnavailableBackendError(spec.name, reason)
    dtype = _attention_dtype(config, dtype)
    q = torch.zeros(1, 16, config.n_head, config.head_dim, dtype=dtype, device=device)
    if reasons := spec.refusals(q, q, q, decode=decode):
        raise UnsupportedError(spec.name, reasons)


def keep(x: Tensor, seqlens: Tensor | None, logits_to_keep: int | Tensor = 1) -> Tensor:
    """Return the positions of x, (batch, seqlen, n_embd), whose logits are wanted, as rows."""
    if seqlens is not None:
        index = (seqlens.long() - 1)[:, None, None].expand(-1, 1, x.shape[2])
        return x.gather(1, index)[:, 0]
    kept = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
    return kept.flatten(0, 1)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    try:
        return ACT2FN[name]  # type: ignore[no-any-return]
    except KeyError:
        raise ConfigError(
            f"activation_function {name!r} is not known; known are {', '.join(sorted(ACT2FN))}"
        ) from None
