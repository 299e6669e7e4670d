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
of a row, which generate() reads, sees the row's tokens, as in sdpa. Packed sequences are computed
one by one, and a query with a cache gets exactly the keys that it sees.

Raises UnsupportedError, with every reason, for what a backend cannot do: other masks (a sliding
window shorter than the text, blocks of images, 4-d masks), padding without causality, several
queries against more keys, dropout, attention weights as output, a backward pass, models that
compute attention themselves, and any argument not known to be harmless. Tested with transformers
5.17 and 5.23.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

# Private, but the only way to see output_attentions in every model: GPT-2 does not pass it on.
from transformers.utils.output_capturing import _active_collector

from attention_kernels.contract import dtype_name, per_query_head
from attention_kernels.errors import UnsupportedError
from attention_kernels.registry import (
    BackendSpec,
    default_decode_backend,
    get_backend,
    list_backends,
)

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
    decoder = get_backend(decode_backend) if decode_backend is not None else None
    for spec in list_backends():
        mask_type = type(spec.name, (_Mask,), {})
        AttentionMaskInterface.register(spec.name, functools.partial(_mask, mask_type))
        AttentionInterface.register(spec.name, functools.partial(_attention, spec, decoder))


_LAST = slice(-1, None)
_SPECIAL = (
    "a sliding window shorter than the text or another special mask (it takes causal masks with "
    "padding or packed sequences, and the full one without)"
)


@dataclass(frozen=True)
class _Part:
    """A call: some rows of a batch, and which of their queries see which of their keys.

    queries: the same positions as keys, which see each other causally, or _LAST, which sees all.
    """

    rows: slice
    queries: slice | Tensor
    keys: slice | Tensor
    length: int
    """The number of keys."""


class _Mask:
    """A stand-in for the mask that models pass on to _attention(); any other use of it fails.

    parts: what is computed, if that is less than everything; lengths: those of queries and keys
    that the parts are of. None instead of this object would be wrong: a model that computes
    attention itself (Bloom, CodeGen) would treat it as no mask. Each backend gets a subclass with
    its name.
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
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | _Mask | None = None,
    **arguments: Any,
) -> _Mask:
    """Return the mask's parts; raise UnsupportedError if it is not made of causal ones.

    attention_mask: bool (batch, keys), False for padding, or what an earlier call returned. It is
    read, which waits for the device, in each forward pass but not in each layer. arguments: the
    others of sdpa_mask().
    """
    if isinstance(attention_mask, _Mask):
        return attention_mask
    q_offset = int(q_offset)
    written = q_offset + q_length - kv_offset  # a static cache has room for more keys
    is_causal = mask_function is causal_mask_function
    is_full = mask_function is bidirectional_mask_function
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        padding = None if padding.all() else padding
    if padding is None and (is_full or (is_causal and written == kv_length)):
        return mask_type()

    def visible() -> Tensor:
        """Return which keys each query sees, (batch, queries, keys)."""
        return sdpa_mask(  # type: ignore[no-any-return]
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )[:, 0]

    reason = ""
    if q_length == 1:
        seen = visible()[:, 0]
        segments = seen.new_full((batch_size, 1), -1, dtype=torch.int)
    elif is_full:
        reason = "an attention_mask that hides padding from queries that also see later keys"
    elif q_length != written:
        reason = _several_queries(q_length, kv_length)
    elif is_causal:
        seen = torch.ones(batch_size, 1, dtype=torch.bool).expand(-1, written)
        seen = seen if padding is None else padding[:, :written]
        segments = seen.int() - 1
    else:
        mask = visible()
        seen, segments, fits = mask[:, -1], *_segments(mask)
        reason = "" if fits else _SPECIAL
    if reason:
        raise UnsupportedError(mask_type.__name__, [reason])
    is_hidden = segments[:, -1:] < 0
    return mask_type(_parts(segments, seen & is_hidden), (q_length, kv_length))


def _segments(visible: Tensor) -> tuple[Tensor, bool]:
    """Return the sequence of each query, (batch, queries): its first key, or -1 for padding.

    visible: (batch, queries, keys). A query that does not see itself is padding. Also returns
    whether the others see exactly the keys of their sequence up to themselves.
    """
    queries, keys = visible.shape[1:]
    is_token = visible[:, :, :queries].diagonal(dim1=1, dim2=2)
    segments = visible.to(torch.uint8).argmax(2).where(is_token, -1)
    expected = (segments[:, :, None] == segments[:, None]) & is_token[:, None]
    expected = functional.pad(expected.tril(), (0, keys - queries))
    fits = (visible == expected) | ~is_token[:, :, None]
    return segments, bool(fits.all())


def _parts(segments: Tensor, seen: Tensor) -> tuple[_Part, ...]:
    """Return the calls that compute a batch.

    segments: the sequence of each query, (batch, queries), or -1. seen: (batch, keys), the keys
    that the last query sees, if it is in no sequence: a single token with a cache, or padding,
    which generate() reads if it is on the right.
    """
    rows: list[list[int]] = segments.tolist()
    if all(max(x) == 0 and x == sorted(x, reverse=True) for x in rows):
        # Padding on the right changes no token under a causal mask: one call serves all rows.
        rows = [max(rows)] * len(rows)
    last = (seen.int() - 1).tolist()
    return (
        *(_Part(run, at, at, length) for run, at, length in _runs(rows, segments.device)),
        *(_Part(run, _LAST, at, length) for run, at, length in _runs(last, segments.device)),
    )


def _runs(
    rows: list[list[int]], device: torch.device
) -> Iterator[tuple[slice, slice | Tensor, int]]:
    """Yield each number but -1 of each run of equal rows: the rows, its positions, their count."""
    start = 0
    for row, run in itertools.groupby(rows):
        stop = start + len([*run])
        for number in sorted({*row} - {-1}):
            at = [place for place, other in enumerate(row) if other == number]
            is_range = at[-1] - at[0] < len(at)
            where = slice(at[0], at[-1] + 1) if is_range else torch.tensor(at, device=device)
            yield slice(start, stop), where, len(at)
        start = stop


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
    sdpa; parts of a mask are causal. sliding_window: at least the length of what is computed.
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
    longest = seqlen_k if parts is None else max((part.length for part in parts), default=0)
    if sliding_window is not None and sliding_window < longest:
        reasons.append(f"a sliding_window of {sliding_window} in a text of {longest} tokens")
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
    if reasons:
        raise UnsupportedError(spec.name, reasons)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    prefill = functools.partial(_prefill, spec, scaling, causal or parts is not None)
    decode = functools.partial(_decode, spec, named_decoder, scaling)
    if parts is not None:
        call = functools.partial(_by_parts, prefill, decode, parts)
    else:
        call = prefill if seqlen_q == seqlen_k else decode
    return _ForwardOnly.apply(spec.name, call, q, k, v), None  # type: ignore[no-untyped-call]


def _prefill(
    spec: BackendSpec, scaling: float | None, is_causal: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    if dtype_name(q.dtype) not in spec.dtypes:  # transformers loads a model in its stored dtype
        reasons = spec.static_refusals(q.dtype, q.shape[3], q.device.type)
        cure = f'load the model with dtype="{spec.dtypes[0]}"'
        raise UnsupportedError(spec.name, [*reasons, cure])
    k, v = _heads_for(spec, q, k, v)
    return spec.attention(q, k, v, softmax_scale=scaling, is_causal=is_causal)


def _decode(
    spec: BackendSpec,
    decoder: BackendSpec | None,
    scaling: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    decoder = decoder or _default_decoder(spec, q)
    k, v = _heads_for(decoder, q, k, v)
    seqlens = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    return decoder.decode(q, k, v, seqlens=seqlens, softmax_scale=scaling)


def _heads_for(spec: BackendSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v, with one head per query head if the backend takes no fewer."""
    return (k, v) if spec.supports_gqa else per_query_head(q, k, v)


def _by_parts(
    prefill: Callable[..., Tensor],
    decode: Callable[..., Tensor],
    parts: Sequence[_Part],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Call a kernel for each part of a batch; the other positions of o are 0."""
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for part in parts:
        queries, keys = (part.rows, part.queries), (part.rows, part.keys)
        call = decode if part.queries is _LAST else prefill
        o[queries] = call(q[queries], k[keys], v[keys])
    return o


def _default_decoder(spec: BackendSpec, q: Tensor) -> BackendSpec:
    """Return the backend that decodes q, (batch, 1, num_heads, head_dim), if none was named."""
    if spec.has_decode(q.device.type):
        return spec
    heads = q.shape[0] * q.shape[2]
    decoder = default_decode_backend(q.device, q.dtype, q.shape[3], heads)
    _warn(spec.name, q.device.type, decoder.name)
    return decoder


@functools.cache
def _warn(name: str, device: str, decoder: str) -> None:
    """Say once which backend decodes instead."""
    logging.getLogger(__name__).warning(
        f"{name} has no decode kernel on {device}: with a cache, {decoder} decodes "
        "(attention_kernels.hf.register(decode_backend=...) names another)"
    )


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
