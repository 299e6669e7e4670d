"""The ladders of CUDA kernels: each version file in a folder of csrc is a backend."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from attention_kernels.contract import Kernels
from attention_kernels.errors import UnsupportedError
from attention_kernels.ladder import register_ladder, versions
from attention_kernels.ladder.header import CSRC, HEAD_DIMS, version_number
from attention_kernels.registry import BackendSpec, get_backend, register, untraced

LADDERS = {
    "fp32": "CUSTOM_CUDA_VERSION_{}",
    "wmma_fa2": "WMMA_FLASH_ATTENTION_2_VERSION_{}",
    "fa1": "FLASH_ATTENTION_1_{}",
    "ablation": "ABLATION_STEP_{}",
    "hopper": "HOPPER_VERSION_{}",
    "decode": "DECODE_SPLIT_KV_VERSION_{}",
}


def _name(file: Path) -> str:
    ladder, (_, words) = file.parent.name, file.stem.split("_", 1)
    return LADDERS[ladder].format(words.upper() if ladder == "fa1" else version_number(file))


for _folder in LADDERS:
    # The op of version 7 of the first ladder is attention_kernels::v07.
    register_ladder(CSRC / _folder, name=_name, op_prefix="" if _folder == "fp32" else None)


# The lengths up to which other versions are the fastest: see kernel-fp32, kernel-fp32-last,
# kernel-fp32-128, kernel-shapes and kernel-fp16-later in results/.
LENGTHS = SHORTEST, SHORTER, SHORT = 64, 128, 256


def choose(
    alias: str, dtype: torch.dtype, head_dim: int, device: torch.device, seqlen: int | None = None
) -> BackendSpec:
    """Return the backend behind an alias: the fastest version that serves such calls.

    In float32 CUSTOM_CUDA is the fastest of those whose rows are as exact as plain PyTorch's, by
    three products of float16 numbers or in float32 throughout; CUSTOM_CUDA_IEEE has only the
    latter. A version is skipped if the GPU lacks its instructions, or if it refuses the head_dim,
    for example for lack of shared memory. On a CPU every version runs emulated. If none is left,
    raises UnsupportedError with the reasons of the first; if one cannot be built, raises
    UnavailableBackendError instead of trying the next.
    """
    # A call for each, so that torch.compile sees a constant in each branch when seqlen varies.
    for most in LENGTHS:
        if seqlen is not None and seqlen <= most:
            return get_backend(_chosen_name(alias, dtype, head_dim, device, most))
    return get_backend(_chosen_name(alias, dtype, head_dim, device, None))


def _candidates(alias: str, dtype: torch.dtype, head_dim: int, most: int | None) -> Iterator[str]:
    """Yield the versions that an alias may stand for up to `most` tokens, the fastest first."""
    is_short = most is not None and most <= SHORT
    if dtype != torch.float32:
        if not is_short:
            yield f"HOPPER_VERSION_{10 if head_dim == 128 else 4}"
        yield "WMMA_FLASH_ATTENTION_2_VERSION_9"
        return
    if alias == "CUSTOM_CUDA":
        if most == SHORTEST:
            yield "CUSTOM_CUDA_VERSION_15"
        yield "CUSTOM_CUDA_VERSION_40"  # head_dim 32 and 64
        if most != SHORTER:
            yield "CUSTOM_CUDA_VERSION_41"  # head_dim 128
        if is_short:
            yield "CUSTOM_CUDA_VERSION_15"
        yield "CUSTOM_CUDA_VERSION_25"
    if is_short or head_dim == 128:
        yield "CUSTOM_CUDA_VERSION_15"
    ladder = reversed(versions("fp32"))
    yield from (name for name in ladder if get_backend(name).precisions == IEEE)


IEEE = {"float32": "ieee-fp32"}
_chosen_names: dict[tuple[str, torch.dtype, int, torch.device, int | None], str] = {}


@untraced
def _chosen_name(
    alias: str, dtype: torch.dtype, head_dim: int, device: torch.device, most: int | None
) -> str:
    """Return the name of the first version that serves; cached, as every layer calls it."""
    key = alias, dtype, head_dim, device, most
    if key in _chosen_names:
        return _chosen_names[key]
    row = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
    refused: list[str] = []
    for spec in map(get_backend, _candidates(alias, dtype, head_dim, most)):
        if spec.lacking(device) or head_dim not in spec.head_dims:
            continue
        reasons = spec.refusals(row, row, row)
        if not reasons:
            _chosen_names[key] = spec.name
            return spec.name
        refused = refused or reasons
    raise UnsupportedError(alias, refused)


def _load(alias: str) -> Kernels:
    """Return a kernel that forwards each call to the chosen backend."""

    def chosen(q: Tensor) -> BackendSpec:
        return choose(alias, q.dtype, q.shape[3], q.device, q.shape[1])

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        return chosen(q).attention(q, k, v, softmax_scale=softmax_scale, is_causal=is_causal)

    def refusals(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[str]:
        return chosen(q).refusals(q, k, v, is_causal=is_causal)

    return Kernels(attention, refusals=refusals)


for _alias, _summary, _precisions in (
    (
        "CUSTOM_CUDA",
        "The fastest version for the GPU and the shape, in float32 one as exact as PyTorch.",
        {"float32": "3xfp16", "float16": "fp16"},
    ),
    ("CUSTOM_CUDA_IEEE", "The fastest version that computes in float32 throughout.", IEEE),
):
    register(
        name=_alias,
        family="alias",
        summary=_summary,
        precisions=_precisions,
        head_dims=HEAD_DIMS,
        probe=lambda device: get_backend("CUSTOM_CUDA_VERSION_1").unavailable_reason(device),
        emulated_on=("cpu",),
        chooses=functools.partial(choose, _alias),
    )(functools.partial(_load, _alias))
