"""Use the backends in Hugging Face transformers, each as the `attn_implementation` of its name.

    import attention_kernels.hf
    AutoModelForCausalLM.from_pretrained(..., attn_implementation="CUSTOM_CUDA_VERSION_12")

Importing this module registers every backend but loads none. When there are as many queries as keys
(prefill, recompute), the backend's attention is called on views of the model's tensors. For one
query and a cache, its decode kernel is called; a backend without one is replaced by
registry.default_decode_backend(), with one warning. In grouped-query attention, keys and values are
copied once per query head, unless the backend takes fewer key heads.

Masks: no kernel takes one, so the mask is read once per forward pass and becomes slices. A padded
batch is computed by one call per run of rows with the same padding, on its tokens only; attention
is 0 for the padding. Under a causal mask, padding on the right needs one call. Packed sequences are
computed one by one, and a query with a cache gets exactly the keys that it sees.

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


@dataclass(frozen=True)
class _Part:
    """Rows of a batch, and the positions in them that see each other, causally."""

    rows: slice
    at: slice | Tensor
    length: int


class _Mask:
    """A stand-in for the mask that models pass on to _attention(); any other use of it fails.

    parts: what is computed, if that is less than everything; lengths: those of queries and keys
    that the parts are of. None instead of this object would be wrong: a model that computes
    attention itself (Bloom, CodeGen) would treat it as no mask. Each backend gets a subclass with
    its name.
    """

    def __init__(
        self, parts: tuple[_Part, ...] | None = None, lengths: tuple[int, int] = (0, 0)
    ) -> None:
        self.parts, self.lengths = parts, lengths

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
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> _Mask:
    """Return the mask's parts; raise UnsupportedError if it is not made of causal ones.

    attention_mask: bool (batch, keys), False for padding. Reading it synchronizes with the device
    once per forward pass, as in transformers' own sdpa. arguments: the others of sdpa_mask().
    """
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

    segments: Tensor | None = None
    if q_length == 1:
        segments = visible()[:, 0].int() - 1
    elif is_full:
        reason = "an attention_mask that hides padding from queries that also see later keys"
    elif q_length != written:
        reason = _several_queries(q_length, kv_length)
    elif is_causal and padding is None:
        segments = torch.zeros(batch_size, written)
    elif is_causal:
        segments = padding[:, :written].int() - 1
    else:
        segments = _segments(visible())
        reason = (
            "a sliding window shorter than the text or another special mask (it takes causal masks "
            "with padding or packed sequences, and the full one without)"
        )
    if segments is None:
        raise UnsupportedError(mask_type.__name__, [reason])
    return mask_type((*_parts(segments, q_length),), (q_length, kv_length))


def _segments(visible: Tensor) -> Tensor | None:
    """Return the sequence of each query, (batch, queries): its first key, or -1 for padding.

    visible: (batch, queries, keys). A query that does not see itself is padding. Returns None if
    the others do not see exactly the keys of their sequence up to themselves.
    """
    queries, keys = visible.shape[1:]
    is_token = visible[:, :, :queries].diagonal(dim1=1, dim2=2)
    segments = visible.to(torch.uint8).argmax(2).where(is_token, -1)
    expected = (segments[:, :, None] == segments[:, None]) & is_token[:, None]
    expected = functional.pad(expected.tril(), (0, keys - queries))
    fits = (visible == expected) | ~is_token[:, :, None]
    return segments if fits.all() else None


def _parts(segments: Tensor, q_length: int) -> Iterator[_Part]:
    """Yield the parts of a batch, given the sequence of each position, (batch, keys)."""
    rows: list[list[int]] = segments.tolist()
    if q_length > 1 and all(max(x) <= 0 and x == sorted(x, reverse=True) for x in rows):
        # Padding on the right changes no token under a causal mask: one call serves all rows.
        rows = [max(rows)] * len(rows)
    start = 0
    for row, run in itertools.groupby(rows):
        stop = start + len([*run])
        for segment in sorted({*row} - {-1}):
            at = [place for place, of in enumerate(row) if of == segment]
            is_range = at[-1] - at[0] < len(at)
            positions = (
                slice(at[0], at[-1] + 1) if is_range else torch.tensor(at, device=segments.device)
            )
            yield _Part(slice(start, stop), positions, len(at))
        start = stop


def _several_queries(seqlen_q: int, seqlen_k: int) -> str:
    return (
        f"{seqlen_q} queries against {seqlen_k} keys, as in prefill by chunks, assisted decoding "
        "and cross-attention (it takes one query, or as many as keys)"
    )


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
    decodes = seqlen_q == 1 and (parts is not None or seqlen_k > 1)
    if decodes:
        decoder = named_decoder or _default_decoder(spec, q.device, q.dtype, q.shape[3])
        call = functools.partial(_decode, decoder, scaling)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = functools.partial(_prefill, spec, scaling, causal or parts is not None)
    if parts is not None:
        return _by_parts(spec.name, call, parts, q, k, v), None
    return _ForwardOnly.apply(spec.name, call, q, k, v), None  # type: ignore[no-untyped-call]


def _prefill(
    spec: BackendSpec, scaling: float | None, is_causal: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    k, v = _heads_for(spec, q, k, v)
    return spec.attention(q, k, v, softmax_scale=scaling, is_causal=is_causal)


def _decode(spec: BackendSpec, scaling: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _heads_for(spec, q, k, v)
    seqlens = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    return spec.decode(q, k, v, seqlens=seqlens, softmax_scale=scaling)


def _heads_for(spec: BackendSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with as many heads as the backend needs: those of q, or fewer."""
    group = q.shape[2] // k.shape[2]
    if group == 1 or spec.supports_gqa:
        return k, v
    return k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it would compile every padding
def _by_parts(
    name: str,
    call: Callable[..., Tensor],
    parts: Sequence[_Part],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Call a kernel for each part of a batch; the other positions of o are 0."""

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            at = part.rows, part.at
            to = at if q.shape[1] > 1 else (part.rows,)
            o[to] = call(q[to], k[at], v[at])
        return o

    return _ForwardOnly.apply(name, compute, q, k, v)  # type: ignore[no-untyped-call, no-any-return]


@functools.cache
def _default_decoder(
    spec: BackendSpec, device: torch.device, dtype: torch.dtype, head_dim: int
) -> BackendSpec:
    """Return the backend that decodes if none was named; cached, so that it warns only once."""
    if spec.has_decode(device.type):
        return spec
    decoder = default_decode_backend(device, dtype, head_dim)
    logging.getLogger(__name__).warning(
        f"{spec.name} has no decode kernel on {device.type}: with a cache, {decoder.name} decodes "
        "(attention_kernels.hf.register(decode_backend=...) names another)"
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
