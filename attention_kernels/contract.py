"""The attention contract: shapes, dtypes, and the checks of arguments.

    attention(q, k, v, *, softmax_scale=None, is_causal=True) -> o
    decode(q, k_cache, v_cache, seqlens, *, softmax_scale=None) -> o

attention: q, k, v and o are (batch, seqlen, num_heads, head_dim) with seqlen_q == seqlen_k; q, k
and v may be strided views whose last stride is 1; o is a new, contiguous tensor. With is_causal,
query i sees the keys 0..i.

Grouped queries: a backend that declares supports_gqa also takes k and v (or k_cache and v_cache)
with fewer heads than q, of which num_heads is a multiple. Head h of q uses head
h * num_kv_heads / num_heads of k and v, rounded down.

Inputs are finite. A key or value that a query does not see, however large, changes no bit of that
query's row of o. NaN and infinity may change it, because 0 * NaN is NaN.

decode: one new token per row against a cache. q and o are (batch, 1, num_heads, head_dim), k_cache
and v_cache are (batch, max_seqlen, num_heads, head_dim), seqlens is int32 (batch,) on the same
device and counts the valid keys of each row, including the new token's own. Each length must be
between 1 and max_seqlen. On the CPU that is checked; on CUDA, where the check would stall the host,
the caller guarantees it. Keys and values past seqlens are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.errors import ArgumentError

LAYOUT = "(batch, seqlen, num_heads, head_dim)"
AttentionFunction = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""A backend's attention kernel: from checked (q, k, v, softmax_scale, is_causal) to a new o."""
DecodeFunction = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""A backend's decode kernel: checked (q, k_cache, v_cache, seqlens, softmax_scale) to a new o."""


@dataclass(frozen=True)
class Kernels:
    """The result of loading a backend: an attention kernel, a decode kernel or both."""

    attention: AttentionFunction | None = None
    decode: DecodeFunction | None = None
    decode_device_types: tuple[str, ...] = ("cuda", "cpu")
    """The device types that the decode kernel runs on."""
    refusals: Callable[[Tensor, Tensor, Tensor, bool], list[str]] | None = None
    """A function that lists the kernel's own reasons to refuse a call that the spec allows."""
    backward: bool = False
    """Whether autograd can differentiate through the kernels."""
    prepare: Callable[[str], None] | None = None
    """A function that builds the kernels for a device type; raises UnavailableBackendError."""


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, is_causal: bool
) -> float:
    """Check the arguments of attention() and return the scale to use.

    Raises ArgumentError with a list of everything that is wrong.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_tensors(tensors)
    if not isinstance(is_causal, bool):
        raise ArgumentError(f"is_causal must be True or False, not {is_causal!r}")
    fits = _shapes_fit(q, k, v) and q.shape[1] == k.shape[1]
    if not (fits and _are_alike(q, k, v)):
        raise ArgumentError("; ".join(_complaints(tensors, "" if fits else "have the same shape")))
    return check_scale(softmax_scale, q.shape[3])


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, softmax_scale: float | None
) -> float:
    """Check the arguments of decode() and return the scale to use; raises ArgumentError."""
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    check_tensors({**tensors, "seqlens": seqlens})
    wrong: list[str] = []
    fits = _shapes_fit(q, k_cache, v_cache) and q.shape[1] == 1
    if not (fits and _are_alike(q, k_cache, v_cache)):
        wrong = _complaints(tensors, "" if fits else "be one token per row and two caches that fit")
    if seqlens.shape != q.shape[:1] or seqlens.dtype != torch.int32 or seqlens.device != q.device:
        wrong.append(
            f"seqlens must be int32 {tuple(q.shape[:1])} on {q.device}, not "
            f"{dtype_name(seqlens.dtype)} {tuple(seqlens.shape)} on {seqlens.device}"
        )
    # A traced tensor has no values to check.
    elif not wrong and seqlens.is_cpu and not torch.compiler.is_compiling():
        lengths, max_seqlen = seqlens.tolist(), k_cache.shape[1]
        if min(lengths) < 1 or max(lengths) > max_seqlen:
            wrong.append(f"seqlens must be between 1 and {max_seqlen}, not {lengths}")
    if wrong:
        raise ArgumentError("; ".join(wrong))
    return check_scale(softmax_scale, q.shape[3])


def check_tensors(arguments: Mapping[str, object]) -> None:
    """Raise ArgumentError for arguments that are not tensors, for example NumPy arrays."""
    wrong = [
        f"{name} must be a torch.Tensor, not {type(value).__name__}"
        for name, value in arguments.items()
        if not isinstance(value, Tensor)
    ]
    if wrong:
        raise ArgumentError("; ".join(wrong))


def per_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with as many heads as q, copied if they have fewer."""
    if k.shape[2] == q.shape[2]:
        return k, v
    group = q.shape[2] // k.shape[2]
    return k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Return the scale, 1 / sqrt(head_dim) for None; raise ArgumentError if it is not finite."""
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    is_number = hasattr(softmax_scale, "__float__") and not isinstance(softmax_scale, bool)
    if not is_number or not math.isfinite(softmax_scale):
        raise ArgumentError(f"softmax_scale must be a finite number, not {softmax_scale!r}")
    return float(softmax_scale)


def _shapes_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Check that k and v fit q, whatever their lengths: they may have fewer heads."""
    if not (q.dim() == k.dim() == 4 and k.shape == v.shape):
        return False
    (batch, _, num_heads, head_dim), (k_batch, _, kv_heads, k_head_dim) = q.shape, k.shape
    fits = k_batch == batch and k_head_dim == head_dim
    return fits and kv_heads > 0 and num_heads % kv_heads == 0


def _are_alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Check quickly that 4-d tensors have valid dtypes, devices, last strides and sizes."""
    return (
        q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and (q.shape[3] == 1 or q.stride(3) == k.stride(3) == v.stride(3) == 1)
        and q.numel() > 0
        and k.numel() > 0
    )


def _complaints(tensors: Mapping[str, Tensor], shape_rule: str) -> list[str]:
    """Return all that is wrong with tensors; shape_rule is the rule that their shapes break."""
    wrong, names = [], ", ".join(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            wrong.append(f"{name} must be {LAYOUT}, not {tuple(tensor.shape)}")
        elif tensor.shape[3] > 1 and tensor.stride(3) != 1:
            wrong.append(f"the last stride of {name} must be 1, not {tensor.stride(3)}")
        if tensor.numel() == 0:
            wrong.append(f"{name} is empty: {tuple(tensor.shape)}")
    if shape_rule and all(tensor.dim() == 4 for tensor in tensors.values()):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors.values())
        wrong.append(f"{names} must {shape_rule}, not {shapes}")
    for rule, values in (
        ("have the same dtype", [dtype_name(tensor.dtype) for tensor in tensors.values()]),
        ("be on the same device", [str(tensor.device) for tensor in tensors.values()]),
    ):
        if len({*values}) > 1:
            wrong.append(f"{names} must {rule}, not {', '.join(values)}")
    return wrong


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as backends list it, e.g. "float32"."""
    return str(dtype).removeprefix("torch.")
