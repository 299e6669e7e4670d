"""Our own matrix products in float32, fused with their neighbours: csrc/v01_matrix_product.cu.

At a few hundred rows, the libraries' products leave much of a GPU idle, and each bias, GELU,
residual and LayerNorm is a separate kernel. Here they are part of the product.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attention_kernels.ladder import header
from attention_kernels.ladder.op import load_op

SOURCE = Path(__file__).parent / "csrc" / "v01_matrix_product.cu"
BIAS, GELU, RESIDUAL = range(3)
PARTS = (1, 2, 3, 4, 6, 8)  # parts per tile to try, the same for all tiles
MAX_PARTS = 12
MAX_NORM = 4096  # largest number of columns of a LayerNorm
EMULATED_MULTIPROCESSORS = 8


@dataclass(frozen=True)
class Tile:
    """The size of the tiles of the product and of its inner dimension."""

    block_m: int
    block_n: int
    block_k: int
    resident: int
    """Blocks that a multiprocessor runs at once."""
    warps: int

    def count(self, m: int, n: int) -> int:
        """Return the number of tiles in a product of m rows and n columns."""
        return -(-m // self.block_m) * (n // self.block_n)


# The tiles that launch() in v01_matrix_product.cu knows, in its order.
TILES = (Tile(32, 64, 64, 2, 8), Tile(64, 64, 32, 2, 8), Tile(32, 128, 32, 3, 4))


# The tensors whose addresses begin StructParams, in order.
POINTERS = "x weight bias y residual ln_weight ln_bias workspace"


class ProductParams(ctypes.Structure):
    """The C struct StructParams of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "mode")),
        ("epsilon", ctypes.c_float),
        ("tile", ctypes.c_int),
        ("blocks", ctypes.c_int),
    )


@dataclass(frozen=True)
class Plan:
    """How a product is divided among blocks."""

    tile: int
    """The index in TILES."""
    blocks: int
    """The number of blocks, which share all slabs of all tiles evenly."""


def plans(m: int, n: int, k: int, multiprocessors: int) -> list[Plan]:
    """Return the plans that are worth considering for a product.

    Either all tiles have the same number of parts, or all multiprocessors the same number of
    blocks.
    """
    found = []
    for index, tile in enumerate(TILES):
        if n % tile.block_n or k % tile.block_k:
            continue
        tiles, slabs = tile.count(m, n), k // tile.block_k
        blocks = {tiles * parts for parts in PARTS}
        blocks |= {multiprocessors * each for each in range(1, tile.resident + 1)}
        most = tiles * min(slabs, MAX_PARTS)
        found += [Plan(index, count) for count in sorted(blocks) if count <= most]
    return found


def cost(plan: Plan, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Estimate a product's time; only the order of the estimates is meaningful.

    Its two constants are fitted to 22 products of GPT-2 small on an H200, with 64 to 512 rows. The
    plan with the lowest cost took 1.00 (median) to 1.12 times as long as the fastest one.
    """
    tile = TILES[plan.tile]
    tiles, slabs = tile.count(m, n), k // tile.block_k
    blocks = -(-plan.blocks // multiprocessors)  # blocks on the busiest multiprocessor
    waves = -(-blocks // tile.resident)
    warps = tile.warps * min(blocks, tile.resident)
    issued = warps / (warps + 4)  # the more warps, the fewer cycles in which none can issue
    fma = blocks * -(-tiles * slabs // plan.blocks) * tile.block_m * tile.block_n * tile.block_k
    begun = -(-tiles // plan.blocks)  # tiles that a block works on
    if tiles % plan.blocks and plan.blocks % tiles:
        begun += 1
    return 11_000 * waves * begun + fma / 128 / issued


@functools.cache
def choose(m: int, n: int, k: int, multiprocessors: int) -> Plan:
    """Return the plan with the lowest cost; n is a multiple of 64, k of 32."""
    return min(
        plans(m, n, k, multiprocessors), key=lambda plan: cost(plan, m, n, k, multiprocessors)
    )


@functools.cache
def _op(device_type: str) -> Callable[..., None]:
    version = header.parse_header(SOURCE, "matrix_product_")
    return load_op(version, device_type, "the matrix product")


class Product:
    """y = x W + b in float32, like Linear, with W (k, n); n is a multiple of 64, k of 32.

    The work just ahead of a product on its stream must not write the weights: a GPU reads them
    before that work has ended. plan: replaces the chosen one. Raises BuildError.
    """

    def __init__(self, weight: Tensor, bias: Tensor, *, plan: Plan | None = None) -> None:
        self.weight, self.bias, self.plan = weight.contiguous(), bias, plan
        self._multiprocessors = EMULATED_MULTIPROCESSORS
        if weight.is_cuda:
            properties = torch.cuda.get_device_properties(weight.device)
            self._multiprocessors = properties.multi_processor_count
        self._op = _op(weight.device.type)

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """Map x, contiguous (m, k), to (m, n); gelu applies GELU's tanh form."""
        y = x.new_empty(x.shape[0], self.bias.shape[0])
        self._launch(x, y, GELU if gelu else BIAS)
        return y

    def add_to(self, residual: Tensor, x: Tensor, norm: nn.LayerNorm | None = None) -> Tensor:
        """Add x W + b to residual, contiguous (m, n), in place; return it, or its norm if given."""
        y = residual if norm is None else torch.empty_like(residual)
        self._launch(x, y, RESIDUAL, residual, norm)
        return y

    def _launch(
        self,
        x: Tensor,
        y: Tensor,
        mode: int,
        residual: Tensor | None = None,
        norm: nn.LayerNorm | None = None,
    ) -> None:
        (m, k), n = x.shape, self.bias.shape[0]
        plan = self.plan or choose(m, n, k, self._multiprocessors)
        tile = TILES[plan.tile]
        tiles = tile.count(m, n)
        parts = plan.blocks + tiles if tiles % plan.blocks else 0
        workspace = x.new_empty(parts * tile.block_m * tile.block_n)
        scale, shift = (None, None) if norm is None else (norm.weight, norm.bias)
        epsilon = 0.0 if norm is None else norm.eps
        tensors = (x, self.weight, self.bias, y, residual, scale, shift, workspace)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        params = ProductParams(*pointers, m, n, k, mode, epsilon, plan.tile, plan.blocks)
        self._op(x, torch.frombuffer(params, dtype=torch.uint8))
