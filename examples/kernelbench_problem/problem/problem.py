"""The problem: causal self-attention in float32, softmax(q k^T / sqrt(64)) v of any length."""

from __future__ import annotations

from torch import Tensor

from attention_kernels import UnsupportedError, register
from attention_kernels.contract import Kernels


@register(
    name="SUBMISSION",
    family="problem",
    summary="The submission's ModelNew.",
    precisions={"float32": "ieee-fp32"},
    head_dims=(64,),
)
def load() -> Kernels:
    """Return the submission's model as a kernel; called in the process that judges nothing."""
    from submission import ModelNew

    model = ModelNew()

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        if not is_causal or softmax_scale != q.shape[3] ** -0.5:
            raise UnsupportedError("SUBMISSION", ["what the problem does not ask for"])
        o: Tensor = model(*(x.transpose(1, 2) for x in (q, k, v)))  # heads first, as in the problem
        return o.transpose(1, 2).contiguous()

    return Kernels(attention)
