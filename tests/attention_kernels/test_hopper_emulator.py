"""The emulator's versions of Hopper's instructions give the bits of the hardware."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.op import load_op

FILE = Path(__file__).parent / "probe" / "v02_hopper.cu"
HALF, BFLOAT16 = torch.float16, torch.bfloat16
PRODUCTS = 4
KINDS = ("normal", "spread", "cancelling", "large sums", "one product", "subnormal")

pytestmark = pytest.mark.skipif(
    compilers.missing_compiler("emulator") is not None, reason="needs a C++ compiler"
)


class ProbeParams(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("tensor", ctypes.c_void_p),
        ("products", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("is_bfloat16", ctypes.c_int),
        ("is_transposed", ctypes.c_int),
        ("has_a_in_registers", ctypes.c_int),
        ("tile", ctypes.c_int),
        ("is_float", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("box", ctypes.c_int * 4),
        ("at", ctypes.c_int * 4),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 3),
    )


def probe(tensors, device, **values):
    """Run the probe with tensors a, b, sums and tensor; return sums and tensor afterwards."""
    there = {name: x.to(device, copy=True) for name, x in tensors.items()}
    params = ProbeParams(**{name: x.data_ptr() for name, x in there.items()}, **values)
    op = load_op(header.parse_header(FILE, "probe_"), device, "the probe")
    op(there["sums"], torch.frombuffer(bytearray(params), dtype=torch.uint8))
    return there["sums"].cpu(), there.get("tensor", there["sums"]).cpu()


def layout(columns):
    """Return the row and the column of each of a warpgroup's sums, by thread."""
    thread, i = torch.arange(128)[:, None], torch.arange(columns // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def operands(dtype, name, columns, products=PRODUCTS):
    """Return A, B and the initial sums for a kind of numbers."""
    g = torch.Generator().manual_seed(1)
    shapes = ((64, 64), (64, columns), (64, columns))
    a, b, c = (torch.randn(products, *shape, generator=g) for shape in shapes)

    def spread(x, bits):
        return x * torch.exp2(torch.randint(-bits, bits + 1, x.shape, generator=g).float())

    if name == "spread":
        bits = 5 if dtype == HALF else 12
        a, b, c = spread(a, bits), spread(b, bits), spread(c, 2 * bits)
    if name == "cancelling":  # sums near 0, where the bits that are cut off show
        for half in range(0, 64, 16):
            a[:, :, half + 8 : half + 16] = a[:, :, half : half + 8]
            b[:, half + 8 : half + 16] = -b[:, half : half + 8]
        a, b, c = spread(a, 3), spread(b, 3), c * 2**-10
    if name == "large sums":
        c = spread(c * 2**16, 12)
    if name == "one product":
        a[:, :, 1:] = 0
        c = spread(c, 26)
    if name == "subnormal":
        a = a * 2.0 ** (-16 if dtype == HALF else -127)
        c = spread(c * 2.0 ** (-18 if dtype == HALF else -128), 8)
    return a.to(dtype), b.to(dtype), c


def multiply(a, b, c, device, transposed, registers):
    """Return a warpgroup's sums c + a b, by thread, on a device."""
    columns = b.shape[2]
    row, column = layout(columns)
    stored = b if transposed else b.transpose(1, 2)
    if transposed and columns < 64:
        stored = torch.nn.functional.pad(stored, (0, 64 - columns))
    tensors = {"a": a.contiguous(), "b": stored.contiguous(), "sums": c[:, row, column]}
    sums, _ = probe(
        tensors,
        device,
        products=len(a),
        columns=columns,
        is_bfloat16=a.dtype == BFLOAT16,
        is_transposed=transposed,
        has_a_in_registers=registers,
    )
    return sums


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_products_are_right(dtype, columns, transposed, registers):
    a, b, c = operands(dtype, "normal", columns, 1)
    out = multiply(a, b, c, "cpu", transposed, registers)
    row, column = layout(columns)
    exact = (c.double() + a.double() @ b.double())[:, row, column]
    assert (out - exact).abs().max() < 2e-5
