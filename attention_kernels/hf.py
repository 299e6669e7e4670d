"""Use the backends in Hugging Face transformers, each as the `attn_implementation` of its name.

    import attention_kernels.hf
    AutoModelForCausalLM.from_pretrained(..., attn_implementation="CUSTOM_CUDA_VERSION_12")

Importing this module registers every backend but loads none. When there are as many queries as keys
(prefill, recompute), the backend's attention is called on views of the model's tensors. For one
query and a cache, its decode kernel is called; a backend without one is replaced by
registry.default_decode_backend(), with one warning. In grouped-query attention, keys and values are
copied once per query head.

Raises UnsupportedError, with every reason, for what a backend cannot do: padding, any mask other
than causal or full, static caches, several queries against more keys, dropout, attention weights as
output, a backward pass, models that compute attention themselves, and any argument not known to be
harmless. Tested with transformers 5.17 and 5.23.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

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
        no_mask = type(spec.name, (_NoMask,), {})()
        AttentionMaskInterface.register(spec.name, functools.partial(_mask, no_mask))
        AttentionInterface.register(spec.name, functools.partial(_attention, spec, decoder))


class _NoMask:
    """A stand-in for the mask that models pass on to _attention(); any other use of it fails.

    None would be wrong: a model that computes attention itself (Bloom, CodeGen) would treat it as
    no mask. Each backend gets a subclass with its name.
    """

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(str(self._error()))

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise cls._error()

    @classmethod
    def _error(cls) -> UnsupportedError:
        reason = "the model reads the mask, so it computes attention itself or changes the mask"
        return UnsupportedError(cls.__name__, [reason])


def _mask(
    no_mask: _NoMask,
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **_: Any,  # size, device and dtype: only a mask would need them
) -> _NoMask:
    """Return no_mask if the mask is plain causal or full; raise UnsupportedError otherwise.

    attention_mask: bool (batch, keys), False for padding. Reading it synchronizes with the device
    once per forward pass, as in transformers' own sdpa.
    """
    causal = mask_function is causal_mask_function
    skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    if causal and q_offset + q_length != kv_length:
        reason = (
            f"{kv_length} keys of which {int(q_offset + q_length)} are filled, as in a static "
            "cache (it takes the dynamic one, transformers' default)"
        )
    elif not skip or not (causal or mask_function is bidirectional_mask_function):
        reason = (
            "a sliding window, packed sequences or another special mask "
            "(it takes the causal and the full one)"
        )
    elif attention_mask is not None and not (
        attention_mask.shape[1] >= kv_length and attention_mask[:, :kv_length].all()
    ):
        reason = (
            "an attention_mask that hides padding (it takes prompts of one length, or one prompt)"
        )
    else:
        return no_mask
    raise UnsupportedError(type(no_mask).__name__, [reason])


def _attention(
    spec: BackendSpec,
    named_decoder: BackendSpec | None,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _NoMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers; return o, and None in place of the weights.

    query, key and value are (batch, num_heads, seqlen, head_dim); the output is (batch, seqlen,
    num_heads, head_dim). is_causal: None to use the module's, as in transformers' sdpa.
    """
    num_heads, seqlen_q, seqlen_k = query.shape[1], query.shape[2], key.shape[2]
    wants_weights = arguments.pop("output_attentions", False) or any(
        name.endswith("attentions") for name in _active_collector.get() or ()
    )
    reasons = [
        f"{name}, which it does not compute"
        for name, argument in arguments.items()
        if name not in _HARMLESS and argument is not None and argument is not False
    ]
    if wants_weights:
        reasons.append("output_attentions (the weights are never stored)")
    if isinstance(attention_mask, Tensor):
        reasons.append(f"an attention_mask of shape {tuple(attention_mask.shape)}")
    if dropout:
        reasons.append(f"dropout of {dropout} (model.eval() switches it off)")
    if seqlen_q not in (1, seqlen_k):
        reasons.append(
            f"{seqlen_q} queries against {seqlen_k} keys, as in prefill by chunks, assisted "
            "decoding and cross-attention (it takes one query, or as many as keys)"
        )
    if reasons:
        raise UnsupportedError(spec.name, reasons)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if k.shape[2] != num_heads:
        k, v = (x.repeat_interleave(num_heads // x.shape[2], dim=2) for x in (k, v))
    if seqlen_q == seqlen_k:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = functools.partial(spec.attention, softmax_scale=scaling, is_causal=causal)
    else:
        decoder = named_decoder or _default_decoder(spec, q.device, q.dtype, q.shape[3])
        seqlens = torch.full((q.shape[0],), seqlen_k, dtype=torch.int32, device=q.device)
        call = functools.partial(decoder.decode, seqlens=seqlens, softmax_scale=scaling)
    return _ForwardOnly.apply(spec.name, call, q, k, v), None  # type: ignore[no-untyped-call]


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
