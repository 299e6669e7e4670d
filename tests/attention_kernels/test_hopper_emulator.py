"""The emulator's versions of Hopper's instructions give the bits of the hardware."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from pathlib import Path

import pytest
import torch

from tests.attention_kernels.conftest import run_probe
from tests.conftest import needs_compiler, on_every_device

FILE = Path(__file__).parent / "probe" / "v02_hopper.cu"
GOLDEN = FILE.with_name("hopper_products.json")  # SHA-256 of sums, of the GPU too
HALF, BFLOAT16 = torch.float16, torch.bfloat16
KINDS = ("normal", "spread", "cancelling", "large sums", "one product", "subnormal")

pytestmark = needs_compiler


def probe(tensors, device, products=(0,) * 5, tile=(0,) * 18):
    """Run the probe with tensors a, b, sums and tensor; return sums and tensor afterwards.

    products: their number, the columns, is_bfloat16, is_transposed and has_a_in_registers. tile:
    1 to load and 2 to store, is_float, the swizzle, box, coordinates, sizes and strides.
    """
    there = {name: x.to(device, copy=True) for name, x in tensors.items()}
    pointers = [there[x].data_ptr() if x in there else 0 for x in ("a", "b", "sums", "tensor")]
    params = struct.pack("4P16i7q", *pointers, *products, *tile)
    sums = run_probe(FILE, device, there["sums"], params)
    return sums, there.get("tensor", sums).cpu()


def layout(columns):
    """Return the row and the column of each of a warpgroup's sums, by thread."""
    thread, i = torch.arange(128)[:, None], torch.arange(columns // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def operands(dtype, name, products, rows=64, columns=64, depth=64):
    """Return A, B and the initial sums for a kind of numbers, the same on every machine.

    Their shapes are (products, rows, depth), (products, depth, columns) and (products, rows,
    columns).
    """
    g = torch.Generator().manual_seed(1)

    def numbers(*shape, bits):
        most = 2**bits
        return torch.randint(-most, most, (products, *shape), generator=g).float() / (most / 2)

    def spread(x, bits):
        return torch.ldexp(x, torch.randint(-bits, bits + 1, x.shape, generator=g))

    bits = 24 if dtype == torch.float32 else 11
    a, b = numbers(rows, depth, bits=bits), numbers(depth, columns, bits=bits)
    c = numbers(rows, columns, bits=24)
    if name == "spread":
        bits = 5 if dtype == HALF else 12
        a, b, c = spread(a, bits), spread(b, bits), spread(c, 2 * bits)
    if name == "cancelling":  # sums near 0, where the bits that are cut off show
        half = min(depth, 16) // 2  # of what one instruction adds
        for at in range(0, depth, 2 * half):
            a[:, :, at + half : at + 2 * half] = a[:, :, at : at + half]
            b[:, at + half : at + 2 * half] = -b[:, at : at + half]
        a, b, c = spread(a, 3), spread(b, 3), c * 2**-10
    if name == "large sums":
        c = spread(c * 2**16, 12)
    if name == "one product":
        a[:, :, 1:] = 0
        c = spread(c, 26)
    if name == "subnormal":
        a = a * 2.0 ** (-16 if dtype == HALF else -127)
        c = spread(c, 8) * 2.0 ** (-18 if dtype == HALF else -128)
    return a.to(dtype), b.to(dtype), c


def multiply(a, b, c, device, transposed, registers):
    """Return a warpgroup's sums c + a b, by thread, on a device."""
    columns = b.shape[2]
    row, column = layout(columns)
    stored = b if transposed else b.transpose(1, 2)
    if transposed and columns < 64:
        stored = torch.nn.functional.pad(stored, (0, 64 - columns))
    tensors = {"a": a.contiguous(), "b": stored.contiguous(), "sums": c[:, row, column]}
    counts = len(a), columns, a.dtype == BFLOAT16, transposed, registers
    return probe(tensors, device, products=counts)[0]


@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_products_are_right(dtype, columns):
    a, b, c = operands(dtype, "normal", 1, columns=columns)
    row, column = layout(columns)
    exact = (c.double() + a.double() @ b.double())[:, row, column]
    for transposed, registers in itertools.product((False, True), repeat=2):
        out = multiply(a, b, c, "cpu", transposed, registers)
        assert (out - exact).abs().max() < 2e-5


@on_every_device
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_a_product_gives_the_committed_bits(dtype, name, transposed, registers, device):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    sums = multiply(*operands(dtype, name, 2), device, transposed, registers)
    digest = hashlib.sha256(sums.numpy().tobytes()).hexdigest()
    assert digest == json.loads(GOLDEN.read_text("utf-8"))[f"{dtype} {name}"]


# Tiles

NONE, SWIZZLE_32, SWIZZLE_64, SWIZZLE_128 = range(4)
SIZES = (72, 3, 20, 2)  # of a tensor whose rows have padding
TILES = [  # swizzle, box, coordinates
    (SWIZZLE_128, (64, 1, 16, 1), (0, 1, 0, 1)),
    (SWIZZLE_128, (64, 1, 16, 1), (8, 2, 10, 0)),  # beyond the last row
    (SWIZZLE_128, (64, 1, 16, 1), (32, 0, -3, 1)),  # beyond columns and before the first row
    (SWIZZLE_128, (64, 3, 8, 2), (-5, 1, 4, 1)),
    (SWIZZLE_128, (64, 1, 16, 1), (0, 0, 20, 0)),  # all of it out of bounds
    (SWIZZLE_64, (32, 1, 16, 1), (8, 1, 7, 1)),
    (SWIZZLE_32, (16, 2, 16, 1), (60, 2, 9, 0)),
    (NONE, (64, 2, 8, 1), (16, 1, 3, 1)),
    (NONE, (8, 1, 20, 2), (70, 0, -1, 0)),
]
FLOATS = [(swizzle, (box[0] // 2, *box[1:]), at) for swizzle, box, at in TILES]
CASES = [(HALF, *tile) for tile in TILES] + [(torch.float32, *tile) for tile in FLOATS]


def tensor_of(dtype):
    """Return numbers 1, 2, ... with rows of 80."""
    return torch.arange(1, 1 + 2 * 20 * 3 * 80).view(2, 20, 3, 80).to(dtype)


def counting_down(dtype, box):
    return -torch.arange(1, 1 + torch.Size(box).numel()).to(dtype)


def copy(kind, dtype, swizzle, box, at, device, tile=None):
    """Load (1) or store (2) a tile; return the tile and the tensor."""
    tensor = tensor_of(dtype)
    sums = torch.zeros(torch.Size(box).numel(), dtype=dtype)
    tensors = {"a": sums if tile is None else tile, "b": sums, "sums": sums, "tensor": tensor}
    strides = [tensor.stride(dimension) for dimension in (2, 1, 0)]
    how = kind, dtype == torch.float32, swizzle
    return probe(tensors, device, tile=(*how, *box, *at, *SIZES, *strides))


def places(dtype, swizzle, box, at):
    """Return the place in a tile, and the index in the tensor or None, of each element."""
    width = 16 // dtype.itemsize
    for place, (w, z, y, x) in enumerate(itertools.product(*(range(n) for n in box[::-1]))):
        line, chunk = place // (8 * width), place // width % 8
        chunk ^= line % (1 << swizzle)
        index = tuple(i + c for i, c in zip((w, z, y, x), at[::-1], strict=True))
        inside = all(0 <= i < n for i, n in zip(index, SIZES[::-1], strict=True))
        yield line * 8 * width + chunk * width + place % width, index if inside else None


@pytest.mark.parametrize(("dtype", "swizzle", "box", "at"), CASES)
def test_a_tile_is_loaded_and_stored(dtype, swizzle, box, at):
    tensor = tensor_of(dtype)
    tile, _ = copy(1, dtype, swizzle, box, at, "cpu")
    expected = torch.zeros_like(tile)
    for place, index in places(dtype, swizzle, box, at):
        expected[place] = 0 if index is None else tensor[index]
    assert torch.equal(tile, expected)
    if min(at) >= 0:
        tile = counting_down(dtype, box)
        _, stored = copy(2, dtype, swizzle, box, at, "cpu", tile)
        for place, index in places(dtype, swizzle, box, at):
            if index is not None:
                tensor[index] = tile[place]
        assert torch.equal(stored, tensor)


def test_what_the_hardware_refuses_is_an_error():
    box = (64, 1, 16, 1)
    for at in [(0, 0, -1, 0), (-8, 0, 0, 0)]:
        with pytest.raises(RuntimeError, match=r"store_tile\(\) at .*: a coordinate is negative"):
            copy(2, HALF, SWIZZLE_128, box, at, "cpu", counting_down(HALF, box))
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):  # narrower than the swizzle
        copy(1, HALF, SWIZZLE_128, (32, 1, 16, 1), (0, 0, 0, 0), "cpu")
