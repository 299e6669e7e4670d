from __future__ import annotations

import pytest
import torch

from gpt2_infer import linear
from gpt2_infer.linear import Linear, lay_out, project


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
