"""The ladders of CUDA kernels: each version file in a folder of csrc is a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels.contract import Kernels
from attention_kernels.errors import UnsupportedError
from attention_kernels.ladder import register_ladder, versions
from attention_kernels.ladder.header import CSRC, HEAD_DIMS, version_number
from attention_kernels.registry import BackendSpec, get_backend, register, untraced

register_ladder(
    CSRC / "fp32",
    name=lambda file: f"CUSTOM_CUDA_VERSION_{version_number(file)}",
    op_prefix="",  # the op of version 7 is attention_kernels::v07
)
register_ladder(
    CSRC / "wmma_fa2",
    name=lambda file: f"WMMA_FLASH_ATTENTION_2_VERSION_{version_number(file)}",
)
register_ladder(
    CSRC / "fa1",
    name=lambda file: f"FLASH_ATTENTION_1_{file.stem.split('_', 1)[1].upper()}",
)
register_ladder(
    CSRC / "ablation",
    name=lambda file: f"ABLATION_STEP_{version_number(file)}",
)
register_ladder(
    CSRC / "hopper",
    name=lambda file: f"HOPPER_VERSION_{version_number(file)}",
)
register_ladder(
    CSRC / "decode",
    name=lambda file: f"DECODE_SPLIT_KV_VERSION_{version_number(file)}",
)


# Up to SHORT_SEQLEN keys, and with head_dim 128, this rung is faster than the later ones without
# tensor cores: see kernel-fp32 and kernel-shapes in results/.
SHORT_SEQLEN = 256
SHORT_OR_WIDE = "CUSTOM_CUDA_VERSION_15"


def choose(
    dtype: torch.dtype, head_dim: int, device: torch.device, seqlen: int | None = None
) -> BackendSpec:
    """Return the backend behind CUSTOM_CUDA: the last rung of csrc/fp32 that is float32 throughout.

    Where that rung is not the fastest, SHORT_OR_WIDE takes precedence. A rung is skipped if the GPU
    is too old for it or if it refuses the head_dim, for example for lack of shared memory. On a CPU
    every rung runs emulated. If no rung is left, raises UnsupportedError with the reasons of the
    first; if a rung cannot be built, raises UnavailableBackendError instead of trying the next.
    """
    # Two calls, so that torch.compile sees a constant in each branch when seqlen varies.
    if head_dim == 128 or (seqlen is not None and seqlen <= SHORT_SEQLEN):
        return get_backend(_chosen_name(dtype, head_dim, device, True))
    return get_backend(_chosen_name(dtype, head_dim, device, False))


_chosen_names: dict[tuple[torch.dtype, int, torch.device, bool], str] = {}


@untraced
def _chosen_name(dtype: torch.dtype, head_dim: int, device: torch.device, is_special: bool) -> str:
    """Return the name of the first rung that serves; cached, as it is called for every layer."""
    key = dtype, head_dim, device, is_special
    if key in _chosen_names:
        return _chosen_names[key]
    row = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
    refused: list[str] = []
    for spec in map(get_backend, [SHORT_OR_WIDE] * is_special + [*reversed(versions("fp32"))]):
        if spec.precisions.get("float32") != "ieee-fp32" or spec.lacks_instructions(device):
            continue
        reasons = spec.unsupported_reasons(row, row, row)
        if not reasons:
            _chosen_names[key] = spec.name
            return spec.name
        refused = refused or reasons
    raise UnsupportedError("CUSTOM_CUDA", refused)


@register(
    name="CUSTOM_CUDA",
    family="alias",
    summary="The fastest float32 version that serves the device and the shape.",
    precisions={"float32": "ieee-fp32"},
    head_dims=HEAD_DIMS,
    probe=lambda device_type: get_backend("CUSTOM_CUDA_VERSION_1").unavailable_reason(device_type),
    emulated_on=("cpu",),
    chooses=choose,
)
def load() -> Kernels:
    """Return a kernel that forwards each call to the chosen backend."""

    def chosen(q: Tensor) -> BackendSpec:
        return choose(q.dtype, q.shape[3], q.device, q.shape[1])

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        return chosen(q).attention(q, k, v, softmax_scale=softmax_scale, is_causal=is_causal)

    def explain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[str]:
        return chosen(q).unsupported_reasons(q, k, v, is_causal=is_causal)

    return Kernels(attention, explain=explain)
