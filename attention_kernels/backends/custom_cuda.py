"""The float32 ladder, CUSTOM_CUDA_VERSION_1 and up: one backend for each file in csrc/fp32.

Nothing is compiled before the first call: for a CUDA tensor with nvcc, for the devices of this
machine; for a CPU tensor with g++, for the emulator. The op of v07_*.cu is
torch.ops.attention_kernels.v07; who calls it directly calls load_op() first.
"""

from __future__ import annotations

import functools
import itertools
import threading
from pathlib import Path

import torch
from torch import Tensor

from attention_kernels import build, contract
from attention_kernels.build import BuildError, HeaderError, Target, VersionHeader
from attention_kernels.contract import Kernels
from attention_kernels.errors import UnavailableBackendError, UnsupportedError
from attention_kernels.registry import register

FOLDER = build.CSRC / "fp32"
SCHEMA = "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal) -> Tensor"
TARGETS: dict[str, Target] = {"cuda": "cuda", "cpu": "emulator"}
# A launch that failed with one of these has run nothing, and can never succeed on this device.
_REFUSALS = (
    "InvalidValue",
    "InvalidConfiguration",
    "LaunchOutOfResources",
    "NoKernelImageForDevice",
    "InsufficientDriver",
)

_lock = threading.RLock()
_versions: dict[str, VersionHeader] = {}  # by backend
_loaded: set[tuple[str, str]] = set()  # backend and device type
_failed: dict[tuple[str, str], str] = {}  # why its last build failed


def backend_name(number: int) -> str:
    """The public name of a version of this ladder."""
    return f"CUSTOM_CUDA_VERSION_{number}"


def architectures() -> str:
    """The compute capabilities of this machine's CUDA devices, as build() takes them: "80,90".

    Those that nvcc cannot compile for are left out, unless there are no others: an old card beside
    a new one must not take the new one's kernels away.
    """
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    archs = [f"{major}{minor}" for major, minor in sorted(found)]
    known = build.nvcc_architectures()
    return ",".join([arch for arch in archs if arch in known] or archs)


def build_all(device_type: str, jobs: int | None = None) -> dict[str, Path | BuildError]:
    """Build every version for a device type at once; by op, the library or the error."""
    arch = architectures() if device_type == "cuda" else ""
    return build.build_many(_versions.values(), TARGETS[device_type], arch, jobs=jobs)


def load_op(name: str, device_type: str) -> None:
    """Build and load the op of a backend for a device type, unless that is done.

    Raises UnavailableBackendError, after a failed build with the compiler's first error line.
    """
    key = (name, device_type)
    with _lock:
        if key in _loaded:
            return
        version = _versions[name]
        _define(version.op)
        try:
            arch = architectures() if device_type == "cuda" else ""
            library = build.build(version, TARGETS[device_type], arch, label=name)
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except (BuildError, OSError) as error:
            _failed[key] = str(error)
            raise UnavailableBackendError(name, str(error)) from error
        _failed.pop(key, None)
        _loaded.add(key)


def _load_op(name: str, device_type: str) -> bool:
    load_op(name, device_type)
    return True


# torch.compile runs it as it is and traces none of it; see BackendSpec._load().
_load_op._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _define(op: str) -> None:
    """The op's schema and its fake kernel: what torch must know without any library."""
    name = f"attention_kernels::{op}"
    torch.library.define(name, SCHEMA, tags=(torch.Tag.needs_exact_strides,))
    torch.library.register_fake(
        name, lambda q, k, v, softmax_scale, is_causal: q.new_empty(q.shape)
    )


def kernels(name: str, version: VersionHeader) -> Kernels:
    """What the backend `name` of a version file loads; nothing is compiled yet."""
    _versions[name] = version
    _define(version.op)
    op = getattr(torch.ops.attention_kernels, version.op).default

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        if torch.compiler.is_compiling() or (name, q.device.type) not in _loaded:
            _load_op(name, q.device.type)
        try:
            return op(q, k, v, softmax_scale, is_causal)  # type: ignore[no-any-return]
        except RuntimeError as error:
            reasons = _refusals(error, q, k, v)
            if not reasons:
                raise
            raise UnsupportedError(name, reasons) from error

    def explain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[str]:
        load_op(name, q.device.type)
        if version.layout == "contiguous":
            q, k, v = contract.contiguous(q), contract.contiguous(k), contract.contiguous(v)
        one = q.new_zeros(1, 1, 1, q.shape[3])  # a launch is refused whatever the seqlen
        try:
            op(one, one, one, 1.0, is_causal)
        except RuntimeError as error:
            if not (reasons := _refusals(error, q, k, v)):
                raise
            return reasons
        return _misaligned(q, k, v)

    return Kernels(attention, explain=explain)


def _refusals(error: RuntimeError, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """The reasons in an op's error that are about the call, not about a kernel that failed."""
    message = str(error).splitlines()[0]
    if not any(f"cudaError{code}" in message for code in _REFUSALS):
        return _misaligned(q, k, v)
    if q.device.type == "cuda":
        properties = torch.cuda.get_device_properties(q.device)
        limit = getattr(properties, "shared_memory_per_block_optin", "?")
        message += f" (a block of this device may have {limit} bytes of shared memory)"
    return [f"head_dim {q.shape[3]} on this device: {message}"]


def _misaligned(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """The kernels load 16 bytes at a time."""
    return [
        f"{name} must begin at a multiple of 16 bytes, and so must its rows"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.data_ptr() % 16
        or any(
            size > 1 and stride * x.element_size() % 16
            for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
    ]


def _register(number: int, paths: list[Path]) -> None:
    name, version = backend_name(number), None
    try:
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise HeaderError(f"several files have the number {number}: {names}")
        version = _versions[name] = build.parse_header(paths[0])
        broken = None
    except HeaderError as error:
        broken = str(error)
    title = version.title if version else paths[0].stem

    def probe(device_type: str) -> str | None:
        return (
            broken
            or build.missing_compiler(TARGETS[device_type])
            or _failed.get((name, device_type))
        )

    @register(
        name=name,
        family="custom-cuda",
        summary=f"{title[0].upper()}{title[1:].rstrip('.')}.",
        precisions={"float32": "ieee-fp32"},
        head_dims=(32, 64, 128),
        probe=probe,
        emulated_on=("cpu",),
        needs_contiguous=version is not None and version.layout == "contiguous",
    )
    def load() -> Kernels:
        return kernels(name, _versions[name])


for _number, _paths in itertools.groupby(build.version_files(FOLDER), key=build.version_number):
    _register(_number, list(_paths))
