"""NUMPY_BASIC: FlashAttention-1 in plain NumPy.

Change: the first rung. Tiles are slices, all heads of the batch are computed together, and each
        line of the algorithm is one expression.
Why:    the algorithm is easy to read, and S, seqlen x seqlen numbers, is never stored as a whole.
Cost:   nearly every expression allocates its result.
Tile:   BLOCK_M x BLOCK_N = 16 x 16
Layout: strided
Expect: the fastest of the five: a tile costs one call per line, whatever batch and num_heads are.
"""

from __future__ import annotations

import numpy as np

from attention_kernels.backends.numpy.memory import BLOCK_M, BLOCK_N, Array


def process_kv_tile(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    row_max: Array,
    row_sum: Array,
    visible: Array | None,
    softmax_scale: float,
) -> tuple[Array, Array, Array]:
    """Return O (not yet divided), row_max and row_sum after one more tile of keys.

    q and o: (batch, num_heads, rows, head_dim); k and v: (batch, num_heads, columns, head_dim);
    row_max and row_sum: (batch, num_heads, rows, 1); visible: (rows, columns), or None if all are.
    """
    scores = softmax_scale * (q @ k.swapaxes(2, 3))
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    row_max_new = np.maximum(row_max, scores.max(axis=3, keepdims=True))
    alpha = np.exp(row_max - row_max_new)
    weights = np.exp(scores - row_max_new)
    row_sum = alpha * row_sum + weights.sum(axis=3, keepdims=True)
    if visible is None:
        return alpha * o + weights @ v, row_max_new, row_sum
    # Hidden values are left out of the sum: a weight of 0 would not do, because 0 * NaN is NaN.
    products = weights[..., None] * v[:, :, None]  # (batch, num_heads, rows, columns, head_dim)
    return alpha * o + products.sum(axis=3, where=visible[..., None]), row_max_new, row_sum


def attention(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float,
    is_causal: bool,
    *,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> Array:
    """Compute attention; (batch, seqlen, num_heads, head_dim) in and out."""
    o = np.empty(q.shape, q.dtype)
    seqlen = q.shape[1]
    q, k, v, o_heads = (x.swapaxes(1, 2) for x in (q, k, v, o))
    position = np.arange(seqlen)
    for m_start in range(0, seqlen, block_m):
        m = slice(m_start, m_start + block_m)
        o_block = np.zeros_like(q[:, :, m])
        row_max = np.full_like(o_block[..., :1], -np.inf)
        row_sum = np.zeros_like(row_max)
        # The queries of this block see only keys before n_end.
        n_end = min(m_start + block_m, seqlen) if is_causal else seqlen
        for n_start in range(0, n_end, block_n):
            n = slice(n_start, min(n_start + block_n, n_end))
            masked = is_causal and n.stop > m_start + 1
            visible = position[n] <= position[m, None] if masked else None
            o_block, row_max, row_sum = process_kv_tile(
                q[:, :, m],
                k[:, :, n],
                v[:, :, n],
                o_block,
                row_max,
                row_sum,
                visible,
                softmax_scale,
            )
        o_heads[:, :, m] = o_block / row_sum
    return o
