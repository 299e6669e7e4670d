"""Our own matrix products in float32, fused with their neighbours.

At a few hundred rows, the libraries' products leave much of a GPU idle, and each bias, GELU,
residual and LayerNorm is a separate kernel. Here they are part of the product.

ieee-fp32, csrc/v01_matrix_product.cu: float32 throughout.
3xfp16, csrc/v02_three_products.cu and, on Hopper, csrc/v04_wgmma.cu: tensor cores multiply sums of
two float16 numbers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_short, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from attention_kernels.contract import dtype_name
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.op import c_struct, launch, load_op
from gpt2_infer.config import PRODUCTS, GPT2Config, ProductsName
from gpt2_infer.errors import RequestError

CSRC = Path(__file__).parent / "csrc"
BIAS, GELU, RESIDUAL, PACK_WEIGHTS, FOLD_NORM = range(5)
MAX_EVEN = 8  # most parts per tile to try, if all tiles have as many
# Most parts per tile if the tiles differ; with four or more, float32's products took 9 to 33 %
# longer on an H200.
MAX_UNEVEN = 3
MAX_NORM = 4096  # largest number of columns of a LayerNorm
EMULATED_MULTIPROCESSORS = 8


def refusals(
    device: torch.device, dtype: torch.dtype, config: GPT2Config, dtypes: Sequence[str]
) -> list[str]:
    """Return the reasons why our own kernels, which take `dtypes`, cannot run a model."""
    reasons, name, widths = [], dtype_name(dtype), (config.n_embd, config.inner_dim)
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
    products: str, device: torch.device, dtype: torch.dtype, config: GPT2Config
) -> None:
    """Raise RequestError if such a model cannot multiply in this way."""
    if products not in PRODUCTS:
        raise RequestError(f"products must be one of {', '.join(PRODUCTS)}, not {products!r}")
    if products == "ieee-fp32":
        return
    if reasons := refusals(device, dtype, config, ["float32"]):
        raise RequestError(f"products {products} cannot be used: {'; '.join(reasons)}")


def kernel_for(products: ProductsName, device: torch.device) -> str:
    """Return the name of the kernel that multiplies in this way on a device."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return "3xfp16, wgmma" if is_hopper and products == "3xfp16" else products


def count_multiprocessors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors; for the emulator, the number to plan for."""
    if device.type != "cuda":
        return EMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Tile:
    """The size of the tiles of the product and of its inner dimension."""

    block_m: int
    block_n: int
    block_k: int
    slab_us: tuple[float, ...]
    """Microseconds per slab with 1, 2, ... blocks on a multiprocessor, up to as many as fit."""

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor runs at once."""
        return len(self.slab_us)

    def count(self, m: int, n: int) -> int:
        """Return the number of tiles in a product of m rows and n columns."""
        return -(-m // self.block_m) * (n // self.block_n)


@dataclass(frozen=True)
class Kernel:
    """A version file and the tiles that its launch() knows, in its order.

    Its times, for cost(), were fitted to hundreds of plans of GPT-2 small's products on an H200.
    """

    file: str
    tiles: tuple[Tile, ...]
    part_floats: float
    """The floats of partial tiles that blocks exchange per microsecond."""
    again_us: float = 0.0
    """The time that a block needs to move on to another tile."""
    finish_us: float = 0.0
    """The time of a second kernel."""
    has_clusters: bool = False
    """Whether a cluster of blocks has a tile, and a LayerNorm is left to the next product."""


KERNELS: dict[str, Kernel] = {
    "ieee-fp32": Kernel(
        "v01_matrix_product.cu",
        (
            Tile(32, 64, 64, (1.10, 1.52)),  # 8 warps
            Tile(32, 64, 64, (1.02, 2.29, 2.24)),  # 4 warps, as the next
            Tile(32, 128, 32, (0.91, 1.90, 2.10)),
        ),
        again_us=2.80,
        finish_us=0.71,
        part_floats=1.82e6,
    ),
    "3xfp16": Kernel(
        "v02_three_products.cu",
        (
            Tile(32, 64, 64, (0.69, 0.92, 0.97)),
            Tile(64, 64, 64, (0.89, 1.07)),
            Tile(32, 128, 64, (1.07, 1.10)),
            Tile(96, 64, 64, (1.20, 1.60)),
        ),
        again_us=1.37,
        finish_us=1.42,
        part_floats=0.64e6,
    ),
    "3xfp16, wgmma": Kernel(
        "v04_wgmma.cu",
        tuple(Tile(64, 64, 64, us) for us in ((0.43, 0.48), (0.48, 0.7, 0.71), (0.25,))),
        part_floats=0.47e6,
        has_clusters=True,
    ),
}


ProductParams = c_struct(
    (c_void_p, "x weight bias y residual ln_weight ln_bias workspace exponents packed_x packed_y"),
    (c_void_p, "x_moments y_moments"),
    (c_int, "m n k"),
    (c_float, "epsilon"),
    (c_int, "blocks"),
    (c_short, "mode tile"),
)
"""The C struct StructParams of the kernel."""


@dataclass(frozen=True)
class Plan:
    """How a product is divided among blocks."""

    tile: int
    """The index among the kernel's tiles."""
    blocks: int
    """The number of blocks, which share all slabs of all tiles evenly."""


def plans(kernel: Kernel, m: int, n: int, k: int, multiprocessors: int) -> list[Plan]:
    """Return the plans that are worth considering for a product.

    Either tiles are whole, or they are cut into the same number of parts, all of which run at once,
    or there are as many blocks as fit, up to MAX_UNEVEN for each tile: fewer blocks may gather on
    some of the multiprocessors.
    """
    candidates = []
    for index, tile in enumerate(kernel.tiles):
        if n % tile.block_n or k % tile.block_k:
            continue
        tiles, slabs = tile.count(m, n), k // tile.block_k
        at_once = multiprocessors * tile.resident
        # A cluster runs in one of a GPU's groups of multiprocessors. How many of these are of 16
        # and how many of 18 differs even between GPUs of a model.
        sizes = (16, 18) if kernel.has_clusters else (multiprocessors,)
        blocks = {tiles} | {
            tiles * parts
            for parts in range(2, min(slabs, MAX_EVEN) + 1)
            if all(tiles <= multiprocessors // n * (n * tile.resident // parts) for n in sizes)
        }
        if at_once <= tiles * min(slabs, MAX_UNEVEN) and not kernel.has_clusters:
            blocks.add(at_once)
        candidates += [Plan(index, count) for count in sorted(blocks)]
    return candidates


def cost(kernel: Kernel, plan: Plan, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Estimate the microseconds of a product.

    Only the order of the estimates is meaningful: the time that all plans need is left out, and
    other GPUs have other times.
    """
    tile = kernel.tiles[plan.tile]
    tiles, slabs = tile.count(m, n), k // tile.block_k
    blocks = -(-plan.blocks // multiprocessors)  # blocks on the busiest multiprocessor
    waves = -(-blocks // tile.resident)
    slab_us = tile.slab_us[min(blocks, tile.resident) - 1]
    begun = -(-tiles // plan.blocks)  # tiles that a block works on
    if tiles % plan.blocks and plan.blocks % tiles:
        begun += 1
    microseconds = waves * (
        -(-tiles * slabs // plan.blocks) * slab_us + (begun - 1) * kernel.again_us
    )
    if tiles % plan.blocks:
        floats = (plan.blocks + tiles) * tile.block_m * tile.block_n
        microseconds += floats / kernel.part_floats + kernel.finish_us
    return microseconds


@functools.cache
def choose(kernel: Kernel, m: int, n: int, k: int, multiprocessors: int) -> Plan:
    """Return the plan with the lowest cost, for a shape that Product takes."""
    candidates = plans(kernel, m, n, k, multiprocessors)
    return min(candidates, key=lambda plan: cost(kernel, plan, m, n, k, multiprocessors))


@dataclass(frozen=True)
class Packed:
    """A matrix, split into float16 as three products read their x."""

    data: Tensor
    """The chunks described in csrc/rows.cuh, in float32. A LayerNorm's bias is left to after()."""
    shape: tuple[int, int]
    moments: Tensor | None = None
    """If the matrix awaits a LayerNorm, what that needs to know: x_moments in csrc/product.cuh."""

    @classmethod
    def empty(cls, rows: int, columns: int, like: Tensor, *, awaits_norm: bool = False) -> Packed:
        """Return an uninitialized matrix on the device of `like`, which is float32."""
        chunks = -(-rows // 16) * (columns // 32)
        moments = like.new_empty(rows + rows % 2, columns // 64, 2) if awaits_norm else None
        return cls(like.new_empty(chunks * (16 * 32 + 16)), (rows, columns), moments)


Activation: TypeAlias = Tensor | Packed
"""The x of a product: contiguous (m, k), or the result of a product of the same kind."""
Output = TypeVar("Output", bound=Activation)


@functools.cache
def own_op(
    file: Path, prefix: str, device_type: str, dtype: str = "float32"
) -> Callable[..., None]:
    """Return the op of one of our own files for a dtype; its name begins with the prefix.

    Raises BuildError.
    """
    builds = header.parse_header(file, prefix).builds()
    (build,) = (build for build in builds if build.dtype == dtype)
    return load_op(build, device_type, file.name)


class Product:
    """y = x W + b in float32, like Linear, with W contiguous, (k, n).

    k and n are multiples of 64.

    The work just ahead of a product on its stream must not write the weights: a GPU reads them
    before that work has ended. kernel: its name in KERNELS; three products make a packed copy of
    the weights. plan: replaces the chosen one. Raises BuildError.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, kernel: str = "ieee-fp32", *, plan: Plan | None = None
    ) -> None:
        self.kernel, self.bias, self.plan, self.shape = KERNELS[kernel], bias, plan, weight.shape
        self._op = own_op(CSRC / self.kernel.file, "matrix_product_", weight.device.type)
        self._given, (k, n) = weight, weight.shape
        self._fields: dict[str, Any] = {"weight": self._given, "bias": bias, "k": k, "n": n}
        self._after: dict[str, Any] = {}
        self.packs = kernel != "ieee-fp32"
        """Whether results for another product are Packed."""
        if self.packs:
            packed, exponents = torch.empty_like(self._given), bias.new_empty(n, dtype=torch.int32)
            self._fields |= {"weight": packed, "exponents": exponents}
            self._prepare(PACK_WEIGHTS, packed_y=packed)
        self._multiprocessors = count_multiprocessors(weight.device)

    def _prepare(self, mode: int, **fields: Tensor) -> None:
        fields |= self._fields | {"x": self._given}
        launch(self._op, self.bias, ProductParams, mode=mode, **fields)
        if self.bias.is_cuda:  # a kernel, so that this is not the work just ahead
            self.bias.new_zeros(1)

    def after(self, norm: nn.LayerNorm) -> Product:
        """Return this product for x from add_and_norm(), with that norm; see Packed."""
        if not self.packs:
            return self
        product, folded = copy.copy(self), self.bias.new_empty(2, self.shape[1])
        self._prepare(FOLD_NORM, ln_weight=norm.weight, ln_bias=norm.bias, y=folded)
        product._after = {"bias": folded, "epsilon": norm.eps}
        return product

    def __call__(self, x: Activation, *, gelu: bool = False) -> Tensor:
        """Map x, contiguous (m, k), to (m, n); gelu applies GELU's tanh form."""
        return self._launch(x, self._empty(x), GELU if gelu else BIAS)

    def add_to(self, residual: Tensor, x: Activation, norm: nn.LayerNorm | None = None) -> Tensor:
        """Add x W + b to residual, contiguous (m, n), in place; return it, or its norm if given."""
        if norm is None:
            return self._launch(x, residual, RESIDUAL, residual=residual)
        return self._add(residual, x, norm, self._empty(x))

    def hidden(self, x: Activation) -> Activation:
        """Return self(x, gelu=True), for another product."""
        return self._launch(x, self._activation(x), GELU)

    def add_and_norm(self, residual: Tensor, x: Activation, norm: nn.LayerNorm) -> Activation:
        """Return self.add_to(residual, x, norm), for another product that is after(norm)."""
        y = self._activation(x, awaits_norm=self.kernel.has_clusters)
        return self._add(residual, x, norm, y)

    def _add(self, residual: Tensor, x: Activation, norm: nn.LayerNorm, y: Output) -> Output:
        fields = {"ln_weight": norm.weight, "epsilon": norm.eps, "residual": residual}
        bias = None if isinstance(y, Packed) else norm.bias
        return self._launch(x, y, RESIDUAL, ln_bias=bias, **fields)

    def _empty(self, x: Activation) -> Tensor:
        return self.bias.new_empty(x.shape[0], self.shape[1])

    def _activation(self, x: Activation, *, awaits_norm: bool = False) -> Activation:
        if not self.packs:
            return self._empty(x)
        return Packed.empty(x.shape[0], self.shape[1], self.bias, awaits_norm=awaits_norm)

    def _launch(self, x: Activation, y: Output, mode: int, **fields: Any) -> Output:
        """Launch the kernel, which writes y, and return that."""
        m, (k, n) = x.shape[0], self.shape
        plan = self.plan or choose(self.kernel, m, n, k, self._multiprocessors)
        tile = self.kernel.tiles[plan.tile]
        tiles = tile.count(m, n)
        parts = plan.blocks + tiles if tiles % plan.blocks and not self.kernel.has_clusters else 0
        fields["workspace"] = self.bias.new_empty(parts * tile.block_m * tile.block_n)
        fields |= {"m": m, "mode": mode, "tile": plan.tile, "blocks": plan.blocks}
        fields |= self._fields | _named("x", x) | _named("y", y)
        if isinstance(x, Packed):
            fields |= self._after
        elif self.packs:
            fields["packed_x"] = Packed.empty(m, k, self.bias).data
        launch(self._op, self.bias, ProductParams, **fields)
        return y


def _named(name: str, x: Activation) -> dict[str, Tensor | None]:
    """Return the fields of ProductParams that a plain or a packed tensor is for."""
    if isinstance(x, Packed):
        return {f"packed_{name}": x.data, f"{name}_moments": x.moments}
    return {name: x}
