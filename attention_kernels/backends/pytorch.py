"""Plain PyTorch, and each of PyTorch's scaled_dot_product_attention kernels by name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_kernels.contract import Kernels, per_query_head
from attention_kernels.errors import UnsupportedError
from attention_kernels.judge.truth import naive_attention
from attention_kernels.precision import PLAIN_PRECISIONS
from attention_kernels.registry import register

# Kernels whose inputs torch does not check for alignment.
UNCHECKED = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION


def _naive(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
    return naive_attention(q, *per_query_head(q, k, v), softmax_scale, is_causal)


def _visible(k_cache: Tensor, seqlens: Tensor) -> tuple[int, Tensor | None]:
    """Return the number of cache positions to visit, and a mask of those that each row sees.

    The mask is (batch, 1, 1, positions). On the CPU, reading the lengths is free: positions that no
    row uses are not visited, and rows of equal length need no mask. On a GPU, reading them would
    stall the host and break graph capture, so the whole cache is visited and masked.
    """
    positions = k_cache.shape[1]
    if seqlens.is_cpu:
        lengths = seqlens.tolist()
        positions = max(lengths)
        if min(lengths) == positions:
            return positions, None
    return positions, torch.arange(positions, device=seqlens.device) < seqlens[:, None, None, None]


def _naive_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, softmax_scale: float
) -> Tensor:
    positions, _ = _visible(k_cache, seqlens)
    k, v = per_query_head(q, k_cache[:, :positions], v_cache[:, :positions])
    return naive_attention(q, k, v, softmax_scale, False, seqlens)


@register(
    name="NAIVE_PYTORCH",
    family="pytorch",
    summary="Matmul, mask, softmax, matmul: the whole score matrix goes through global memory.",
    precisions=PLAIN_PRECISIONS,
    supports_gqa=True,
)
def load_naive() -> Kernels:
    """Load the case study's baseline."""
    return Kernels(_naive, _naive_decode, backward=True)


def _sdpa(name: str, kernel: SDPBackend) -> Kernels:
    is_flash = kernel == SDPBackend.FLASH_ATTENTION
    decode_device_types = ("cpu",) if is_flash else ("cuda", "cpu")  # on CUDA, flash takes no mask

    def run(
        q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        is_grouped = k.shape[2] != q.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if scale <= 0:  # flash attention masks with -infinity before it scales
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        if is_flash and q.is_cpu:
            # sdpa_kernel() sets a dozen flags, which takes as long as decoding a short row.
            return torch._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
            )[0]
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
            )

    def attention(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        """Return run()'s output transposed; raise UnsupportedError if it cannot run."""
        if reasons := _unaligned(kernel, q, k, v):
            raise UnsupportedError(name, reasons)
        try:
            o = run(q, k, v, *others)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reasons = _refusals(lambda: run(q, k, v, *others))
            if not reasons:
                raise
            raise UnsupportedError(name, reasons) from error
        return o.transpose(1, 2).contiguous()

    def decode(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, softmax_scale: float
    ) -> Tensor:
        positions, mask = _visible(k_cache, seqlens)
        k, v = k_cache.narrow(1, 0, positions), v_cache.narrow(1, 0, positions)
        if mask is not None:
            # For cuDNN, torch 2.11 turns a boolean mask into -65504, which a large score can exceed
            # (pytorch issue 177842).
            mask = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        return attention(q, k, v, softmax_scale, False, mask)

    def refusals(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[str]:
        return _unaligned(kernel, q, k, v) or _refusals(lambda: run(q, k, v, 1.0, is_causal))

    return Kernels(attention, decode, decode_device_types, refusals, backward=True)


def _unaligned(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Return reasons to refuse heads off multiples of 16 bytes, which torch does not check.

    FlashAttention-2 and cuDNN would break the CUDA context. Heads whose size is no multiple of 8,
    torch copies, and so aligns.
    """
    if kernel not in UNCHECKED or not q.is_cuda or q.shape[3] % 8:
        return []
    reasons = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        strides = [x.stride(dim) for dim in range(3) if x.shape[dim] > 1]
        if any(n * x.element_size() % 16 for n in (x.storage_offset(), *strides)):
            reasons.append(f"{name} must begin at a multiple of 16 bytes, and so must its rows")
    return reasons


def _refusals(call: Callable[[], Tensor]) -> list[str]:
    """Return torch's reasons to refuse a call, which it gives as warnings; empty if it runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            reasons = [_sentence(str(warning.message)) for warning in caught]
            no_reasons = "not used because:", "runtime disabled."
            return [x for x in reasons if not x.endswith(no_reasons)] or [_sentence(str(error))]
    return []


def _sentence(message: str) -> str:
    """Strip the C++ source location from a warning of torch's."""
    return message.strip().splitlines()[0].split("(Triggered internally")[0].strip()


def _register(kernel: SDPBackend, **fields: Any) -> None:
    name = f"PYTORCH_SDPA_{kernel.name}"
    add = register(name=name, family="pytorch", **{"precisions": PLAIN_PRECISIONS, **fields})
    add(functools.partial(_sdpa, name, kernel))


_register(
    SDPBackend.MATH,
    summary="PyTorch's SDPA composed of matmuls and a softmax, pinned.",
    supports_gqa=True,
)
# On CUDA it takes float16 and bfloat16 only.
_register(
    SDPBackend.FLASH_ATTENTION,
    summary="FlashAttention-2 as PyTorch ships it (on the CPU, torch's own flash kernel), pinned.",
    supports_gqa=True,
)
_register(
    SDPBackend.EFFICIENT_ATTENTION,
    summary="Memory-efficient attention (xFormers, CUTLASS) as PyTorch ships it, pinned.",
    # From compute capability 8.0 on, each float32 product is three TF32 products on tensor cores.
    precisions={"float32": "3xtf32", "float16": "fp16", "bfloat16": "bf16"},
    device_types=("cuda",),
)
_register(
    SDPBackend.CUDNN_ATTENTION,
    summary="cuDNN's fused attention as PyTorch ships it, pinned.",
    precisions={"float16": "fp16", "bfloat16": "bf16"},
    device_types=("cuda",),
    min_compute_capability=(8, 0),
)
