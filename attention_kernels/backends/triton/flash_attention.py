"""FlashAttention-2's forward pass in Triton: one kernel, two ways to load K.

Algorithm 1 of Dao, FlashAttention-2 (2023), without the log-sum-exp output. Names: block_m is the
paper's Br, block_n its Bc; S = Q K^T and P = softmax(S) are never stored in global memory.

For CUDA tensors Triton compiles the kernel and tunes its tile on the first call of each size. For
CPU tensors Triton's interpreter runs the same function: for correctness, never for timing.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.testing
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton
from triton.runtime.interpreter import InterpretedFunction

from attention_kernels import contract

# The interpreter's tile: large, because every operation costs Python time.
INTERPRETED_TILE = {"block_m": 128, "block_n": 128}


def flash_attention_forward(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    q_stride_batch,
    q_stride_seqlen,
    q_stride_head,
    k_stride_batch,
    k_stride_seqlen,
    k_stride_head,
    v_stride_batch,
    v_stride_seqlen,
    v_stride_head,
    num_heads,
    seqlen,
    scale_log2,
    q_sign,
    seqlen_bucket,
    heads_bucket,
    head_dim: tl.constexpr,
    is_causal: tl.constexpr,
    transposed_k: tl.constexpr,
    interpreted: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Compute block_m rows of o for one (batch, head); grid (batch * num_heads, m_blocks).

    scale_log2 = |softmax_scale| log2(e), so that exp2() replaces exp(); the scale's sign goes to q.
    seqlen_bucket and heads_bucket are only used in the autotuner's key.

    The kernel uses plain pointers. Triton 3.7 deprecates tl.make_block_ptr(), and its replacement
    tl.make_tensor_descriptor() needs a global allocator for the descriptors, and tensors and rows
    that begin at multiples of 16 bytes, where the contract allows any stride.
    """
    # Programs start in the order of their ids. Under a causal mask the last rows see the most keys,
    # so the last rows of all heads go first, and short rows fill the gaps at the end.
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    m_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_m
    m = m_start + tl.arange(0, block_m)
    n_in_block = tl.arange(0, block_n)
    d = tl.arange(0, head_dim)
    # In 64 bits, so that no offset overflows.
    q_stride_seqlen = tl.cast(q_stride_seqlen, tl.int64)
    k_stride_seqlen = tl.cast(k_stride_seqlen, tl.int64)
    v_stride_seqlen = tl.cast(v_stride_seqlen, tl.int64)
    o_stride_seqlen = tl.cast(num_heads * head_dim, tl.int64)
    # NumPy has no bfloat16 products. A float32 holds each product exactly, as in tensor cores.
    dot_dtype: tl.constexpr = tl.float32 if interpreted else q_ptr.dtype.element_ty

    q_ptr += batch * q_stride_batch + head * q_stride_head + m_start * q_stride_seqlen
    k_ptr += batch * k_stride_batch + head * k_stride_head
    v_ptr += batch * v_stride_batch + head * v_stride_head
    q_offsets = tl.arange(0, block_m)[:, None] * q_stride_seqlen + d[None, :]
    v_offsets = n_in_block[:, None] * v_stride_seqlen + d[None, :]
    if transposed_k:
        k_offsets = d[:, None] + n_in_block[None, :] * k_stride_seqlen
    else:
        k_offsets = n_in_block[:, None] * k_stride_seqlen + d[None, :]

    # Rows past the end are loaded as zeros: their scores are finite, whatever is in memory there.
    q = tl.load(q_ptr + q_offsets, mask=m[:, None] < seqlen, other=0.0).to(dot_dtype)
    q *= tl.cast(q_sign, dot_dtype)  # bfloat16 times an integer would be float32

    # torch.compile passes a Python float as a double.
    scale_log2 = tl.cast(scale_log2, tl.float32)
    row_max = tl.full((block_m,), float("-inf"), tl.float32)
    row_sum = tl.full((block_m,), 0.0, tl.float32)
    o = tl.full((block_m, head_dim), 0.0, tl.float32)

    # Every row sees the keys before full_stop; some rows see those from full_stop to stop.
    if is_causal:
        full_stop = m_start // block_n * block_n
        stop = tl.minimum(m_start + block_m, seqlen)
    else:
        full_stop = seqlen // block_n * block_n
        stop = seqlen

    # One source, unrolled into two loops at compile time: the full tiles, then the masked ones.
    # Every row sees key 0, which is in the first tile, so row_max is finite after that tile.
    for masked in tl.static_range(2):
        for n_start in range(full_stop if masked else 0, stop if masked else full_stop, block_n):
            n = n_start + n_in_block
            if masked:
                inside = n < seqlen
                k_inside = inside[None, :] if transposed_k else inside[:, None]
                k = tl.load(k_ptr + k_offsets, mask=k_inside, other=0.0)
                v = tl.load(v_ptr + v_offsets, mask=inside[:, None], other=0.0)
            else:
                k = tl.load(k_ptr + k_offsets)
                v = tl.load(v_ptr + v_offsets)
            if not transposed_k:
                k = tl.trans(k)

            s = tl.dot(q, k.to(dot_dtype), input_precision="ieee")
            if masked and is_causal:
                # P is 0 for future keys, but V may be anything, and 0 * NaN is not 0. If the V of a
                # key is not finite, it is replaced by 0, and its score is NaN in rows that see it.
                zero = tl.reduce(v.to(tl.float32) * 0.0, 1, tl.standard._sum_combine)
                v = tl.where(zero[:, None] == 0.0, v, 0.0)
                s = tl.where(n[None, :] <= m[:, None], s + zero[None, :], float("-inf"))
            elif masked:
                s = tl.where(n[None, :] < seqlen, s, float("-inf"))

            # tl.max() and tl.sum() are these reductions, but jitted: the interpreter cannot call
            # them in a process that did not set TRITON_INTERPRET.
            tile_max = tl.reduce(s, 1, tl.standard._elementwise_max) * scale_log2
            new_max = tl.maximum(row_max, tile_max)
            p = tl.math.exp2(s * scale_log2 - new_max[:, None])
            row_scale = tl.math.exp2(row_max - new_max)
            row_sum = row_sum * row_scale + tl.reduce(p, 1, tl.standard._sum_combine)
            p = p.to(v_ptr.dtype.element_ty).to(dot_dtype)
            if dot_dtype == tl.float32:
                # Sum each tile separately: one sum over 16,384 keys would be rounded 16,384 times.
                # Add it with fma: the compiler would fold a plain addition into the product.
                tile_sum = tl.dot(p, v.to(dot_dtype), input_precision="ieee")
                o = tl.fma(o, row_scale[:, None].broadcast_to(o.shape), tile_sum)
            else:
                o = tl.dot(p, v.to(dot_dtype), o * row_scale[:, None])
            row_max = new_max
            k_ptr += block_n * k_stride_seqlen
            v_ptr += block_n * v_stride_seqlen

    o_ptr += (batch * seqlen + m_start) * o_stride_seqlen + head * head_dim
    o_offsets = tl.arange(0, block_m)[:, None] * o_stride_seqlen + d[None, :]
    o = o / row_sum[:, None]
    tl.store(o_ptr + o_offsets, o.to(o_ptr.dtype.element_ty), mask=m[:, None] < seqlen)


# By default Triton recompiles for sizes of 1 and for multiples of 16.
_compiled = triton.jit(
    flash_attention_forward,
    do_not_specialize=["num_heads", "seqlen", "seqlen_bucket", "heads_bucket"],
)


@functools.cache
def _tell_of_tuning() -> None:
    message = "tuning the Triton kernel, which takes some seconds for each new input size"
    print(message, file=sys.stderr, flush=True)


def _bench(kernel_call: Callable[[], None], quantiles: tuple[float, ...]) -> Any:
    """Measure one tile for the autotuner, in milliseconds."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the Triton kernel has not been tuned for inputs of this size, and a CUDA graph cannot "
            "capture the tuning: call it once before the capture"
        )
    _tell_of_tuning()
    return triton.testing.do_bench(kernel_call, warmup=10, rep=40, quantiles=quantiles)


def _tuned(*tiles: tuple[int, int, int, int]) -> Any:
    """Return the kernel, autotuned over tiles of (block_m, block_n, num_warps, num_stages)."""
    return triton.autotune(
        [
            triton.Config({"block_m": m, "block_n": n}, num_warps=warps, num_stages=stages)
            for m, n, warps, stages in tiles
        ],
        key=["head_dim", "is_causal", "transposed_k", "seqlen_bucket", "heads_bucket"],
        do_bench=_bench,
    )(_compiled)


# A head_dim of 128 needs more registers, and float32, which cannot use tensor cores, more warps.
# Triton 3.6 begins to copy a tile after the products of the previous one: with two stages it waits
# for the copy at once, and only other blocks hide the wait. The worst of these spills 32 bytes on
# sm_90 and 80 on sm_80, except 128 x 128 at head_dim 128, which is meant for sm_90 and spills 1,272
# on sm_80.
_half = _tuned(
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 128, 8, 3),
    (128, 32, 4, 4),
    (64, 128, 4, 3),
    (64, 64, 4, 3),
    (64, 32, 4, 3),
)
_half_128 = _tuned((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3))
_float32 = _tuned((64, 64, 16, 3), (64, 32, 8, 3), (32, 64, 8, 2), (32, 32, 4, 2), (16, 16, 4, 2))
_float32_128 = _tuned((64, 64, 16, 2), (32, 64, 8, 2), (32, 16, 8, 2), (16, 16, 4, 2))


def _kernel(dtype: torch.dtype, head_dim: int) -> Any:
    """Return the kernel to launch; torch finds an op's kernels by looking for wrap_triton(name)."""
    if dtype == torch.float32:
        return wrap_triton(_float32) if head_dim <= 64 else wrap_triton(_float32_128)
    return wrap_triton(_half) if head_dim <= 64 else wrap_triton(_half_128)


def _bucket(size: int, smallest: int) -> int:
    """Round a size up to `smallest` times a power of two; a tile is tuned once per bucket.

    The size is only compared, so torch.compile() guards it by its bucket and not by its value.
    """
    while smallest < size:
        smallest *= 2
    return smallest


def _interpretable() -> Any:
    """Return the kernel for Triton's interpreter, whether or not TRITON_INTERPRET is set.

    The interpreter adds names to the globals of what it runs, so it gets a copy of this module's.
    In the copy, range() takes the interpreter's scalars, which Triton 3.6 cannot convert to
    integers with NumPy 2.4. The interpreter patches triton.language while it runs, so no other
    thread can compile a kernel then.
    """

    def scalar_range(*args: Any) -> range:
        return range(
            *(arg.handle.data.item() if isinstance(arg, tl.tensor) else arg for arg in args)
        )

    names = {**flash_attention_forward.__globals__, "range": scalar_range}
    return InterpretedFunction(types.FunctionType(flash_attention_forward.__code__, names))


_interpreted = _interpretable()
_lock = threading.RLock()  # neither the autotuner nor the interpreter is thread-safe


@custom_op("attention_kernels::interpreted_triton_flash_attention", mutates_args=())
def _interpret(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool, transposed_k: bool
) -> Tensor:
    """Run the kernel in the interpreter; an op, so that torch.compile() does not trace it."""
    o = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    arguments = _arguments(q, k, v, o, softmax_scale, is_causal, transposed_k)
    with _lock, np.errstate(all="ignore"):  # a GPU does not warn about NaN, either
        _interpreted[_grid(q, INTERPRETED_TILE)](*arguments, interpreted=True, **INTERPRETED_TILE)
    return o


@_interpret.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool, transposed_k: bool
) -> Tensor:
    return q.new_empty(q.shape)


def _grid(q: Tensor, tile: Mapping[str, Any]) -> tuple[int, int]:
    batch, seqlen, num_heads, _ = q.shape
    return batch * num_heads, (seqlen + tile["block_m"] - 1) // tile["block_m"]


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    softmax_scale: float,
    is_causal: bool,
    transposed_k: bool,
) -> tuple[Any, ...]:
    """Return the kernel's arguments up to and including transposed_k."""
    batch, seqlen, num_heads, head_dim = q.shape
    return (
        *(q, k, v, o),
        *(stride for x in (q, k, v) for stride in x.stride()[:3]),
        num_heads,
        seqlen,
        # For a scale of 0, q_sign is 0 instead: masked scores are -inf, and 0 * -inf is NaN.
        math.log2(math.e) * (abs(softmax_scale) or 1.0),
        (softmax_scale > 0) - (softmax_scale < 0),
        _bucket(seqlen, 64),
        _bucket(batch * num_heads, 1),
        head_dim,
        is_causal,
        transposed_k,
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool, transposed_k: bool
) -> Tensor:
    contract.check_attention(q, k, v, softmax_scale, is_causal)
    if q.device.type == "cpu":
        return _interpret(q, k, v, softmax_scale, is_causal, transposed_k)  # type: ignore[no-any-return]
    o = q.new_empty(q.shape)
    arguments = _arguments(q, k, v, o, softmax_scale, is_causal, transposed_k)
    with _lock, torch.cuda.device(q.device):
        _kernel(q.dtype, q.shape[3])[lambda tile: _grid(q, tile)](*arguments, interpreted=False)
    return o


@triton_op("attention_kernels::triton_flash_attention", mutates_args=())
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool
) -> Tensor:
    """Compute attention, loading tiles of K as stored, (block_n, head_dim), and transposing them.

    q, k, v: see attention_kernels.contract. Raises ArgumentError, and RuntimeError in a CUDA graph
    capture if the tile has not been tuned.
    """
    return _forward(q, k, v, softmax_scale, is_causal, transposed_k=False)


@triton_op("attention_kernels::triton_flash_attention_transposed_k", mutates_args=())
def flash_attention_transposed_k(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool
) -> Tensor:
    """Compute attention as flash_attention() does, but load K transposed, (head_dim, block_n).

    The loads are just as coalesced: the compiler lays a warp along the dimension that is contiguous
    in memory, whichever it is in the tile. For sm_90 Triton 3.6 generates the same instructions.
    """
    return _forward(q, k, v, softmax_scale, is_causal, transposed_k=True)
