from __future__ import annotations

import pytest
import torch

from gpt2_infer import linear
from gpt2_infer.linear import Linear, lay_out, project, with_room


@pytest.mark.parametrize("is_laid_out", [False, True])
# Only a product of one row depends on these.
@pytest.mark.parametrize(("threads", "min_split"), [(1, 0), (2, 0), (2, 2**17)])
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize(("ins", "outs"), [(3, 6), (4, 5), (5, 4), (6, 3)])
def test_every_way_to_multiply_is_the_same_product(
    ins, outs, rows, threads, min_split, is_laid_out, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(linear, "MIN_SPLIT_NUMEL", min_split)
    torch.manual_seed(0)
    layer = Linear(ins, outs).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    if is_laid_out:
        layer.weight.data = lay_out(layer.weight.data)
    x, residual = torch.randn(rows, ins), torch.randn(rows, outs)
    expected = x.double() @ layer.weight.double() + layer.bias.double()
    activated = torch.nn.functional.gelu(expected, approximate="tanh")
    added = residual.double() + expected
    head = torch.nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    bare = project(x, lay_out(head) if is_laid_out else head) + layer.bias
    for got, right in ((layer(x), expected), (layer(x, gelu=True), activated), (bare, expected)):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=2e-6)
    torch.testing.assert_close(layer.add_to(residual, x).double(), added, rtol=0, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9, 17])
def test_products_on_a_gpu_are_the_same(rows, dtype):
    torch.manual_seed(0)
    layer = Linear(64, 40).requires_grad_(False).to("cuda", dtype)
    for parameter in layer.parameters():
        parameter.normal_()
    x, residual, head = (torch.randn(n, 64, device="cuda").to(dtype) for n in (rows, rows, 1001))
    residual = residual[:, :40].contiguous()
    expected = x.double() @ layer.weight.double() + layer.bias.double()
    activated = torch.nn.functional.gelu(expected, approximate="tanh")
    logits, added = x.double() @ head.double().t(), residual.double() + expected
    assert with_room(head).equal(head)
    for got, right in (
        (layer(x), expected),
        (layer(x, gelu=True), activated),
        (layer.add_to(residual, x), added),
        (project(x, with_room(head)), logits),
        (project(x, head), logits),
    ):
        assert got.shape == right.shape
        error = (got.double() - right).norm() / right.norm()
        assert error < 4 * torch.finfo(dtype).eps
