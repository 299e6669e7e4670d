"""NUMPY_GPU_LIKE_OPT2: operations are fused and the statistics are updated in place.

Change: one pass subtracts and exponentiates; one sums a row and adds to row_sum; one scales a row
        of O and adds the product; one divides and stores. alpha is computed by the pass that
        replaces row_max. row_max_new, row_sum_new and o_scaled are gone: 5 buffers become 2.
Why:    each pass over a buffer is memory traffic; values passed from one operation to the next
        within a row stay in the registers of its thread.
Cost:   a thread holds a row of head_dim numbers in registers while it adds the product to O.
Tile:   BLOCK_M x BLOCK_N = 16 x 16
Layout: contiguous
Expect: 6 passes per tile instead of 13, and the same results as NUMPY_GPU_LIKE_OPT1 bit for bit.
        The time falls little: there are fewer Python loops, but almost as many NumPy calls per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attention_kernels.backends.numpy.memory import BLOCK_M, BLOCK_N, Array, SharedMemory, Tile


class Block(NamedTuple):
    """The buffers of a block of threads; k and v hold the current tile of keys."""

    q: Array  # block_m * head_dim
    k: Array  # block_n * head_dim
    v: Array  # block_n * head_dim
    o: Array  # block_m * head_dim, not yet divided by row_sum
    row_max: Array  # block_m
    row_sum: Array  # block_m


class Temporaries(NamedTuple):
    """The temporary buffers of process_kv_tile."""

    scores: Array  # block_m * block_n; then the weights
    alpha: Array  # block_m


def idx2d(i: int, j: int, cols: int) -> int:
    """Return the index of element (i, j) of a row-major matrix."""
    return i * cols + j


def load_tile(
    g: Array, offset: int, row_stride: int, start: int, seqlen: int, out: Array, cols: int
) -> None:
    """Copy rows from global memory; those past the end become zero."""
    for r in range(len(out) // cols):
        row = slice(idx2d(r, 0, cols), idx2d(r, cols, cols))
        g_row = offset + idx2d(start + r, 0, row_stride)
        out[row] = g[g_row : g_row + cols] if start + r < seqlen else 0


def mat_mul_transposed(
    a: Array, b: Array, scale: float, out: Array, rows: int, cols: int, inner: int
) -> None:
    """Write scale * a b^T to out."""
    np.matmul(a.reshape(rows, inner), b.reshape(cols, inner).T, out=out.reshape(rows, cols))
    np.multiply(out, scale, out=out)


def mask(scores: Array, tile: Tile, rows: int, cols: int) -> None:
    """Set the scores of keys that a row does not see to -inf."""
    if tile.visible_keys(0) == tile.block_n:
        return
    for m in range(rows):
        scores[idx2d(m, tile.visible_keys(m), cols) : idx2d(m, cols, cols)] = -np.inf


def mat_row_max_inplace(matrix: Array, row_max: Array, alpha: Array, rows: int, cols: int) -> None:
    """Set row_max[m] to the maximum of itself and row m, and alpha[m] to exp(old - new)."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        row_max_new = max(row_max[m], np.maximum.reduce(matrix[row]))
        alpha[m] = np.exp(row_max[m] - row_max_new)
        row_max[m] = row_max_new


def row_sum_mul_add_inplace(
    matrix: Array, alpha: Array, row_sum: Array, rows: int, cols: int
) -> None:
    """Set row_sum[m] to alpha[m] * row_sum[m] + the sum of row m."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        row_sum[m] = alpha[m] * row_sum[m] + np.add.reduce(matrix[row])


def mat_sub_vec_exp(matrix: Array, vector: Array, out: Array, rows: int, cols: int) -> None:
    """Write exp(matrix[m] - vector[m]) to out[m]."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        np.subtract(matrix[row], vector[m], out=out[row])
        np.exp(out[row], out=out[row])


def mat_div_vec_store(
    matrix: Array,
    vector: Array,
    g: Array,
    offset: int,
    row_stride: int,
    start: int,
    seqlen: int,
    cols: int,
) -> None:
    """Write matrix[m] / vector[m] to global memory, except rows past the end."""
    for m in range(min(len(matrix) // cols, seqlen - start)):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        g_row = offset + idx2d(start + m, 0, row_stride)
        np.divide(matrix[row], vector[m], out=g[g_row : g_row + cols])


def mat_scale_rows_mul_add(
    weights: Array, v: Array, alpha: Array, tile: Tile, out: Array, rows: int, cols: int
) -> None:
    """Set out[m] to alpha[m] * out[m] + weights[m] v; hidden values are not multiplied."""
    v_rows = v.reshape(tile.block_n, cols)
    for m in range(rows):
        visible = tile.visible_keys(m)
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        first = idx2d(m, 0, tile.block_n)
        product = np.matmul(weights[first : first + visible], v_rows[:visible])  # registers
        np.multiply(out[row], alpha[m], out=out[row])
        np.add(out[row], product, out=out[row])


def process_kv_tile(
    block: Block,
    temp: Temporaries,
    tile: Tile,
    softmax_scale: float,
    block_m: int,
    block_n: int,
    head_dim: int,
) -> None:
    """Add one tile of keys to O, row_max and row_sum."""
    mat_mul_transposed(block.q, block.k, softmax_scale, temp.scores, block_m, block_n, head_dim)
    mask(temp.scores, tile, block_m, block_n)
    mat_row_max_inplace(temp.scores, block.row_max, temp.alpha, block_m, block_n)
    mat_sub_vec_exp(temp.scores, block.row_max, temp.scores, block_m, block_n)
    row_sum_mul_add_inplace(temp.scores, temp.alpha, block.row_sum, block_m, block_n)
    mat_scale_rows_mul_add(temp.scores, block.v, temp.alpha, tile, block.o, block_m, head_dim)


def attention_block(
    g_q: Array,
    g_k: Array,
    g_v: Array,
    g_o: Array,
    offset: int,
    row_stride: int,
    m_start: int,
    seqlen: int,
    head_dim: int,
    softmax_scale: float,
    is_causal: bool,
    block_m: int,
    block_n: int,
) -> None:
    """Run one block of threads: rows of O from m_start on, in the head that begins at `offset`."""
    shared = SharedMemory(g_q.dtype)
    block = Block(
        q=shared.buffer(block_m * head_dim),
        k=shared.buffer(block_n * head_dim),
        v=shared.buffer(block_n * head_dim),
        o=shared.buffer(block_m * head_dim),
        row_max=shared.buffer(block_m),
        row_sum=shared.buffer(block_m),
    )
    temp = Temporaries(
        scores=shared.buffer(block_m * block_n),
        alpha=shared.buffer(block_m),
    )
    load_tile(g_q, offset, row_stride, m_start, seqlen, block.q, head_dim)
    block.o.fill(0)
    block.row_max.fill(-np.inf)
    block.row_sum.fill(0)
    # The queries of this block see only keys before n_end.
    n_end = min(m_start + block_m, seqlen) if is_causal else seqlen
    for n_start in range(0, n_end, block_n):
        load_tile(g_k, offset, row_stride, n_start, seqlen, block.k, head_dim)
        load_tile(g_v, offset, row_stride, n_start, seqlen, block.v, head_dim)
        tile = Tile(m_start, n_start, block_n, seqlen, is_causal)
        process_kv_tile(block, temp, tile, softmax_scale, block_m, block_n, head_dim)
    mat_div_vec_store(block.o, block.row_sum, g_o, offset, row_stride, m_start, seqlen, head_dim)


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
    """Run the grid, one block after the other; (batch, seqlen, num_heads, head_dim) in and out."""
    g_q, g_k, g_v = q.reshape(-1), k.reshape(-1), v.reshape(-1)
    g_o = np.empty(q.size, q.dtype)
    batch, seqlen, num_heads, head_dim = q.shape
    row_stride = num_heads * head_dim
    for b in range(batch):
        for h in range(num_heads):
            for m_start in range(0, seqlen, block_m):
                attention_block(
                    g_q,
                    g_k,
                    g_v,
                    g_o,
                    idx2d(b * seqlen, h * head_dim, row_stride),
                    row_stride,
                    m_start,
                    seqlen,
                    head_dim,
                    softmax_scale,
                    is_causal,
                    block_m,
                    block_n,
                )
    return g_o.reshape(q.shape)
