"""Our own matrix products in float32, fused with their neighbours.

At a few hundred rows, the libraries' products leave much of a GPU idle, and each bias, GELU,
residual and LayerNorm is a separate kernel. Here they are part of the product.

ieee-fp32, csrc/v01_matrix_product.cu: float32 throughout.
3xfp16, csrc/v02_three_products.cu: tensor cores multiply sums of two float16 numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attention_kernels.contract import dtype_name
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.op import load_op
from gpt2_infer.config import PRODUCTS, ProductsName
from gpt2_infer.errors import RequestError

CSRC = Path(__file__).parent / "csrc"
BIAS, GELU, RESIDUAL = range(3)
PARTS = (1, 2, 3, 4, 6, 8)  # parts per tile to try, the same for all tiles
MAX_PARTS = 12
MAX_NORM = 4096  # largest number of columns of a LayerNorm
EMULATED_MULTIPROCESSORS = 8


def kernel_reasons(
    device: torch.device, dtype: torch.dtype, dtypes: Sequence[str], widths: Sequence[int]
) -> list[str]:
    """Return the reasons why our own kernels, which take `dtypes`, cannot run a model."""
    reasons, name = [], dtype_name(dtype)
    if device.type != "cuda":
        reasons.append("it needs a CUDA device")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reasons.append("it needs compute capability 8.0 or higher")
    elif missing := compilers.missing_compiler("cuda"):
        reasons.append(missing)
    if name not in dtypes:
        reasons.append(f"dtype {name} (it takes {', '.join(dtypes)})")
    if any(width % 64 for width in widths):
        words = " and ".join(map(str, widths))
        reasons.append(f"widths {words} (it takes multiples of 64)")
    return reasons


def check_products(
    products: str, device: torch.device, dtype: torch.dtype, widths: Sequence[int]
) -> None:
    """Raise RequestError if a model of these widths cannot multiply in this way."""
    if products not in PRODUCTS:
        raise RequestError(f"products must be one of {', '.join(PRODUCTS)}, not {products!r}")
    if products == "ieee-fp32":
        return
    if reasons := kernel_reasons(device, dtype, ["float32"], widths):
        raise RequestError(f"products {products} cannot be used: {'; '.join(reasons)}")


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


@dataclass(frozen=True)
class Kernel:
    """A version file and the tiles that its launch() knows, in its order."""

    file: str
    tiles: tuple[Tile, ...]
    tile_cycles: float
    """What a block needs per tile, in cost()."""
    rate: float
    """Multiplications per cycle of a multiprocessor, in cost()."""


KERNELS: dict[ProductsName, Kernel] = {
    "ieee-fp32": Kernel(
        "v01_matrix_product.cu",
        (Tile(32, 64, 64, 2, 8), Tile(64, 64, 32, 2, 8), Tile(32, 128, 32, 3, 4)),
        tile_cycles=11_000,
        rate=128,
    ),
    "3xfp16": Kernel(
        "v02_three_products.cu",
        (Tile(32, 64, 64, 3, 4), Tile(32, 128, 64, 2, 4)),
        tile_cycles=8_000,
        rate=400,
    ),
}
# The exponents of v02_three_products.cu: that to which a column's largest number is scaled, and the
# range that is scaled for.
TOP, LEAST, MOST = 14, -112, 127


# The tensors whose addresses begin StructParams, in order.
POINTERS = "x weight bias y residual ln_weight ln_bias workspace exponents"


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
    """The index among the kernel's tiles."""
    blocks: int
    """The number of blocks, which share all slabs of all tiles evenly."""


def plans(kernel: Kernel, m: int, n: int, k: int, multiprocessors: int) -> list[Plan]:
    """Return the plans that are worth considering for a product.

    Either all tiles have the same number of parts, or all multiprocessors the same number of
    blocks.
    """
    found = []
    for index, tile in enumerate(kernel.tiles):
        if n % tile.block_n or k % tile.block_k:
            continue
        tiles, slabs = tile.count(m, n), k // tile.block_k
        blocks = {tiles * parts for parts in PARTS}
        blocks |= {multiprocessors * each for each in range(1, tile.resident + 1)}
        most = tiles * min(slabs, MAX_PARTS)
        found += [Plan(index, count) for count in sorted(blocks) if count <= most]
    return found


def cost(kernel: Kernel, plan: Plan, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Estimate a product's time; only the order of the estimates is meaningful.

    A kernel's two constants are fitted to products of GPT-2 small on an H200, with 64 to 512 rows.
    """
    tile = kernel.tiles[plan.tile]
    tiles, slabs = tile.count(m, n), k // tile.block_k
    blocks = -(-plan.blocks // multiprocessors)  # blocks on the busiest multiprocessor
    waves = -(-blocks // tile.resident)
    warps = tile.warps * min(blocks, tile.resident)
    issued = warps / (warps + 4)  # the more warps, the fewer cycles in which none can issue
    fma = blocks * -(-tiles * slabs // plan.blocks) * tile.block_m * tile.block_n * tile.block_k
    begun = -(-tiles // plan.blocks)  # tiles that a block works on
    if tiles % plan.blocks and plan.blocks % tiles:
        begun += 1
    return kernel.tile_cycles * waves * begun + fma / kernel.rate / issued


@functools.cache
def choose(kernel: Kernel, m: int, n: int, k: int, multiprocessors: int) -> Plan:
    """Return the plan with the lowest cost, for a shape that Product takes."""
    return min(
        plans(kernel, m, n, k, multiprocessors),
        key=lambda plan: cost(kernel, plan, m, n, k, multiprocessors),
    )


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split a weight, (k, n), into float16 as v02_three_products.cu reads it.

    Returns the packed halves and the exponent of each column, int32 (n).
    """
    (k, n), largest = weight.shape, weight.abs().amax(0)
    exponents = (torch.frexp(largest).exponent - 1).clamp_(LEAST, MOST)
    scaled = torch.ldexp(weight, TOP - exponents)
    high = scaled.half()
    both = torch.stack([high, (scaled - high.float()).half()])
    # A fragment's lane has column lane // 4 of 8, at k = 2 (lane % 4) and the next, and 8 further.
    parts = both.view(2, k // 16, 2, 4, 2, n // 16, 2, 8)
    return parts.permute(5, 1, 0, 7, 3, 6, 2, 4).contiguous(), exponents


@functools.cache
def _op(file: str, device_type: str) -> Callable[..., None]:
    version = header.parse_header(CSRC / file, "matrix_product_")
    return load_op(version, device_type, "the matrix product")


class Product:
    """y = x W + b in float32, like Linear, with W (k, n).

    n is a multiple of 64, and k of 32, or with 3xfp16 of 64.

    The work just ahead of a product on its stream must not write the weights: a GPU reads them
    before that work has ended. products: one of PRODUCTS; 3xfp16 makes a packed copy of the
    weights. plan: replaces the chosen one. Raises BuildError.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        products: ProductsName = "ieee-fp32",
        *,
        plan: Plan | None = None,
    ) -> None:
        self.kernel, self.bias, self.plan = KERNELS[products], bias, plan
        self.weight, self.exponents = weight.contiguous(), None
        if products == "3xfp16":
            self.weight, self.exponents = pack(weight)
        self._multiprocessors = EMULATED_MULTIPROCESSORS
        if weight.is_cuda:
            properties = torch.cuda.get_device_properties(weight.device)
            self._multiprocessors = properties.multi_processor_count
        self._op = _op(self.kernel.file, weight.device.type)

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
        plan = self.plan or choose(self.kernel, m, n, k, self._multiprocessors)
        tile = self.kernel.tiles[plan.tile]
        tiles = tile.count(m, n)
        parts = plan.blocks + tiles if tiles % plan.blocks else 0
        workspace = x.new_empty(parts * tile.block_m * tile.block_n)
        scale, shift = (None, None) if norm is None else (norm.weight, norm.bias)
        epsilon = 0.0 if norm is None else norm.eps
        tensors = (x, self.weight, self.bias, y, residual, scale, shift, workspace, self.exponents)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        params = ProductParams(*pointers, m, n, k, mode, epsilon, plan.tile, plan.blocks)
        self._op(x, torch.frombuffer(params, dtype=torch.uint8))
