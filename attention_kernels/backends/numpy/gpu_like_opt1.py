"""NUMPY_GPU_LIKE_OPT1: buffers are reused.

Change: `scores` also holds the shifted scores and then their exponentials, computed in place. The
        maximum of the tile is written to row_max_new and turned into the new maximum there, and
        likewise the sum in row_sum_new. scores_shifted, weights, tile_max and tile_sum are gone: 9
        buffers become 5.
Why:    a multiprocessor runs only as many blocks at once as fit into its shared memory.
Cost:   no extra operations: the passes over memory are the same.
Tile:   BLOCK_M x BLOCK_N = 16 x 16
Layout: contiguous
Expect: the time of NUMPY_GPU_LIKE_1D and the same results bit for bit; on a GPU, more blocks at
        once.
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

    scores: Array  # block_m * block_n; then shifted by row_max_new, then the weights
    row_max_new: Array  # block_m; at first the tile's own statistic
    row_sum_new: Array  # block_m; at first the tile's own statistic
    alpha: Array  # block_m
    o_scaled: Array  # block_m * head_dim


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


def store_tile(
    matrix: Array, g: Array, offset: int, row_stride: int, start: int, seqlen: int, cols: int
) -> None:
    """Copy rows to global memory, except those past the end."""
    for m in range(min(len(matrix) // cols, seqlen - start)):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        g_row = offset + idx2d(start + m, 0, row_stride)
        g[g_row : g_row + cols] = matrix[row]


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


def mat_row_max(matrix: Array, out: Array, rows: int, cols: int) -> None:
    """Write the maximum of row m to out[m]."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        out[m] = np.maximum.reduce(matrix[row])


def mat_row_sum(matrix: Array, out: Array, rows: int, cols: int) -> None:
    """Write the sum of row m to out[m]."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        out[m] = np.add.reduce(matrix[row])


def mat_sub_vec(matrix: Array, vector: Array, out: Array, rows: int, cols: int) -> None:
    """Write matrix[m] - vector[m] to out[m]."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        np.subtract(matrix[row], vector[m], out=out[row])


def mat_div_vec(matrix: Array, vector: Array, out: Array, rows: int, cols: int) -> None:
    """Write matrix[m] / vector[m] to out[m]."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        np.divide(matrix[row], vector[m], out=out[row])


def mat_scale_rows(matrix: Array, vector: Array, out: Array, rows: int, cols: int) -> None:
    """Write vector[m] * matrix[m] to out[m]."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        np.multiply(matrix[row], vector[m], out=out[row])


def mat_exp(matrix: Array, out: Array, rows: int, cols: int) -> None:
    """Write exp(matrix) to out."""
    for m in range(rows):
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        np.exp(matrix[row], out=out[row])


def mat_mul_add(
    weights: Array, v: Array, addend: Array, tile: Tile, out: Array, rows: int, cols: int
) -> None:
    """Write weights v + addend to out; values that a row does not see are not multiplied."""
    v_rows = v.reshape(tile.block_n, cols)
    for m in range(rows):
        visible = tile.visible_keys(m)
        row = slice(idx2d(m, 0, cols), idx2d(m, cols, cols))
        first = idx2d(m, 0, tile.block_n)
        np.matmul(weights[first : first + visible], v_rows[:visible], out=out[row])
        np.add(out[row], addend[row], out=out[row])


def vec_max(a: Array, b: Array, out: Array) -> None:
    """Write max(a, b) to out."""
    for m in range(len(a)):
        out[m] = max(a[m], b[m])


def vec_sub_exp(a: Array, b: Array, out: Array) -> None:
    """Write exp(a - b) to out."""
    for m in range(len(a)):
        out[m] = np.exp(a[m] - b[m])


def vec_mul_add(a: Array, b: Array, addend: Array, out: Array) -> None:
    """Write a * b + addend to out."""
    for m in range(len(a)):
        out[m] = a[m] * b[m] + addend[m]


def vec_copy(a: Array, out: Array) -> None:
    """Write a to out."""
    for m in range(len(a)):
        out[m] = a[m]


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
    mat_row_max(temp.scores, temp.row_max_new, block_m, block_n)
    vec_max(block.row_max, temp.row_max_new, temp.row_max_new)
    mat_sub_vec(temp.scores, temp.row_max_new, temp.scores, block_m, block_n)
    mat_exp(temp.scores, temp.scores, block_m, block_n)
    mat_row_sum(temp.scores, temp.row_sum_new, block_m, block_n)
    vec_sub_exp(block.row_max, temp.row_max_new, temp.alpha)
    vec_mul_add(temp.alpha, block.row_sum, temp.row_sum_new, temp.row_sum_new)
    mat_scale_rows(block.o, temp.alpha, temp.o_scaled, block_m, head_dim)
    mat_mul_add(temp.scores, block.v, temp.o_scaled, tile, block.o, block_m, head_dim)
    vec_copy(temp.row_max_new, block.row_max)
    vec_copy(temp.row_sum_new, block.row_sum)


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
        row_max_new=shared.buffer(block_m),
        row_sum_new=shared.buffer(block_m),
        alpha=shared.buffer(block_m),
        o_scaled=shared.buffer(block_m * head_dim),
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
    mat_div_vec(block.o, block.row_sum, block.o, block_m, head_dim)
    store_tile(block.o, g_o, offset, row_stride, m_start, seqlen, head_dim)


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
