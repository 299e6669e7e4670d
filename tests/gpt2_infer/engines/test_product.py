"""Our own matrix product, emulated on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_infer.engines.product import TILES, Plan, Product, choose, plans

EPSILON = 2.0**-24


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """Fill new tensors with NaN, so that unwritten elements of y and the workspace show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 2 + 0.3


def check(plan: Plan | None, m: int, n: int, k: int, device: str = "cpu") -> None:
    """Compare all modes with float64; the bound is a few roundings of the summed magnitudes."""
    x, weight, bias, residual = random(m, k), random(k, n), random(n), random(m, n)
    norm = nn.LayerNorm(n).requires_grad_(False)
    norm.weight.copy_(random(n))
    norm.bias.copy_(random(n) - 1)
    exact = x.double() @ weight.double() + bias.double()
    sums = exact + residual.double()
    added = x.double().abs() @ weight.double().abs() + bias.abs() + residual.abs()
    bound = 8 * EPSILON * added
    gelu = F.gelu(exact, approximate="tanh")
    normed = F.layer_norm(sums, (n,), norm.weight.double(), norm.bias.double(), norm.eps)

    x, residual, norm = x.to(device), residual.to(device), norm.to(device)
    product = Product(weight.to(device), bias.to(device), plan=plan)
    assert ((product(x).cpu() - exact).abs() <= bound).all()
    assert ((product(x, gelu=True).cpu() - gelu).abs() <= 2 * bound).all()

    more = torch.cat([residual, residual.new_zeros(64, n)])
    into = more[:m]
    assert product.add_to(into, x) is into
    assert ((into.cpu() - sums).abs() <= bound).all()
    assert not more[m:].any()

    once, again = residual.clone(), residual.clone()
    result = product.add_to(once, x, norm)
    assert torch.equal(once, into)
    torch.testing.assert_close(result.cpu().double(), normed, rtol=0, atol=5e-5)
    assert torch.equal(product.add_to(again, x, norm), result)
    assert torch.equal(product(x), product(x))


@pytest.mark.parametrize("tile", range(len(TILES)))
@pytest.mark.parametrize("parts", [1, 3])
def test_a_product_is_right_in_every_mode(tile, parts):
    m, n, k = TILES[tile].block_m // 2 + 3, 128, 3 * TILES[tile].block_k
    check(Plan(tile, TILES[tile].count(m, n) * parts), m, n, k)


def test_blocks_share_tiles_that_are_cut_anywhere():
    tile = next(i for i, tile in enumerate(TILES) if (tile.block_m, tile.block_n) == (32, 64))
    for blocks in (5, 7):  # the product has 6 tiles of 4 slabs
        check(Plan(tile, blocks), 70, 128, 256)


def test_one_row_and_a_norm_of_less_than_a_warp():
    check(None, 1, 64, 32)


def test_a_row_does_not_depend_on_rows_after_it():
    weight, bias, x = random(128, 64), random(64), random(40, 128)
    tile = next(i for i, tile in enumerate(TILES) if (tile.block_m, tile.block_n) == (32, 64))
    one, two = (Product(weight, bias, plan=Plan(tile, blocks)) for blocks in (2, 4))
    assert torch.equal(one(x[:3]), two(x)[:3])  # both have as many parts per tile


def test_every_plan_of_gpt2_is_one_that_the_kernel_takes():
    for k, n in ((768, 2304), (768, 768), (768, 3072), (3072, 768), (1600, 6400)):
        for m in (1, 8, 100, 512, 8192):
            for plan in (*plans(m, n, k, 132), choose(m, n, k, 132)):
                tile = TILES[plan.tile]
                assert n % tile.block_n == 0
                assert k % tile.block_k == 0
                assert 1 <= plan.blocks <= tile.count(m, n) * (k // tile.block_k)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "n"), [(768, 2304), (768, 768), (768, 3072), (3072, 768)])
def test_gpt2_on_a_gpu(k, n):
    for m in (1, 8, 77, 256, 512):
        check(None, m, n, k, "cuda")
