"""Matrix products: which library multiplies where, and why.

The choice depends on the device and the number of rows; the result depends on it only by rounding.

cpu, float32, 8 rows or more: oneDNN, twice as fast as MKL's sgemm on AMD's AVX-512.
cpu otherwise: MKL. It puts one row on one core, so that row is multiplied in two halves of K; the
logits of one row go to oneDNN, which uses every core.
cuda: a plain product, then a pass for the bias. addmm with a bias vector goes to cuBLASLt, which
does not split K and at GPT-2's sizes took up to 2.5 times as long on an H200.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN_MIN_ROWS = 8


class Linear(nn.Module):
    """y = x W + b with W stored (in, out), as in GPT-2's checkpoints."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """Map (rows, in_features) to (rows, out_features); gelu applies GELU's tanh form."""
        if _takes_onednn(x, ONEDNN_MIN_ROWS):
            kind, form = ("gelu", "tanh") if gelu else ("none", "")
            return cast("Tensor", _linear_onednn()(x, self.weight.t(), self.bias, kind, [], form))
        y = self._product(x).add_(self.bias)
        return F.gelu(y, approximate="tanh") if gelu else y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add x W + b to residual, which may be overwritten, and return the sum."""
        if _takes_onednn(x, ONEDNN_MIN_ROWS):
            weight = self.weight.t()
            return cast("Tensor", _linear_onednn().binary(x, residual, weight, self.bias, "add"))
        if x.device.type == "cpu":
            return residual.add_(self.bias).add_(self._product(x))
        return residual.add_(self.bias).addmm_(x, self.weight)

    def _product(self, rows: Tensor) -> Tensor:
        half, odd = divmod(rows.shape[1], 2)
        splits = rows.device.type == "cpu" and rows.shape[0] == 1 and not odd
        if not splits or torch.get_num_threads() == 1:
            return torch.mm(rows, self.weight)
        return torch.bmm(rows.view(2, 1, half), self.weight.view(2, half, -1)).sum(0)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (rows, in_features) by the transpose of weight, (out_features, in_features)."""
    if _takes_onednn(x, min_rows=1):
        return cast("Tensor", _linear_onednn()(x, weight, None, "none", [], ""))
    return F.linear(x, weight)


def _takes_onednn(rows: Tensor, min_rows: int) -> bool:
    return (
        rows.shape[0] >= min_rows
        and rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _linear_onednn() -> Any:
    """Return torch.compile's own entry to oneDNN: a dense weight, transposed or not, an epilogue.

    Looked up when needed: a torch without oneDNN has no such op.
    """
    return torch.ops.mkldnn._linear_pointwise
