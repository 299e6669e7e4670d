"""Helpers for the tests of the ladders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from attention_kernels import BackendSpec, ladder, list_backends
from attention_kernels.ladder import header
from tests.conftest import usable, version_file

FP32 = [spec.name for spec in list_backends() if spec.family == "fp32"]
HOPPER = [spec.name for spec in list_backends() if spec.family == "hopper"]
LAST_WMMA = next(spec.name for spec in list_backends()[::-1] if spec.family == "wmma_fa2")
STRIDED_HALF = ["FLASH_ATTENTION_1_TENSOR_CORE", LAST_WMMA]
# One backend of each family, and the first and last of the largest. Tests of the others are slow:
# g++ takes longer for WMMA's last version than for all of these.
QUICK = {
    "NAIVE_PYTORCH",
    FP32[0],
    FP32[-1],
    "WMMA_FLASH_ATTENTION_2_VERSION_1",
    HOPPER[-1],
    STRIDED_HALF[0],
    "ABLATION_STEP_8",
    "DECODE_SPLIT_KV_VERSION_1",
    "NUMPY_BASIC",
    "TRITON_FLASH_ATTENTION",
}


EMULATED = [one for one in ladder.versions().items() if not one[1].is_host]
# The last version of each ladder for each precision, and for a single architecture by head_dim.
NEWEST = {
    (v.path.parent, v.precision, v.needs_exactly and v.head_dims): name for name, v in EMULATED
}.values()
# Building one takes a second or two, so the others are emulated only by the GPU suite,
# whose machine has more cores.
OLDER = {name for name, _ in EMULATED} - {*NEWEST}


def for_each(names: list[str]) -> pytest.MarkDecorator:
    params = []
    for name in names:
        mark = pytest.mark.gpu if name in OLDER else pytest.mark.slow
        params.append(pytest.param(name, marks=[] if name in QUICK else mark))
    return pytest.mark.parametrize("name", params)


def dtype_of(spec: BackendSpec) -> torch.dtype:
    """Return the only dtype that an attention kernel's version file takes."""
    (name,) = spec.dtypes
    return getattr(torch, name)


def spec_of(version: header.VersionHeader) -> BackendSpec:
    """Return a backend for a version file outside every ladder."""
    return ladder.backend(f"TEST_{version.op.upper()}", "test", version)


def op_of(spec: BackendSpec, device: str = "cpu"):
    """Return a backend's op."""
    spec.prepare(device)
    op = spec.version.op if spec.version else spec.name.lower()
    return getattr(torch.ops.attention_kernels, op).default


def changed(file: Path, *changes: tuple[str, str]) -> BackendSpec:
    """Replace texts of a version file that occur once, and return the copy as a backend."""
    text = file.read_text("utf-8")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return ladder.resolve(str(version_file(file.name, text)))


def fused(name: str) -> BackendSpec:
    """Return a version that g++ builds with multiplications and additions fused, as nvcc does.

    If a product is rounded in one place but not in another, differences that should be 0 are not.
    """
    file = usable(name, "cpu").version.path
    if not re.search(r"^flags\b.*\bfma\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
        pytest.skip("this processor does not have x86-64's fused multiply-add")
    flags = "-Xcompiler=-fexpensive-optimizations,-ffp-contract=fast,-mfma"
    text, count = re.subn(r"(// Flags: ).*", rf"\1{flags}", file.read_text())
    assert count == 1
    # At -Og nothing is fused.
    text = text.replace("#include", '#pragma GCC optimize("O1")\n#include', 1)
    return ladder.resolve(str(version_file(file.name, text)))
