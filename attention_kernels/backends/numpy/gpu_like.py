"""NUMPY_GPU_LIKE: the same algorithm, written as a GPU would run it.

Change: a block of threads computes BLOCK_M queries of one head. It owns its buffers; every
        operation is a function that reads buffers and writes one, and its loop over rows stands for
        the threads.
Why:    nothing is hidden: each buffer, each index and each pass over memory is one that a CUDA
        kernel would have. A vector operation is what one thread does along its row; its result
        stays in that thread's registers or goes to a buffer.
Cost:   Python runs the threads of a block one after the other. process_kv_tile has 9 temporary
        buffers: `weights` is exp(S), and O is scaled into a separate buffer, because a product
        overwrites its output.
Tile:   BLOCK_M x BLOCK_N = 16 x 16
Layout: strided
Expect: ten times the time of NUMPY_BASIC, or more with many heads, which NUMPY_BASIC computes at
        once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attention_kernels.backends.numpy.memory import BLOCK_M, BLOCK_N, Array, SharedMemory, Tile


class Block(NamedTuple):
    """The buffers of a block of threads; k and v hold the current tile of keys."""

    q: Array  # (block_m, head_dim)
    k: Array  # (block_n, head_dim)
    v: Array  # (block_n, head_dim)
    o: Array  # (block_m, head_dim), not yet divided by row_sum
    row_max: Array  # (block_m,)
    row_sum: Array  # (block_m,)


class Temporaries(NamedTuple):
    """The temporary buffers of process_kv_tile."""

    scores: Array  # (block_m, block_n)
    scores_shifted: Array  # (block_m, block_n)
    weights: Array  # (block_m, block_n)
    tile_max: Array  # (block_m,)
    row_max_new: Array  # (block_m,)
    tile_sum: Array  # (block_m,)
    row_sum_new: Array  # (block_m,)
    alpha: Array  # (block_m,)
    o_scaled: Array  # (block_m, head_dim)


def load_tile(g_rows: Array, start: int, out: Array) -> None:
    """Copy rows from global memory; those past the end become zero."""
    for r in range(len(out)):
        out[r] = g_rows[start + r] if start + r < len(g_rows) else 0


def store_tile(matrix: Array, g_rows: Array, start: int) -> None:
    """Copy rows to global memory, except those past the end."""
    for m in range(min(len(matrix), len(g_rows) - start)):
        g_rows[start + m] = matrix[m]


def mat_mul_transposed(a: Array, b: Array, scale: float, out: Array) -> None:
    """Write scale * a b^T to out."""
    for m in range(len(out)):
        row = out[m]
        np.matmul(b, a[m], out=row)
        np.multiply(row, scale, out=row)


def mask(scores: Array, tile: Tile) -> None:
    """Set the scores of keys that a row does not see to -inf."""
    if tile.visible_keys(0) == tile.block_n:
        return
    for m in range(len(scores)):
        scores[m, tile.visible_keys(m) :] = -np.inf


def mat_row_max(matrix: Array, out: Array) -> None:
    """Write the maximum of row m to out[m]."""
    for m in range(len(matrix)):
        out[m] = np.maximum.reduce(matrix[m])


def mat_row_sum(matrix: Array, out: Array) -> None:
    """Write the sum of row m to out[m]."""
    for m in range(len(matrix)):
        out[m] = np.add.reduce(matrix[m])


def mat_sub_vec(matrix: Array, vector: Array, out: Array) -> None:
    """Write matrix[m] - vector[m] to out[m]."""
    for m in range(len(matrix)):
        np.subtract(matrix[m], vector[m], out=out[m])


def mat_div_vec(matrix: Array, vector: Array, out: Array) -> None:
    """Write matrix[m] / vector[m] to out[m]."""
    for m in range(len(matrix)):
        np.divide(matrix[m], vector[m], out=out[m])


def mat_scale_rows(matrix: Array, vector: Array, out: Array) -> None:
    """Write vector[m] * matrix[m] to out[m]."""
    for m in range(len(matrix)):
        np.multiply(matrix[m], vector[m], out=out[m])


def mat_exp(matrix: Array, out: Array) -> None:
    """Write exp(matrix) to out."""
    for m in range(len(matrix)):
        np.exp(matrix[m], out=out[m])


def mat_mul_add(weights: Array, v: Array, addend: Array, tile: Tile, out: Array) -> None:
    """Write weights v + addend to out; values that a row does not see are not multiplied."""
    for m in range(len(weights)):
        visible = tile.visible_keys(m)
        row = out[m]
        np.matmul(weights[m, :visible], v[:visible], out=row)
        np.add(row, addend[m], out=row)


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


def process_kv_tile(block: Block, temp: Temporaries, tile: Tile, softmax_scale: float) -> None:
    """Add one tile of keys to O, row_max and row_sum."""
    mat_mul_transposed(block.q, block.k, softmax_scale, out=temp.scores)
    mask(temp.scores, tile)
    mat_row_max(temp.scores, out=temp.tile_max)
    vec_max(block.row_max, temp.tile_max, out=temp.row_max_new)
    mat_sub_vec(temp.scores, temp.row_max_new, out=temp.scores_shifted)
    mat_exp(temp.scores_shifted, out=temp.weights)
    mat_row_sum(temp.weights, out=temp.tile_sum)
    vec_sub_exp(block.row_max, temp.row_max_new, out=temp.alpha)
    vec_mul_add(temp.alpha, block.row_sum, temp.tile_sum, out=temp.row_sum_new)
    mat_scale_rows(block.o, temp.alpha, out=temp.o_scaled)
    mat_mul_add(temp.weights, block.v, temp.o_scaled, tile, out=block.o)
    vec_copy(temp.row_max_new, out=block.row_max)
    vec_copy(temp.row_sum_new, out=block.row_sum)


def attention_block(
    g_q: Array,
    g_k: Array,
    g_v: Array,
    g_o: Array,
    m_start: int,
    softmax_scale: float,
    is_causal: bool,
    block_m: int,
    block_n: int,
) -> None:
    """Run one block of threads: rows of O from m_start on, in one head; all (seqlen, head_dim)."""
    seqlen, head_dim = g_q.shape
    shared = SharedMemory(g_q.dtype)
    block = Block(
        q=shared.buffer(block_m, head_dim),
        k=shared.buffer(block_n, head_dim),
        v=shared.buffer(block_n, head_dim),
        o=shared.buffer(block_m, head_dim),
        row_max=shared.buffer(block_m),
        row_sum=shared.buffer(block_m),
    )
    temp = Temporaries(
        scores=shared.buffer(block_m, block_n),
        scores_shifted=shared.buffer(block_m, block_n),
        weights=shared.buffer(block_m, block_n),
        tile_max=shared.buffer(block_m),
        row_max_new=shared.buffer(block_m),
        tile_sum=shared.buffer(block_m),
        row_sum_new=shared.buffer(block_m),
        alpha=shared.buffer(block_m),
        o_scaled=shared.buffer(block_m, head_dim),
    )
    load_tile(g_q, m_start, out=block.q)
    block.o.fill(0)
    block.row_max.fill(-np.inf)
    block.row_sum.fill(0)
    # The queries of this block see only keys before n_end.
    n_end = min(m_start + block_m, seqlen) if is_causal else seqlen
    for n_start in range(0, n_end, block_n):
        load_tile(g_k, n_start, out=block.k)
        load_tile(g_v, n_start, out=block.v)
        tile = Tile(m_start, n_start, block_n, seqlen, is_causal)
        process_kv_tile(block, temp, tile, softmax_scale)
    mat_div_vec(block.o, block.row_sum, out=block.o)
    store_tile(block.o, g_o, m_start)


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
    o = np.empty(q.shape, q.dtype)
    batch, seqlen, num_heads, _ = q.shape
    for b in range(batch):
        for h in range(num_heads):
            for m_start in range(0, seqlen, block_m):
                attention_block(
                    q[b, :, h],
                    k[b, :, h],
                    v[b, :, h],
                    o[b, :, h],
                    m_start,
                    softmax_scale,
                    is_causal,
                    block_m,
                    block_n,
                )
    return o
