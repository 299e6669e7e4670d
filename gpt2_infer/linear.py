"""Matrix products: which library is used where, and why.

The choice depends on the device, the dtype and the number of rows; it affects only rounding.

cpu, float32, 2 rows or more: oneDNN, twice as fast as MKL's sgemm on AMD's AVX-512.
cpu, one row: MKL. It multiplies one row on one core, so a large weight is split into two halves.
The logits use oneDNN unless their weights are laid out for MKL; see lay_out().
cuda: addmm, which is cuBLASLt with the bias in its epilogue. In float32 with more than one row, a
plain product and then a pass for the bias: cuBLASLt does not split K, and at GPT-2's sizes took up
to 2.5 times as long on an H200. In 16 bits the logits are padded to a multiple of 8 columns; see
with_room(). With --products 3xfp16, layers take two rows or more through our own product.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_infer.config import ProductsName
from gpt2_infer.prepared import Prepared
from gpt2_infer.product import Product, kernel_for

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Weights of at least this many elements multiply faster on two cores, half on each.
MIN_SPLIT_NUMEL = 2**17


def without_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run a function in the model's own dtype, even where torch.autocast is on."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


class Linear(nn.Module):
    """y = x W + b with W stored (in, out), as in GPT-2's checkpoints."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.products: ProductsName = "ieee-fp32"
        self.prepared = Prepared()
        """Keeps our own product, with packed weights, between calls."""

    def product(self) -> Product:
        """Return our own product, with weights packed at the first call; raises BuildError."""
        kernel = kernel_for(self.products, self.weight.device)
        return self.prepared.share("product", lambda: Product(*weight_and_bias(self), kernel))

    def forward(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """Map (rows, in_features) to (rows, out_features); gelu applies GELU's tanh form."""
        if self.products != "ieee-fp32" and x.shape[0] > 1:
            return self.product()(x.contiguous(), gelu=gelu)
        weight, bias = weight_and_bias(self)
        if _takes_onednn(x, min_rows=2):
            kind, form = ("gelu", "tanh") if gelu else ("none", "")
            return cast(
                "Tensor", torch.ops.mkldnn._linear_pointwise(x, weight.t(), bias, kind, [], form)
            )
        if x.is_cuda and (_has_16_bits(x) or x.shape[0] == 1):
            y = torch.addmm(bias, x, weight)
        else:
            y = _product(x, weight).add_(bias)
        return F.gelu(y, approximate="tanh") if gelu else y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W + b; residual may be overwritten."""
        if self.products != "ieee-fp32" and x.shape[0] > 1:
            return self.product().add_to(residual.contiguous(), x.contiguous())
        weight, bias = weight_and_bias(self)
        if _takes_onednn(x, min_rows=2):
            return cast(
                "Tensor",
                torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight.t(), bias, "add"),
            )
        if x.is_cuda and _has_16_bits(x):
            return residual.add_(torch.addmm(bias, x, weight))
        if x.is_cpu and weight.numel() >= MIN_SPLIT_NUMEL:
            return residual.add_(bias).add_(_product(x, weight))
        return residual.add_(bias).addmm_(x, weight)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (rows, in_features) by the transpose of weight, (out_features, in_features).

    The result's row stride may exceed out_features.
    """
    is_laid_out = weight.stride(0) == 1
    if _takes_onednn(x, min_rows=2 if is_laid_out else 1):
        return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    if x.is_cuda and _has_16_bits(x):
        outs, ins = weight.shape
        padded = _multiple_of_8(outs)
        end = weight.storage_offset() + padded * ins
        if weight.is_contiguous() and weight.untyped_storage().nbytes() >= 2 * end:
            return torch.mm(x, weight.as_strided((padded, ins), (ins, 1)).t())[:, :outs]
    return _product(x, weight.t()) if is_laid_out else F.linear(x, weight)


def with_room(weight: Tensor) -> Tensor:
    """Return the logits' weight; in 16 bits on CUDA, with memory for a multiple of 8 rows.

    For other sizes cuBLAS picks a kernel that is up to six times as slow. The padding costs a copy.
    """
    outs, ins = weight.shape
    if not weight.is_cuda or not _has_16_bits(weight) or outs == _multiple_of_8(outs):
        return weight
    room = weight.new_zeros(_multiple_of_8(outs), ins)
    room[:outs] = weight
    return room[:outs]


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return both parameters, without nn.Module's lookup, which takes as long as making a view."""
    parameters = cast("dict[str, Tensor]", module._parameters)
    return parameters["weight"], parameters["bias"]


def lay_out(weight: Tensor) -> Tensor:
    """Make a weight's longer side contiguous on the CPU in float32; else return it unchanged.

    MKL then multiplies one row by it up to twice as fast. The layout costs a copy.
    """
    ins, outs = weight.shape
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and ins > outs:
        return weight.t().contiguous().t()
    return weight


def _has_16_bits(x: Tensor) -> bool:
    return x.element_size() == 2


def _multiple_of_8(count: int) -> int:
    return -(-count // 8) * 8


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (rows, in_features) by weight, (in_features, out_features)."""
    ins, outs = weight.shape
    is_small = weight.numel() < MIN_SPLIT_NUMEL
    if is_small or x.shape[0] > 1 or not x.is_cpu or torch.get_num_threads() == 1:
        return torch.mm(x, weight)
    if weight.stride(1) == 1 and ins % 2 == 0:
        a, b = torch.bmm(x.view(2, 1, -1), weight.view(2, -1, outs)).unbind(0)
        return a.add_(b)
    if weight.stride(0) == 1 and outs % 2 == 0:
        halves = weight.view(ins, 2, -1).transpose(0, 1)
        return torch.bmm(x.expand(2, 1, -1), halves).view(1, outs)
    return torch.mm(x, weight)


def _takes_onednn(rows: Tensor, *, min_rows: int) -> bool:
    return (
        rows.shape[0] >= min_rows
        and rows.is_cpu
        and rows.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
