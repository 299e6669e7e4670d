"""Turn a version file into a backend: define its op, and build and load it on first use.

The first call compiles it: with nvcc for the GPUs of this machine if the tensors are on CUDA and
the wheel has no library of it, with g++ for the emulator if they are on the CPU. The op of v07_*.cu
is torch.ops.attention_kernels.<op_prefix>v07; code that calls it directly must call the backend's
prepare() first. A file that takes several dtypes has an op for each: <op_prefix>v07_bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_kernels import registry
from attention_kernels.contract import Kernels
from attention_kernels.errors import KernelError, UnavailableBackendError, UnsupportedError
from attention_kernels.ladder import build, compilers, entry, header, prebuilt
from attention_kernels.ladder.compilers import TARGETS, BuildError
from attention_kernels.ladder.header import HeaderError, VersionHeader
from attention_kernels.registry import BackendSpec, untraced

FILES = (".cu", ".cuh")
SCHEMAS = {
    "attention": "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal) -> Tensor",
    "decode": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seqlens, float softmax_scale) "
    "-> Tensor",
    "struct": "(Tensor on, Tensor params) -> ()",
}


def register_ladder(
    folder: Path,
    *,
    name: Callable[[Path], str],
    family: str | None = None,
    op_prefix: str | None = None,
) -> None:
    """Register each version file of a folder as the backend name(file).

    family: the folder's name by default. op_prefix: the prefix of its ops' names, by default the
    folder's name and "_". The backends are in the order of header.in_order(). A file whose header
    is invalid or whose number is not unique becomes a backend that is unavailable for that reason.
    """
    family = family or folder.name
    prefix = re.sub(r"\W", "_", f"{folder.name}_") if op_prefix is None else op_prefix
    found: list[VersionHeader] = []
    broken: dict[Path, str] = {}
    for number, group in itertools.groupby(header.version_files(folder), header.version_number):
        first, *others = group
        try:
            if others:
                names = ", ".join(path.name for path in (first, *others))
                raise HeaderError(f"several files have the number {number}: {names}")
            found.append(header.parse_header(first, prefix))
        except HeaderError as error:
            broken[first] = str(error)
    for version in header.in_order(found):
        try:
            header.check_start(version, found)
            registry.add(backend(name(version.path), family, version))
        except HeaderError as error:
            broken[version.path] = str(error)
    for path, reason in broken.items():
        registry.add(registry.unavailable(name(path), family, reason, ("cuda", "cpu")))


def resolve(what: str) -> BackendSpec:
    """Return the backend of that name, of a version file, *.cu, outside the ladders, or of a slot.

    The backend of a file is named after the file. A slot's, *.cuh, decodes: see csrc/slot/slot.cuh.
    Raises UnknownBackendError, OSError, or HeaderError if the file is not a valid version.
    """
    if not (isinstance(what, str) and what.endswith(FILES)):
        return registry.get_backend(what)
    version = header.of_file(Path(what))
    if what.endswith(".cuh"):
        version = entry.slot_kernel(version, build.cache_dir())
    return backend(version.label.upper(), "file", version)


def known(what: str) -> BackendSpec | None:
    """Return a backend or a version file's; None if only a plug-in can have that name."""
    return resolve(what) if what.endswith(FILES) else registry.registered(what)


def resolve_all(whats: Iterable[str]) -> list[BackendSpec]:
    """Return resolve() of each; also raises HeaderError if two files give the same name."""
    found = [resolve(what) for what in whats]
    paths: dict[str, Path] = {}
    for name, version in [(spec.name, spec.version) for spec in found if spec.version]:
        if (path := paths.setdefault(name, version.path)) != version.path:
            raise HeaderError(f"{path} and {version.path} are both {name}: rename one")
    return found


def versions(family: str | None = None) -> dict[str, VersionHeader]:
    """Return the headers of all registered version files, or of one family, by backend name."""
    return {
        spec.name: spec.version
        for spec in registry.list_backends()
        if spec.version is not None and family in (None, spec.family)
    }


def predecessors(versions: Mapping[str, VersionHeader]) -> dict[str, str | None]:
    """Return each version's predecessor, with which it is compared; None for the first.

    This is the version before it, or the one that its header names: `From: v12`.
    """
    names = {version.name: name for name, version in versions.items()}
    return {
        name: names.get(version.start) if version.start else last
        for last, (name, version) in zip([None, *versions], versions.items(), strict=False)
    }


def families() -> list[str]:
    """Return the families that have version files, in order of registration."""
    specs = registry.list_backends()
    return [*dict.fromkeys(spec.family for spec in specs if spec.version is not None)]


def build_all(device_type: str, specs: Iterable[BackendSpec]) -> list[BuildError]:
    """Build the version files of all these backends at once, on all cores.

    Returns the errors; a backend that cannot be built also says so on first use.
    """

    def attempt(version: VersionHeader) -> BuildError | None:
        try:
            build.build(version, TARGETS[device_type], _arch(device_type))
        except BuildError as error:
            return error
        return None

    wanted = [
        version
        for spec in specs
        if spec.version is not None and device_type in spec.device_types
        for version in spec.version.builds()
        if not prebuilt.find(version, device_type)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*filter(None, pool.map(attempt, wanted))]


def is_prebuilt(spec: BackendSpec) -> bool:
    """Return whether a backend runs libraries from the wheel on CUDA, and so needs no nvcc."""
    return spec.version is not None and all(map(prebuilt.find, spec.version.builds()))


def _arch(device_type: str) -> str:
    return compilers.architectures() if device_type == "cuda" else ""


def backend(name: str, family: str, version: VersionHeader) -> BackendSpec:
    """Return the backend of a version file, without compiling anything.

    Raises HeaderError for a file whose role is struct.
    """
    if version.role == "struct":
        raise HeaderError(f"{version.path.name}: its role is struct, so it is not a backend")
    ops = _Ops(name, version)
    summary = f"{version.title[0].upper()}{version.title[1:].rstrip('.')}."
    if version.tensors != "BNHD":
        summary += f" Its time includes copies to tensors ({', '.join(version.tensors)})."
    return BackendSpec(
        name=name,
        family=family,
        summary=summary,
        loader=ops.kernels,
        precisions=version.precisions,
        head_dims=version.head_dims,
        device_types=("cpu",) if version.is_host else ("cuda", "cpu"),
        min_compute_capability=version.needs,
        probe=ops.probe,
        emulated_on=() if version.is_host else ("cpu",),
        needs_contiguous=version.layout == "contiguous",
        supports_gqa=version.layout == "strided",
        error_slack=version.error_slack,
        # A host function may allocate or wait, which no graph can capture.
        cuda_graphs=not version.entry or "<<<" in version.entry,
        version=version,
    )


def race_checked(spec: BackendSpec) -> BackendSpec:
    """Return the backend of the same version file, built for the emulator to report races."""
    assert spec.version is not None
    return backend(spec.name, spec.family, header.race_checked(spec.version))


def _by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return grouped queries as a call whose batch has an entry for each key head of each row.

    They are (batch * kv_heads, seqlen, group, head_dim): k and v have a stride of 0 between heads,
    so that no kernel needs to know of groups. If batch and kv_heads have no common stride, a tensor
    is copied, but never once per query head.
    """
    group = q.shape[2] // k.shape[2]
    q = q.view(*q.shape[:2], -1, group, q.shape[3]).transpose(1, 2).flatten(0, 1)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    return q, k[:, :, None].expand(-1, -1, group, -1), v[:, :, None].expand(-1, -1, group, -1)


class _Ops:
    """The ops of a version file, one for each dtype, which are built and loaded on first use."""

    def __init__(self, name: str, version: VersionHeader) -> None:
        self.name, self.version = name, version
        self.builds = {getattr(torch, one.dtype): one for one in version.builds()}
        self.loaded: set[tuple[torch.dtype, str]] = set()
        self.failed: dict[str, str] = {}

    def kernels(self) -> Kernels:
        """Return the kernels; nothing is compiled."""
        if self.version.role == "decode":
            return Kernels(decode=self.run, prepare=self.prepare)
        return Kernels(self.run, refusals=self.refusals, prepare=self.prepare)

    def probe(self, device_type: str) -> str | None:
        reason = compilers.missing_compiler(TARGETS[device_type])
        if reason and all(prebuilt.find(one, device_type) for one in self.builds.values()):
            reason = None
        return reason or self.failed.get(device_type)

    def prepare(self, device_type: str) -> None:
        for dtype in self.builds:
            self.load(dtype, device_type)

    @untraced
    def load(self, dtype: torch.dtype, device_type: str) -> bool:
        """Build and load an op unless it is loaded; return True, for torch.compile."""
        one = self.builds[dtype]
        label = self.name if len(self.builds) == 1 else f"{self.name} ({one.dtype})"
        with _lock:
            if (dtype, device_type) not in self.loaded:
                try:
                    load_op(one, device_type, label)
                except (BuildError, OSError) as error:
                    self.failed[device_type] = str(error)
                    raise UnavailableBackendError(self.name, str(error)) from error
                self.failed.pop(device_type, None)
                self.loaded.add((dtype, device_type))
        return True

    def run(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        """Run attention, or decode, whose k and v are the caches; build the op if necessary."""
        kv_heads = k.shape[2]
        if kv_heads == q.shape[2]:
            return self.call(q, k, v, *others)
        if self.version.role == "decode":
            seqlens, softmax_scale = others
            others = seqlens.repeat_interleave(kv_heads), softmax_scale
        o = self.call(*_by_key_head(q, k, v), *others)
        return o.view(-1, kv_heads, *o.shape[1:]).transpose(1, 2).reshape(q.shape)

    def call(self, q: Tensor, *others: Any) -> Tensor:
        if torch.compiler.is_compiling() or (q.dtype, q.device.type) not in self.loaded:
            self.load(q.dtype, q.device.type)
        try:
            return _registered(self.builds[q.dtype])(q, *others)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise fault(self.name, error) from error

    def refusals(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> list[str]:
        """Return the op's own reasons to refuse a call of attention."""
        if k.shape[2] != q.shape[2]:
            q, k, v = _by_key_head(q, k, v)
        if self.version.layout == "contiguous":
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        reasons: list[str] = []
        # A single row shows whether the kernel launches and the tensors begin aligned. The empty
        # slices run nothing, but check all sizes and strides except those of the empty dimension.
        for part in (slice(1), slice(1), slice(1)), (slice(0),), (slice(None), slice(0)):
            try:
                self.call(q[part], k[part], v[part], q.shape[3] ** -0.5, is_causal)
            except UnsupportedError as error:
                reasons += error.reasons
        return list(dict.fromkeys(reasons))


def fault(name: str, error: RuntimeError) -> Exception:
    """Return the error to raise for an error from binding.cpp: a refusal or a failed kernel."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    error.args = (_with_line(str(error)),)
    message = re.sub(r"^attention_kernels::\w+: ", "", str(error).splitlines()[0])
    if message.startswith("refuses: "):
        return UnsupportedError(name, message.removeprefix("refuses: ").split("; "))
    return KernelError(name, f"failed: {message}")


def load_op(
    version: VersionHeader, device_type: str, label: str, arch: str | None = None
) -> Callable[..., Any]:
    """Load a version, built if the wheel does not have it; return its op. Raises BuildError.

    arch: the architectures to build for, as build() takes them, instead of this machine's GPUs.

    The op of a version whose role is struct takes a tensor on the device to run on, and the
    kernel's parameters as a uint8 tensor on the CPU.
    """
    with _lock:
        library = prebuilt.find(version, device_type) if arch is None else None
        library = library or build.build(
            version, TARGETS[device_type], arch or _arch(device_type), label=label
        )
        define_op(version.op, SCHEMAS[version.role])
        _load_library(library, version, device_type)
    return _registered(version)


def c_struct(*fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """Return a C struct; fields: a type of ctypes and the names that have it, in order."""

    class Struct(ctypes.Structure):
        _fields_ = tuple((name, kind) for kind, names in fields for name in names.split())

    return Struct


def launch(op: Callable[..., Any], on: Tensor, kind: type[ctypes.Structure], **fields: Any) -> None:
    """Run the op of a version whose role is struct, on a tensor's device.

    kind: the struct of its parameters. fields: those to set, the others are 0; a tensor stands for
    its address.
    """
    plain = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in fields.items()}
    op(on, torch.frombuffer(kind(**plain), dtype=torch.uint8))


def _registered(version: VersionHeader) -> Callable[..., Any]:
    """Return the op of a version that is loaded."""
    return getattr(torch.ops.attention_kernels, version.op).default  # type: ignore[no-any-return]


_lock = threading.RLock()
_libraries: dict[tuple[str, str], Path] = {}  # keys: op, device type


def _load_library(library: Path, version: VersionHeader, device_type: str) -> None:
    if _libraries.setdefault((version.op, device_type), library) != library:
        raise BuildError(f"{version.path.name} has changed since this process loaded it")
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        text = str(error.__cause__ or error)  # torch's own message is only the path
        missing = re.search(r"undefined symbol: \S*\d(launch|scratch_floats|version)E", text)
        if missing:
            text = (
                f"{version.path.name} does not define {missing[1]}() as csrc/attention.h declares "
                "it: a version file includes common.cuh, and defines scratch_floats() and launch() "
                "in namespace attention::ATTENTION_VERSION, or names a function with --entry"
            )
        raise BuildError(text) from error


@functools.cache
def define_op(op: str, schema: str = SCHEMAS["attention"]) -> None:
    """Define an op's schema and fake kernel, which torch needs before any library is loaded."""
    name = f"attention_kernels::{op}"
    torch.library.define(name, schema, tags=(torch.Tag.needs_exact_strides,))
    torch.library.register_fake(name, lambda q, *_, **__: q.new_empty(q.shape))


def _with_line(message: str) -> str:
    """Replace the address in an emulator's message with the source line."""

    def line(found: re.Match[str]) -> str:
        place = compilers.source_line(found[2], found[1])
        return f"at {place}" if place else found[0]

    return re.sub(r"in code at \+(0x[0-9a-f]+) of (.+?\.so)", line, message)
