"""Use the backends in Hugging Face transformers, each as the `attn_implementation` of its name.

    import attention_kernels.hf
    AutoModelForCausalLM.from_pretrained(..., attn_implementation="CUSTOM_CUDA_VERSION_12")

Importing this module registers every backend but loads none. When there are as many queries as keys
(prefill, recompute), the backend's attention is called on views of the model's tensors. For one
query and a cache, its decode kernel is called; a backend without one is replaced by
registry.default_decode_backend(), with one warning. In grouped-query attention, keys and values are
copied once per query head, unless the backend takes fewer key heads.

Masks: no kernel takes one, so the mask is read once per forward pass and becomes slices. A padded
batch is computed by one call per run of rows with the same padding, on its tokens only. If all
padding is on the right, one call serves all rows. Attention is 0 for padding, but the last position
of a row, which generate() reads, sees the row's tokens, as in sdpa. A query with a cache gets
exactly the keys that it sees.

Raises UnsupportedError, with every reason, for what a backend cannot do: other masks (a sliding
window shorter than the text, packed sequences, blocks of images, 4-d masks), padding without
causality, several queries against more keys, dropout, attention weights as output, a backward pass,
models that compute attention themselves, and any argument not known to be harmless. Tested with
transformers 5.17 and 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils import logging

# Private, but the only way to see output_attentions in every model: GPT-2 does not pass it on.
from transformers.utils.output_capturing import _active_collector

from attention_kernels import registry
from attention_kernels.contract import dtype_name, per_query_head
from attention_kernels.errors import UnsupportedError
from attention_kernels.registry import BackendSpec

# Arguments that models pass to every layer and that do not affect attention. (transformers uses
# position_ids to detect packed sequences, but before it requests the mask.)
_HARMLESS = {
    "cache_position",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}


def register(*, decode_backend: str | None = None) -> None:
    """Register every backend with transformers under its name, replacing earlier registrations.

    Called when this module is imported. Call it again after registering another backend, or to
    choose one backend that decodes for all of them. Raises UnknownBackendError.
    """
    decoder = registry.get_backend(decode_backend) if decode_backend is not None else None
    for spec in registry.list_backends():
        register_one(spec, decoder)


def register_one(spec: BackendSpec, decoder: BackendSpec | None = None) -> None:
    """Register a backend, which the registry need not have, and the one that decodes for it."""
    mask_type = type(spec.name, (_Mask,), {})
    AttentionMaskInterface.register(spec.name, functools.partial(_mask, mask_type))
    AttentionInterface.register(spec.name, functools.partial(_attention, spec, decoder))


_SPECIAL = (
    "a sliding window shorter than the text, packed sequences or another special mask (it takes "
    "causal masks with padding, and the full one without)"
)


@dataclass(frozen=True)
class _Part:
    """A call: some rows of a batch, and which of their queries see which of their keys.

    queries: the same positions as keys, which see each other causally, or the last, which sees all.
    """

    rows: slice
    queries: slice | Tensor
    keys: slice | Tensor


class _Mask:
    """A stand-in for the mask that models pass on to _attention(); any other use of it fails.

    parts: the calls that compute the batch, or None if a single call computes all of it. lengths:
    the numbers of queries and keys that the parts refer to. None instead of this object would be
    wrong: a model that computes attention itself (Bloom, CodeGen) would treat it as no mask. Each
    backend gets a subclass with its name.
    """

    # For a static cache, generate() asks for the mask, and the model passes it to _mask() again.
    ndim = 4

    def __init__(
        self, parts: tuple[_Part, ...] | None = None, lengths: tuple[int, int] = (0, 0)
    ) -> None:
        self.parts, self.lengths = parts, lengths

    def contiguous(self) -> _Mask:
        """Return self; generate() calls it."""
        return self

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(str(self._error()))

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise cls._error()

    @classmethod
    def _error(cls) -> UnsupportedError:
        reason = "the model reads the mask, so it computes attention itself or changes the mask"
        return UnsupportedError(cls.__name__, [reason])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask(
    mask_type: type[_Mask],
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | _Mask | None = None,
    **arguments: Any,
) -> _Mask:
    """Return the mask as parts; raise UnsupportedError if causal calls cannot compute it.

    attention_mask: bool (batch, keys), False for padding, or the result of an earlier call. Reading
    it waits for the device, once in each forward pass and not in each layer. arguments: the other
    arguments of sdpa_mask().
    """
    if isinstance(attention_mask, _Mask):
        return attention_mask
    written = int(q_offset) + q_length - kv_offset  # a static cache has room for more keys
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None or padding[:, kv_offset : kv_offset + kv_length].all():
        is_causal = mask_function is masking_utils.causal_mask_function and written == kv_length
        if is_causal or mask_function is masking_utils.bidirectional_mask_function:
            return mask_type()
    if q_length not in (1, written):
        raise UnsupportedError(mask_type.__name__, [_several_queries(q_length, kv_length)])
    visible = masking_utils.sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )[:, 0]  # (batch, queries, keys)
    if q_length == 1:
        seen = visible[:, 0]
    else:
        seen = visible.diagonal(dim1=1, dim2=2)  # a query that does not see itself is padding
        keys = functional.pad(seen, (0, kv_length - q_length))
        is_expected = visible == torch.ones_like(visible).tril() & keys[:, None]
        is_read = seen.clone()
        is_read[:, -1] = True
        if not is_expected[is_read].all():
            raise UnsupportedError(mask_type.__name__, [_SPECIAL])
    return mask_type((*_parts(seen, q_length),), (q_length, kv_length))


def _parts(seen: Tensor, q_length: int) -> Iterator[_Part]:
    """Yield the calls that compute a batch.

    seen: the keys that the last query sees, (batch, keys); they are also the positions of tokens if
    there are several queries. generate() reads the last position even if it is padding.
    """
    seen = seen.bool().cpu()
    if q_length > 1:
        causal = seen
        if seen[:, 0].all() and torch.equal(seen, seen.sort(dim=1, descending=True).values):
            # Padding on the right changes no token under a causal mask: one call serves all rows.
            causal = seen.any(dim=0).expand_as(seen)
        for rows, keys in _runs(causal):
            yield _Part(rows, keys, keys)
        seen = seen & ~seen[:, -1:]
    for rows, keys in _runs(seen):
        yield _Part(rows, slice(-1, None), keys)


def _runs(seen: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
    """Yield each run of equal rows that see any key, and the positions of these keys."""
    start = 0
    different, counts = torch.unique_consecutive(seen, dim=0, return_counts=True)
    for row, count in zip(different, counts.tolist(), strict=True):
        if len(at := row.nonzero()[:, 0]):
            first, end = int(at[0]), int(at[-1]) + 1
            yield slice(start, start + count), slice(first, end) if end - first == len(at) else at
        start += count


def _several_queries(seqlen_q: int, seqlen_k: int) -> str:
    return (
        f"{seqlen_q} queries against {seqlen_k} keys, as in prefill by chunks, assisted decoding "
        "and cross-attention (it takes one query, or as many as keys)"
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    spec: BackendSpec,
    named_decoder: BackendSpec | None,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers; return o, and None in place of the weights.

    query is (batch, num_heads, seqlen, head_dim), key and value may have fewer heads; the output is
    (batch, seqlen, num_heads, head_dim). is_causal: None to use the module's, as in transformers'
    sdpa; the parts of a mask are causal. sliding_window: checked here only without parts, because
    _mask() has looked at everything that a query sees.
    """
    mask = attention_mask if isinstance(attention_mask, _Mask) else _Mask()
    parts, seqlen_q, seqlen_k = mask.parts, query.shape[2], key.shape[2]
    wants_weights = arguments.pop("output_attentions", False) or any(
        name.endswith("attentions") for name in _active_collector.get() or ()
    )
    reasons = [
        f"{name}, which it does not compute"
        for name, argument in arguments.items()
        if name not in _HARMLESS and argument is not None and argument is not False
    ]
    if sliding_window is not None and parts is None and sliding_window < seqlen_k:
        reasons.append(f"a sliding_window of {sliding_window} in a text of {seqlen_k} tokens")
    if wants_weights:
        reasons.append("output_attentions (the weights are never stored)")
    if isinstance(attention_mask, Tensor):
        reasons.append(f"an attention_mask of shape {tuple(attention_mask.shape)}")
    if dropout:
        reasons.append(f"dropout of {dropout} (model.eval() switches it off)")
    if parts is None and seqlen_q not in (1, seqlen_k):
        reasons.append(_several_queries(seqlen_q, seqlen_k))
    if parts is not None and mask.lengths != (seqlen_q, seqlen_k):
        reasons.append(f"{seqlen_k} keys with an attention_mask for {mask.lengths[1]}")
    if dtype_name(query.dtype) not in spec.dtypes:  # transformers loads a model in its stored dtype
        reasons += spec.static_refusals(query.dtype, query.shape[3], query.device.type)
        reasons.append(f'load the model with dtype="{spec.dtypes[0]}"')
    if reasons:
        raise UnsupportedError(spec.name, reasons)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    call = functools.partial(_compute, spec, named_decoder, scaling, causal, parts)
    qkv = (x.transpose(1, 2) for x in (query, key, value))
    return _ForwardOnly.apply(spec.name, call, *qkv), None  # type: ignore[no-untyped-call]


def _compute(
    spec: BackendSpec,
    decoder: BackendSpec | None,
    scaling: float | None,
    is_causal: bool,
    parts: tuple[_Part, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Call a kernel, once or for each part; positions of o that are in no part are 0."""
    if parts is not None:
        o = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            at, keys = (part.rows, part.queries), (part.rows, part.keys)
            o[at] = _compute(spec, decoder, scaling, True, None, q[at], k[keys], v[keys])
        return o
    decodes = q.shape[1] != k.shape[1]
    if decodes:
        spec = decoder or _default_decoder(spec, q)
    if not spec.supports_gqa:
        k, v = per_query_head(q, k, v)
    if not decodes:
        return spec.attention(q, k, v, softmax_scale=scaling, is_causal=is_causal)
    seqlens = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    return spec.decode(q, k, v, seqlens=seqlens, softmax_scale=scaling)


def _default_decoder(spec: BackendSpec, q: Tensor) -> BackendSpec:
    """Return the backend that decodes q, (batch, 1, num_heads, head_dim), if none was named."""
    if spec.has_decode(q.device.type):
        return spec
    heads = q.shape[0] * q.shape[2]
    decoder = registry.default_decode_backend(q.device, q.dtype, q.shape[3], heads)
    logging.get_logger(__name__).warning_once(
        f"{spec.name} has no decode kernel on {q.device.type}: with a cache, {decoder.name} "
        "decodes (attention_kernels.hf.register(decode_backend=...) names another)"
    )
    return decoder


class _ForwardOnly(torch.autograd.Function):
    """Refuse the backward pass: a missing gradient must not look like a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, name: str, call: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
        ctx.name = name
        return call(*qkv)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(ctx.name, ["a backward pass (backends are for inference)"])


register()
