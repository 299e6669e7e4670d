"""FlashAttention-1 in NumPy: five programs, each one step closer to the CUDA kernels of csrc/fa1.

    basic -> gpu_like -> gpu_like_1d -> gpu_like_opt1 -> gpu_like_opt2

Each file has an attention(q, k, v, softmax_scale, is_causal) for float32 or float64 arrays
(batch, seqlen, num_heads, head_dim); the diff between neighbours is one step. All visit the same
tiles: blocks of BLOCK_M queries (the paper's Br) and, for each, the keys in tiles of BLOCK_N (Bc).
The statistics of a row of S = softmax_scale q k^T, over the keys seen so far, are row_max (the
paper's m) and row_sum (l); alpha = exp(row_max - row_max_new) rescales the old sums to a new
maximum. The causal mask is top-left aligned. The score of a hidden key is overwritten, and its
value is never multiplied, not even by a weight of 0, so that a later NaN changes no earlier row.

After Dao et al. 2022, "FlashAttention", algorithm 1, but with the two loops exchanged, so that
blocks of queries are independent, and with one division by row_sum at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

BLOCK_M = 16
BLOCK_N = 16


class SharedMemory:
    """The shared memory of one block of threads, which allocates and counts its buffers.

    Buffers are filled with NaN, so that a read before a write shows.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.buffers: list[Array] = []

    def buffer(self, *shape: int) -> Array:
        """Return a new buffer of that shape."""
        self.buffers.append(np.full(shape, np.nan, self.dtype))
        return self.buffers[-1]


class Tile(NamedTuple):
    """Where a block of queries and a tile of keys lie in a sequence."""

    m_start: int
    n_start: int
    block_n: int
    seqlen: int
    is_causal: bool

    def visible_keys(self, m: int) -> int:
        """Return how many keys of the tile, from its first on, query m of the block sees."""
        n_end = min(self.m_start + m + 1, self.seqlen) if self.is_causal else self.seqlen
        return max(0, min(n_end - self.n_start, self.block_n))
