"""What predicts a backend: its version file, or the kernels of Triton or PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from attention_kernels import BackendSpec
from attention_kernels.inspection import explain, predict, pytorch_kernel
from attention_kernels.inspection.explain import Explanation
from attention_kernels.inspection.gpus import GpuModel
from attention_kernels.inspection.predict import Case, Prediction
from attention_kernels.ladder.header import VersionHeader


class Predictor(NamedTuple):
    """The functions that predict the calls of one backend; they raise AttentionError."""

    predict: Callable[[GpuModel, Sequence[Case]], list[Prediction]]
    """Predicts a call in each case; the cases differ only in length."""
    explain: Callable[[GpuModel, Case], Explanation]


def predicts_without_version(spec: BackendSpec) -> bool:
    """Return whether there is a predictor for a backend that has no version file."""
    return spec.family == "triton" or spec.name == pytorch_kernel.BACKEND


def predictor_of(name: str, version: VersionHeader | None, dtype: str) -> Predictor:
    """Return the predictor of a version or, without one, of Triton's or PyTorch's backend.

    dtype: of a backend without a version; a version has its own.
    """
    if version:
        return Predictor(partial(predict.predict, version), partial(explain.explain, version))
    if name == pytorch_kernel.BACKEND:
        return Predictor(
            partial(pytorch_kernel.predict_backend, dtype=dtype),
            partial(pytorch_kernel.explain_backend, dtype=dtype),
        )
    from attention_kernels.inspection import triton_kernel  # needs Triton

    return Predictor(
        partial(triton_kernel.predict_backend, name, dtype=dtype),
        partial(triton_kernel.explain_backend, name, dtype=dtype),
    )
