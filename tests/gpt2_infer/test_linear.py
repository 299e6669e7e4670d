from __future__ import annotations

import pytest
import torch

from gpt2_infer.linear import Linear


@pytest.mark.parametrize("threads", [1, 2])  # of these the product of one row depends on
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("in_features", [7, 12])
def test_every_way_to_multiply_is_the_same_product(in_features, rows, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    layer = Linear(in_features, 5).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    x, residual = torch.randn(rows, in_features), torch.randn(rows, 5)
    expected = x.double() @ layer.weight.double() + layer.bias.double()
    activated = torch.nn.functional.gelu(expected, approximate="tanh")
    added = residual.double() + expected
    for got, right in ((layer(x), expected), (layer(x, gelu=True), activated)):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=2e-6)
    torch.testing.assert_close(layer.add_to(residual, x).double(), added, rtol=0, atol=2e-6)
