"""A ladder: a folder of version files, each of them a backend.

Nothing is compiled before the first call: for a CUDA tensor with nvcc, for the devices of this
machine; for a CPU tensor with g++, for the emulator. The op of v07_*.cu is
torch.ops.attention_kernels.<op_prefix>v07; who calls it directly calls load_op() first.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_kernels import contract
from attention_kernels.contract import Kernels
from attention_kernels.errors import UnavailableBackendError, UnsupportedError
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError, Target
from attention_kernels.ladder.header import HeaderError, VersionHeader
from attention_kernels.registry import (
    PLAIN_PRECISIONS,
    BackendSpec,
    get_backend,
    list_backends,
    register,
    register_broken,
)

SCHEMA = "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal) -> Tensor"
TARGETS: dict[str, Target] = {"cuda": "cuda", "cpu": "emulator"}
# As in binding.cpp: 65,535 blocks on grid.y, each of 16 rows or more.
MAX_SEQLEN = 65535 * 16
MAX_INT = 2**31 - 1
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


def register_ladder(
    folder: Path, *, family: str, name: Callable[[Path], str], op_prefix: str = ""
) -> None:
    """Register each version file of a folder as the backend name(file).

    family: the backends' family. op_prefix: what tells this ladder's ops from those of others. A
    file whose header cannot be read, or whose number another has, is a backend that is unavailable
    for that reason.
    """
    for number, files in itertools.groupby(header.version_files(folder), key=header.version_number):
        _register(number, list(files), family, name, op_prefix)


def unregistered(file: Path) -> BackendSpec:
    """A backend of a version file that is in no ladder, under the file's own name.

    A second file of one name gets a suffix from its path. Raises HeaderError where the file cannot
    be read as a version.
    """
    if not file.is_file():
        raise HeaderError(f"there is no file {file}")
    place = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:8]
    version = header.parse_header(file, f"file_{place}_")
    name = version.path.stem.upper()
    if name in _versions and _versions[name].path != version.path:
        name = f"{name}_{place.upper()}"
    _versions[name] = version
    return BackendSpec(loader=lambda: kernels(name, version), **_fields(name, "file", version))


def resolve(what: str) -> BackendSpec:
    """The backend of a name, or of a version file that is in no ladder: its path ends in .cu.

    Raises UnknownBackendError or HeaderError.
    """
    return unregistered(Path(what)) if what.endswith(".cu") else get_backend(what)


def versions(family: str | None = None) -> dict[str, VersionHeader]:
    """The headers of the version files, of one registered family or of all, by backend name."""
    registered = {spec.name: spec.family for spec in list_backends()}
    return {n: v for n, v in _versions.items() if family in (None, registered.get(n))}


def architectures() -> str:
    """The compute capabilities of this machine's CUDA devices, as build() takes them: "80,90".

    Those that nvcc cannot compile for are left out, unless there are no others: an old card beside
    a new one must not take the new one's kernels away.
    """
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    archs = [f"{major}{minor}" for major, minor in sorted(found)]
    known = compilers.nvcc_architectures()
    return ",".join([arch for arch in archs if arch in known] or archs)


def families() -> list[str]:
    """The families that have version files, in the order of registration."""
    return list(dict.fromkeys(spec.family for spec in list_backends() if spec.name in _versions))


def build_all(device_type: str, specs: Iterable[BackendSpec]) -> None:
    """Build the versions among the backends at once, on every core, and not one by one on use.

    What does not build is told by its first use.
    """
    arch = architectures() if device_type == "cuda" else ""
    wanted = [
        _versions[spec.name]
        for spec in specs
        if spec.name in _versions and device_type in spec.device_types
    ]
    build.build_many(wanted, TARGETS[device_type], arch)


def load_op(name: str, device_type: str) -> None:
    """Build and load the op of a backend for a device type, unless that is done.

    Raises UnavailableBackendError, after a failed build with the compiler's first error line.
    """
    key = (name, device_type)
    with _lock:
        if key in _loaded:
            return
        version = _versions[name]
        define_op(version.op)
        try:
            arch = architectures() if device_type == "cuda" else ""
            library = build.build(version, TARGETS[device_type], arch, label=name)
            _load_library(library, version)
        except (BuildError, OSError) as error:
            _failed[key] = str(error)
            raise UnavailableBackendError(name, str(error)) from error
        _failed.pop(key, None)
        _loaded.add(key)


def _load_library(library: Path, version: VersionHeader) -> None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        text = str(error.__cause__ or error)  # torch's own words are the path alone
        missing = re.search(r"undefined symbol: \S*\d(launch|scratch_floats)E", text)
        if missing is None:
            raise BuildError(text) from error
        raise BuildError(
            f"{version.path.name} does not define {missing[1]}() as csrc/attention.h declares it: "
            "a version file defines scratch_floats() and launch() in "
            "namespace attention::ATTENTION_VERSION"
        ) from error


def _load_op(name: str, device_type: str) -> bool:
    load_op(name, device_type)
    return True


# torch.compile runs it as it is and traces none of it; see BackendSpec._load().
_load_op._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def define_op(op: str) -> None:
    """The op's schema and its fake kernel: what torch must know without any library."""
    name = f"attention_kernels::{op}"
    torch.library.define(name, SCHEMA, tags=(torch.Tag.needs_exact_strides,))
    torch.library.register_fake(
        name, lambda q, k, v, softmax_scale, is_causal: q.new_empty(q.shape)
    )


def kernels(name: str, version: VersionHeader) -> Kernels:
    """What the backend `name` of a version file loads; nothing is compiled yet."""
    _versions[name] = version
    define_op(version.op)
    op = getattr(torch.ops.attention_kernels, version.op).default

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        if torch.compiler.is_compiling() or (name, q.device.type) not in _loaded:
            _load_op(name, q.device.type)
        try:
            return op(q, k, v, softmax_scale, is_causal)  # type: ignore[no-any-return]
        except RuntimeError as error:
            reasons = _refusals(error, q, k, v)
            if not reasons:
                error.args = (_with_line(str(error)),)
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
        return _unfit(q, k, v)

    return Kernels(attention, explain=explain)


def _refusals(error: RuntimeError, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """The reasons in an op's error that are about the call, not about a kernel that failed."""
    message = str(error).splitlines()[0]
    if not any(f"cudaError{code}" in message for code in _REFUSALS):
        return _unfit(q, k, v)
    if q.device.type == "cuda":
        properties = torch.cuda.get_device_properties(q.device)
        limit = getattr(properties, "shared_memory_per_block_optin", "?")
        message += f" (a block of this device may have {limit} bytes of shared memory)"
    return [f"head_dim {q.shape[3]} on this device: {message}"]


def _with_line(message: str) -> str:
    """The emulator's message with the source line instead of the address in the library."""

    def line(found: re.Match[str]) -> str:
        place = compilers.source_line(found[2], found[1])
        return f"at {place}" if place else found[0]

    return re.sub(r"in code at \+(0x[0-9a-f]+) of (.+?\.so)", line, message)


def _unfit(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """What binding.cpp refuses: sizes beyond a grid's or an int, and rows that are not aligned."""
    batch, seqlen, num_heads, head_dim = q.shape
    sizes = (
        ("seqlen", seqlen, MAX_SEQLEN),
        ("batch * num_heads", batch * num_heads, MAX_INT),
        ("num_heads * head_dim", num_heads * head_dim, MAX_INT // 64),
    )
    return [
        f"{what} may be at most {limit}, not {size}" for what, size, limit in sizes if size > limit
    ] + [
        f"{name} must begin at a multiple of 16 bytes, and so must its rows"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.data_ptr() % 16
        or any(
            size > 1 and stride * x.element_size() % 16
            for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
    ]


def _register(
    number: int, files: list[Path], family: str, namer: Callable[[Path], str], op_prefix: str
) -> None:
    name = namer(files[0])
    try:
        if len(files) > 1:
            names = ", ".join(path.name for path in files)
            raise HeaderError(f"several files have the number {number}: {names}")
        version = _versions[name] = header.parse_header(files[0], op_prefix)
    except HeaderError as error:
        register_broken(name, family, f"{files[0].stem}.", ("cuda", "cpu"), str(error))
        return
    register(**_fields(name, family, version))(lambda: kernels(name, version))


def _fields(name: str, family: str, version: VersionHeader) -> dict[str, Any]:
    """The fields of BackendSpec, but for the loader, that a version file's header tells."""

    def probe(device_type: str) -> str | None:
        reason = compilers.missing_compiler(TARGETS[device_type])
        return reason or _failed.get((name, device_type))

    return {
        "name": name,
        "family": family,
        "summary": f"{version.title[0].upper()}{version.title[1:].rstrip('.')}.",
        "precisions": {version.dtype: PLAIN_PRECISIONS[version.dtype]},
        "head_dims": version.head_dims,
        "device_types": ("cpu",) if version.is_host else ("cuda", "cpu"),
        "probe": probe,
        "emulated_on": () if version.is_host else ("cpu",),
        "needs_contiguous": version.layout == "contiguous",
    }
