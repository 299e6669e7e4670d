"""The registry of attention backends: what exists, what can run here, what a call may ask of it.

A backend is one decorated loader in a module of `attention_kernels.backends`, or in another
distribution through the entry-point group `attention_kernels.backends`. Registering is free: no
kernel is compiled, no optional module is imported and no CUDA context is created until
`BackendSpec.load()`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from attention_kernels import contract
from attention_kernels.contract import Kernels
from attention_kernels.errors import (
    AttentionError,
    OutputError,
    UnavailableBackendError,
    UnknownBackendError,
    UnsupportedError,
)

ENTRY_POINT_GROUP = "attention_kernels.backends"
LISTED_FIRST = ("pytorch", "cuda")  # modules of attention_kernels.backends
PRECISIONS = ("ieee-fp32", "3xtf32", "tf32", "fp16", "bf16", "fp64")
# The class of each dtype where products and sums are the dtype's own, or float32's for 16 bits.
PLAIN_PRECISIONS = {
    "float32": "ieee-fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
}
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class BackendSpec:
    """One attention backend.

    name: upper case, as users type it. family: the ladder or library it belongs to. summary: one
    sentence.
    loader: builds or imports the kernels; called once, on first use.
    precisions: the precision class of each dtype it takes, by dtype name, e.g. {"float32":
    "ieee-fp32"}.
    head_dims: the head dimensions it takes; empty means any.
    device_types: "cuda", "cpu". min_compute_capability: of a CUDA device.
    modules: optional modules that loading needs. probe: a further check of this machine for a
    device type, returning the reason against it, cheap enough to be asked for every backend of a
    listing.
    emulated_on: device types where the kernel's own source runs emulated, so that no timing of it
    means anything.
    needs_contiguous: q, k and v go through the contiguity adapter first.
    cuda_graphs: whether a call may be captured in a CUDA graph.
    """

    name: str
    family: str
    summary: str
    loader: Callable[[], Kernels] = field(repr=False)
    precisions: Mapping[str, str]
    head_dims: tuple[int, ...] = ()
    device_types: tuple[str, ...] = ("cuda", "cpu")
    min_compute_capability: tuple[int, int] | None = None
    modules: tuple[str, ...] = ()
    probe: Callable[[str], str | None] | None = field(default=None, repr=False)
    emulated_on: tuple[str, ...] = ()
    needs_contiguous: bool = False
    cuda_graphs: bool = True
    _kernels: list[Kernels] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a backend's name is upper case letters, digits and '_', not {self.name!r}"
            )
        unknown = {*self.precisions.values()} - {*PRECISIONS}
        if unknown or not self.precisions:
            raise ValueError(
                f"{self.name}: precision must be one of {', '.join(PRECISIONS)}, not "
                f"{unknown or 'empty'}"
            )
        if not self.summary.endswith(".") or "\n" in self.summary:
            raise ValueError(f"{self.name}: the summary must be one sentence on one line")
        if not {*self.device_types} <= {"cuda", "cpu"} or not self.device_types:
            raise ValueError(
                f"{self.name}: device_types are 'cuda' and 'cpu', not {self.device_types}"
            )
        object.__setattr__(self, "precisions", MappingProxyType(dict(self.precisions)))

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names of the dtypes that it takes."""
        return tuple(self.precisions)

    def unavailable_reason(self, device_type: str | None = None) -> str | None:
        """Why it cannot run on this machine (on that device type, else on any); None where it can.

        Asks for modules, device, compute capability and the backend's own cheap probe: nothing is
        compiled.
        """
        missing = [name for name in self.modules if not _is_installed(name)]
        if missing:
            return f"needs the Python package{'s' * (len(missing) > 1)} {', '.join(missing)}"
        wanted = self.device_types if device_type is None else (device_type,)
        reasons = {name: self._device_reason(name) for name in wanted}
        if None in reasons.values():
            return None
        return "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason))

    def _device_reason(self, device_type: str) -> str | None:
        if device_type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)} only, not on {device_type}"
        if device_type == "cuda":
            # Asked through NVML where that can be, so that no context is made.
            if torch.cuda.device_count() == 0:
                return "needs a CUDA device, and there is none"
            if self.min_compute_capability is not None:
                capability = torch.cuda.get_device_capability()
                if capability < self.min_compute_capability:
                    need, have = (
                        ".".join(map(str, c)) for c in (self.min_compute_capability, capability)
                    )
                    return f"needs compute capability {need} or higher, and this device has {have}"
        return self.probe(device_type) if self.probe else None

    def unsupported_reasons(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True
    ) -> list[str]:
        """Every reason against this call, with the supported set in the text; empty for none."""
        reasons = self.static_reasons(q.dtype, q.shape[3], q.device.type)
        if not reasons:
            explain = self.load().explain
            reasons = explain(q, k, v, is_causal) if explain else []
        return reasons

    def static_reasons(self, dtype: torch.dtype, head_dim: int, device_type: str) -> list[str]:
        """The part of unsupported_reasons() that can be told before there are tensors."""
        reasons = []
        name = contract.dtype_name(dtype)
        if name not in self.precisions:
            reasons.append(f"dtype {name} (it takes {', '.join(self.dtypes)})")
        if self.head_dims and head_dim not in self.head_dims:
            reasons.append(f"head_dim {head_dim} (it takes {', '.join(map(str, self.head_dims))})")
        if device_type not in self.device_types:
            reasons.append(f"device {device_type} (it takes {', '.join(self.device_types)})")
        return reasons

    def load(self) -> Kernels:
        """The kernels, compiled or imported on first use; raises UnavailableBackendError."""
        if torch.compiler.is_compiling() or not self._kernels:
            self._load()
        return self._kernels[0]

    def _load(self) -> bool:
        with _lock:
            if not self._kernels:
                reason = self.unavailable_reason()
                if reason:
                    raise UnavailableBackendError(self.name, reason)
                try:
                    self._kernels.append(self.loader())
                except AttentionError:
                    raise
                except Exception as error:
                    raise UnavailableBackendError(
                        self.name, f"{type(error).__name__}: {error}"
                    ) from error
        return True

    # torch.compile runs it as it is and traces none of it. This is what assume_constant_result()
    # does after its import of torch._dynamo, which takes a second.
    _load._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Attention over (batch, seqlen, num_heads, head_dim); see attention_kernels.contract.

        Raises ArgumentError, UnsupportedError (all reasons) or UnavailableBackendError.
        """
        scale = contract.check_attention(q, k, v, softmax_scale)
        reasons = self.static_reasons(q.dtype, q.shape[3], q.device.type)
        if reasons:
            raise UnsupportedError(self.name, reasons)
        if self.needs_contiguous:
            q, k, v = contract.contiguous(q), contract.contiguous(k), contract.contiguous(v)
        kernels = self._forward_only(self.load(), q, k, v)
        return self._checked(kernels.attention(q, k, v, scale, is_causal), q)

    def has_decode(self, device_type: str) -> bool:
        """Whether it has a decode kernel for that device type (loads the backend)."""
        kernels = self.load()
        return kernels.decode is not None and device_type in kernels.decode_device_types

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seqlens: Tensor,
        *,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """One token per row against a cache; see attention_kernels.contract.

        Raises UnsupportedError where the backend has no decode kernel: nothing falls back in
        silence.
        """
        scale = contract.check_decode(q, k_cache, v_cache, seqlens, softmax_scale)
        reasons = self.static_reasons(q.dtype, q.shape[3], q.device.type)
        kernel = None if reasons else self._forward_only(self.load(), q, k_cache, v_cache).decode
        if kernel is None or not self.has_decode(q.device.type):
            raise UnsupportedError(
                self.name, reasons or [f"it has no decode kernel on {q.device.type}"]
            )
        return self._checked(kernel(q, k_cache, v_cache, seqlens, scale), q)

    def _forward_only(self, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor) -> Kernels:
        """The kernels; UnsupportedError where autograd expects a gradient that they have not."""
        wanted = q.requires_grad or k.requires_grad or v.requires_grad
        if wanted and torch.is_grad_enabled() and not kernels.backward:
            reason = "a gradient (it has no backward pass: call it under torch.no_grad())"
            raise UnsupportedError(self.name, [reason])
        return kernels

    def _checked(self, o: Tensor, q: Tensor) -> Tensor:
        """The kernel's output, which must look like q: a wrong layout would pass for wrong text."""
        if o.shape != q.shape or o.dtype != q.dtype:
            raise OutputError(
                self.name, f"{tuple(o.shape)} {o.dtype}", f"{tuple(q.shape)} {q.dtype}"
            )
        return o


_specs: dict[str, BackendSpec] = {}
_lock = threading.RLock()


def register(
    *,
    name: str,
    family: str,
    summary: str,
    precisions: Mapping[str, str],
    head_dims: tuple[int, ...] = (),
    device_types: tuple[str, ...] = ("cuda", "cpu"),
    min_compute_capability: tuple[int, int] | None = None,
    modules: tuple[str, ...] = (),
    probe: Callable[[str], str | None] | None = None,
    emulated_on: tuple[str, ...] = (),
    needs_contiguous: bool = False,
    cuda_graphs: bool = True,
) -> Callable[[Callable[[], Kernels]], Callable[[], Kernels]]:
    """Register the decorated loader as a backend; the arguments are the fields of BackendSpec.

    Raises ValueError for a name that is taken or a field that is off.
    """

    def decorate(loader: Callable[[], Kernels]) -> Callable[[], Kernels]:
        spec = BackendSpec(
            name=name,
            family=family,
            summary=summary,
            loader=loader,
            precisions=precisions,
            head_dims=head_dims,
            device_types=device_types,
            min_compute_capability=min_compute_capability,
            modules=modules,
            probe=probe,
            emulated_on=emulated_on,
            needs_contiguous=needs_contiguous,
            cuda_graphs=cuda_graphs,
        )
        with _lock:
            if name in _specs:
                raise ValueError(f"an attention backend named {name} is registered already")
            _specs[name] = spec
        return loader

    return decorate


def register_broken(
    name: str, family: str, summary: str, device_types: tuple[str, ...], reason: str
) -> None:
    """Register a backend that is unavailable for that reason and breaks no other."""

    @register(
        name=name,
        family=family,
        summary=summary,
        precisions={"float32": PLAIN_PRECISIONS["float32"]},
        device_types=device_types,
        probe=lambda _: reason,
    )
    def load() -> Kernels:
        raise RuntimeError(reason)


def list_backends() -> list[BackendSpec]:
    """Every registered backend, in the order of registration."""
    _discover()
    return list(_specs.values())


def get_backend(name: str) -> BackendSpec:
    """The backend of that name; lower case and '-' for '_' are accepted.

    Raises UnknownBackendError with the nearest names.
    """
    _discover()
    key = name.strip().upper().replace("-", "_")
    try:
        return _specs[key]
    except KeyError:
        raise UnknownBackendError(name, _nearest(key), _specs) from None


def _nearest(key: str) -> list[str]:
    """Up to three names like `key`: first as a whole, then by one of their words."""
    whole = difflib.get_close_matches(key, _specs, n=3, cutoff=0.6)
    words = [
        name
        for name in _specs
        if (key and key in name) or difflib.get_close_matches(key, name.split("_"), n=1, cutoff=0.7)
    ]
    return (whole or words)[:3]


def default_backend(device_type: str) -> BackendSpec:
    """What runs where no backend is named.

    Memory-efficient SDPA on CUDA, torch's own flash kernel on the CPU.
    """
    return get_backend(
        "PYTORCH_SDPA_EFFICIENT_ATTENTION"
        if device_type == "cuda"
        else "PYTORCH_SDPA_FLASH_ATTENTION"
    )


def default_decode_backend(device_type: str) -> BackendSpec:
    """What decodes where no backend is named, or the one named has no decode kernel.

    On CUDA plain matrix-vector products: for one query per row, the fused kernels put each head on
    one multiprocessor and leave the rest idle. On the CPU torch's own flash kernel.
    """
    return get_backend("NAIVE_PYTORCH" if device_type == "cuda" else "PYTORCH_SDPA_FLASH_ATTENTION")


_discovered: bool | None = False  # None while it is under way


def _discover() -> None:
    """Import every module of attention_kernels.backends, then every plug-in, once."""
    global _discovered  # noqa: PLW0603 (a functools.cache stops torch.compile)
    if _discovered:
        return
    with _lock:
        if _discovered is not False:  # another thread was first, or a plug-in asks while it loads
            return
        _discovered = None
        try:
            package = importlib.import_module("attention_kernels.backends")
            for module in sorted(
                pkgutil.iter_modules(package.__path__),
                key=lambda m: [m.name != first for first in LISTED_FIRST],
            ):
                importlib.import_module(f"{package.__name__}.{module.name}")
        except BaseException:
            _discovered = False  # the next call must not go on with half a registry
            raise
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                entry_point.load()
            except Exception as error:  # a broken plug-in is listed and breaks no other
                register_broken(
                    _plugin_name(entry_point.name),
                    "plug-in",
                    "A plug-in that could not be loaded.",
                    ("cpu",),  # one device, so that the reason is told once
                    f"its plug-in failed to load: {type(error).__name__}: {error}",
                )
        _discovered = True


def _plugin_name(entry_point: str) -> str:
    name = re.sub(r"[^A-Z0-9]+", "_", entry_point.upper()).strip("_") or "PLUGIN"
    name = name if name[0].isalpha() else f"PLUGIN_{name}"
    return f"{name}_PLUGIN" if name in _specs else name


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package that is missing or half-installed
        return False
