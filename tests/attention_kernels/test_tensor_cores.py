"""Emulated tensor cores: WMMA's fragments, and instructions that match a GPU bit for bit."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from tests.attention_kernels.conftest import run_probe
from tests.attention_kernels.test_hopper_emulator import operands as hopper_operands
from tests.conftest import needs_compiler

FILE = Path(__file__).parent / "probe" / "v01_tensor_cores.cu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]  # float32 is read as TF32
LOAD, LOAD_TRANSPOSED = 3, 4

pytestmark = needs_compiler


def run(kind, a, b, sums, device):
    """Return the results of a warp's instruction for each product's fragments."""
    a, b, out = a.to(device), b.to(device), sums.to(device, copy=True)
    params = struct.pack("3P2i", a.data_ptr(), b.data_ptr(), out.data_ptr(), len(a), kind)
    return run_probe(FILE, device, out, params)


def fragments(a, b):
    """Return the words of each lane, for A (products, 16, k) and B (products, k, 8)."""
    lane = torch.arange(32)
    row, quad = lane // 4, lane % 4
    step = 4 // a.itemsize
    k = (quad[:, None] * step + torch.arange(step)).flatten()  # a word's elements

    def words(x):
        return x.contiguous().view(torch.int32).flatten(1)

    half = 4 * step
    parts_a = [
        words(a[:, (row + 8 * low)[:, None], k.view(32, step) + half * right].reshape(len(a), -1))
        for right in (0, 1)
        for low in (0, 1)
    ]
    parts_b = [
        words(b[:, k.view(32, step) + half * right, row[:, None]].reshape(len(b), -1))
        for right in (0, 1)
    ]
    return torch.stack(parts_a, 2), torch.stack(parts_b, 2)


def sums_of(d):
    """Return the sums of each lane, for (products, 16, 8)."""
    lane = torch.arange(32)
    row, column = lane // 4, lane % 4 * 2
    return torch.stack([d[:, row + 8 * (i // 2), column + i % 2] for i in range(4)], 2)


def operands(dtype, name, products):
    return hopper_operands(dtype, name, products, 16, 8, depth=32 // dtype.itemsize)


def multiply(a, b, c, device):
    return run(DTYPES.index(a.dtype), *fragments(a, b), sums_of(c).contiguous(), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_right_and_truncated(dtype):
    """Sums and products are rounded towards zero."""
    a, b, c = operands(dtype, "normal", 20)
    out = multiply(a, b, c, "cpu")
    if dtype == torch.float32:
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    exact = sums_of(c.double() + a.double() @ b.double())
    assert (out - exact).abs().max() < 1e-5
    assert (out != exact.float()).any()
    assert out.abs().double().sum() < exact.abs().sum()


@pytest.mark.parametrize(("kind", "order"), [(LOAD, (1, 2)), (LOAD_TRANSPOSED, (2, 1))])
def test_matrices_are_loaded(kind, order):
    rows = torch.arange(32 * 8, dtype=torch.int16)
    a = rows.view(torch.int32).view(1, 32, 4)
    b, sums = torch.zeros(1, 32, 2, dtype=torch.int32), torch.zeros(1, 32, 4)
    got = run(kind, a, b, sums, "cpu").view(torch.int16).view(32, 4, 2)
    matrices = rows.view(32, 8)[torch.arange(32) ^ 5].view(4, 8, 8).permute(0, *order)
    assert torch.equal(got.permute(1, 0, 2), matrices.reshape(4, 32, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["normal", "spread", "cancelling"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_twin_gives_the_bits_of_the_hardware(dtype, name):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the twins round as Hopper's tensor cores do")
    inputs = operands(dtype, name, 2000)
    twin, hardware = (multiply(*inputs, device) for device in ("cpu", "cuda"))
    assert torch.equal(twin.view(torch.int32), hardware.view(torch.int32))


# WMMA's fragments


def placed(matrix: torch.Tensor, rows: bool, padding: int) -> tuple[torch.Tensor, int]:
    """Store a matrix by rows or columns with padding; return it and its leading dimension."""
    lines = matrix if rows else matrix.T
    padded = lines.new_full((lines.shape[0], lines.shape[1] + padding), torch.nan)
    padded[:, : lines.shape[1]] = lines
    return padded, padded.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["75", "90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (32, 8, 16), (8, 32, 16)])
def test_products_in_every_layout(probe, m, n, k, dtype, arch, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).half()
    b = torch.randn(k, n, generator=generator).half()
    c = torch.randn(m, n, generator=generator).to(dtype)
    expected = (a.double() @ b.double() + c.double()).to(dtype)
    for layout in range(8):
        a_rows, b_rows, c_rows = (bool(layout >> bit & 1) for bit in range(3))
        (a_in, lda), (b_in, ldb) = placed(a, a_rows, 8), placed(b, b_rows, 16)
        c_in, ldc = placed(c, c_rows, 24)
        d = torch.zeros_like(c_in)
        is_float = dtype == torch.float32
        message = probe(
            "run_product", m, a_rows, b_rows, is_float, a_in, lda, b_in, ldb, c_in, d, ldc, c_rows
        )
        assert message == ""
        lines = d[:, : n if c_rows else m]
        out = lines if c_rows else lines.T
        # Half rounds a float sum once; float has 16 exact products and 16 rounded sums.
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=4e-6)
        assert not d[:, lines.shape[1] :].any()


@pytest.mark.parametrize(("arch", "alike"), [("75", False), ("80", True), ("90", True)])
def test_layouts_differ_between_architectures(probe, arch, alike, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    index, same = torch.arange(256.0), torch.zeros(32)
    assert probe("run_compare_uses", index.half(), index, same) == ""
    assert bool(same.all()) == alike


def test_data_not_yet_ordered_or_loaded_is_not_visible(probe):
    a = torch.ones(512).half()
    for fault, missing in ((0, 0), (9, 1), (11, 256)):
        d = torch.full((256,), torch.nan)
        assert probe("run_fail", fault, 32, a, d) == ""
        assert (d.isnan().sum() > 0) == (missing > 0), fault
