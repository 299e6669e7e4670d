"""Our own matrix product, emulated on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_infer.product import KERNELS, Plan, Product

# Unwritten elements of y and the workspace show.
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 2 + 0.3


def check(kernel: str, plan: Plan | None, m: int, n: int, k: int, device: str = "cpu") -> None:
    """Compare all modes with float64; the bound is a few roundings of the summed magnitudes."""
    x, weight, bias, residual = (random(*s).to(device) for s in ((m, k), (k, n), (n,), (m, n)))
    residual[:, 7] *= 1000  # as in GPT-2
    norm = nn.LayerNorm(n, device=device).requires_grad_(False)
    norm.load_state_dict({"weight": random(n), "bias": random(n) - 1})
    exact = x.double() @ weight.double() + bias.double()
    sums = exact + residual.double()
    bound = 2.0**-21 * (x.double().abs() @ weight.double().abs() + bias.abs())
    normed = F.layer_norm(sums, (n,), norm.weight.double(), norm.bias.double(), norm.eps)

    product = Product(weight, bias, kernel, plan=plan)
    assert ((product(x) - exact).abs() <= bound).all()
    assert ((product(x, gelu=True) - F.gelu(exact, approximate="tanh")).abs() <= 2 * bound).all()

    into, beyond = torch.cat([residual, residual.new_zeros(64, n)]).split((m, 64))
    assert product.add_to(into, x) is into
    assert ((into - sums).abs() <= bound + 2.0**-21 * residual.abs()).all()
    assert not beyond.any()

    once, again = residual.clone(), residual.clone()
    result = product.add_to(once, x, norm)
    assert torch.equal(once, into)
    torch.testing.assert_close(result.double(), normed, rtol=0, atol=5e-5)
    assert torch.equal(product.add_to(again, x, norm), result)
    assert torch.equal(product(x), product(x))

    # A product of the norm, which may be left to it
    weight, bias, once = random(n, 128).to(device), random(128).to(device), residual.clone()
    whole = plan and Plan(plan.tile, KERNELS[kernel].tiles[plan.tile].count(m, 128))
    y = Product(weight, bias, kernel, plan=whole).after(norm)(product.add_and_norm(once, x, norm))
    assert torch.equal(once, into)
    exact = normed @ weight.double() + bias.double()
    assert ((y - exact).abs() <= 2.0**-20 * (normed.abs() @ weight.double().abs())).all()


THREE_PRODUCTS = [name for name in KERNELS if name != "ieee-fp32"]
EVERY_TILE = [(name, i) for name in KERNELS for i in range(len(KERNELS[name].tiles))]


@pytest.mark.parametrize(("kernel", "tile"), EVERY_TILE)
def test_a_product_is_right_in_every_mode(kernel, tile):
    size = KERNELS[kernel].tiles[tile]
    m, n, k = size.block_m // 2 + 3, 128, 6 * size.block_k
    for parts in (1, 3, 6):
        check(kernel, Plan(tile, size.count(m, n) * parts), m, n, k)
    # 6 tiles: cut anywhere, unless each has a cluster
    for blocks in (6, 12) if KERNELS[kernel].has_clusters else (5, 7):
        check(kernel, Plan(tile, blocks), 2 * size.block_m + 6, 2 * size.block_n, 256)


@pytest.mark.usefixtures("race_checked")
@pytest.mark.parametrize(
    ("kernel", "tile"),  # most where there are more cores
    [pytest.param(*x, marks=pytest.mark.gpu if x[1] else pytest.mark.slow) for x in EVERY_TILE],
)
def test_nothing_races(kernel, tile):
    test_a_product_is_right_in_every_mode(kernel, tile)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_row_and_a_norm_of_less_than_a_warp(kernel):
    check(kernel, None, 1, 64, 64)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_does_not_depend_on_rows_after_it(kernel):
    rows = KERNELS[kernel].tiles[0].block_m + 8
    weight, bias, x = random(128, 64), random(64), random(rows, 128)
    one, two = (Product(weight, bias, kernel, plan=Plan(0, blocks)) for blocks in (2, 4))
    assert torch.equal(one(x[:3]), two(x)[:3])  # both have as many parts per tile


def errors(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return each row's distance from float64, relative to the row: ours, and PyTorch's."""
    exact = x.double() @ weight.double()
    found = {name: Product(weight, weight.new_zeros(weight.shape[1]), name)(x) for name in KERNELS}
    found["pytorch"] = x @ weight
    return {name: ((y - exact).norm(dim=1) / exact.norm(dim=1)).cpu() for name, y in found.items()}


@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 2.0**110])
@pytest.mark.parametrize("outlier", [1.0, 3000.0])
def test_three_products_are_as_exact_as_float32(scale, outlier):
    x, weight = random(40, 768) * scale, random(768, 128) / scale
    x[:, 7] *= outlier  # as in GPT-2's residual stream
    x[3] *= 2.0**-20
    weight[:, 5] *= 2.0**-20
    found = errors(x, weight)
    assert max(found[name].max() for name in THREE_PRODUCTS) <= 2 * found["ieee-fp32"].max()


@pytest.mark.parametrize("kernel", THREE_PRODUCTS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_three_products_keep_what_is_not_finite_in_its_row(value, kernel):
    x, weight = random(40, 64), random(64, 64)
    x[7, 3] = value
    y = Product(weight, random(64), kernel)(x)
    finite = y.isfinite().all(1)
    assert not y[7].isfinite().any()
    assert finite.sum() == 39


# Widths of GPT-2 small to xl: (k, n) of q, k and v, of the projection and of the MLP.
WIDTHS = (768, 1024, 1280, 1600)
SHAPES = [shape for w in WIDTHS for shape in ((w, 3 * w), (w, w), (w, 4 * w), (4 * w, w))]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("k", "n"), SHAPES[:4])
def test_gpt2_on_a_gpu(kernel, k, n):
    for m in (1, 8, 77, 256, 512):
        check(kernel, None, m, n, k, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_three_products_are_as_exact_as_the_library_on_a_gpu(k, n):
    for m in (2, 77, 512):
        x, weight = random(m, k).cuda(), random(k, n).cuda()
        x[:, 7] *= 3000
        found = errors(x, weight)
        assert all((found[name] <= found["pytorch"]).all() for name in THREE_PRODUCTS)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", THREE_PRODUCTS)
def test_weights_packed_just_before_the_first_call_are_read_whole(kernel):
    """The kernel copies weights before the work ahead of it has ended."""
    torch.use_deterministic_algorithms(False)  # else kernels that fill memory come between
    x, bias = random(64, 768).cuda(), random(3072).cuda()
    for i in range(200):  # each packed copy takes the place of the one before
        product = Product(torch.full((768, 3072), float(i), device="cuda"), bias, kernel)
        y = product(x)
        torch.cuda.synchronize()
        assert torch.equal(y, product(x))
