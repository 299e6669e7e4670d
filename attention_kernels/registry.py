"""The registry of attention backends: which exist, which can run here and what each supports.

A backend is one decorated loader in a module of `attention_kernels.backends`, or in another
distribution through the entry-point group `attention_kernels.backends`. Registering is free: no
kernel is compiled, no optional module is imported and no CUDA context is created before
`BackendSpec.load()`.

Environment: ATTENTION_KERNELS_PLUGINS=off ignores the backends of other distributions.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from attention_kernels import contract, errors
from attention_kernels.contract import Kernels
from attention_kernels.precision import MOST_ERROR_SLACK, PLAIN_PRECISIONS, PRECISIONS

if TYPE_CHECKING:
    from attention_kernels.ladder.header import VersionHeader

DECODES_ONLY, NO_DECODE = "it has a decode kernel only", "it has no decode kernel"

Loader = Callable[[], Kernels]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Make torch.compile call a function, which must return a constant, instead of tracing it.

    torch.compiler.assume_constant_result() does the same, but first imports torch._dynamo, which
    takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, eq=False, kw_only=True)
class Description:
    """What a backend says of itself, which can be sent to another process."""

    name: str
    """The name that users type; upper case for a registered backend."""
    family: str
    """The ladder or library that the backend belongs to."""
    summary: str
    """A description in one sentence."""
    precisions: Mapping[str, str]
    """The precision class of each dtype it takes, e.g. {"float32": "ieee-fp32"}."""
    head_dims: tuple[int, ...] = ()
    """The head dimensions it takes; empty means any."""
    device_types: tuple[str, ...] = ("cuda", "cpu")
    min_compute_capability: tuple[int, int] | None = None
    """The lowest compute capability of a CUDA device that it runs on."""
    emulated_on: tuple[str, ...] = ()
    """Device types where its source runs in an emulator, so that timings mean nothing.

    The judge believes it of this package's own kernels only; see BackendSpec.is_emulated().
    """
    compiles_per_shape_on: tuple[str, ...] = ()
    """Device types where each shape is compiled or tuned; there the suite tries only a few."""
    needs_contiguous: bool = False
    """Whether q, k and v are made contiguous first."""
    supports_gqa: bool = False
    """Whether k and v may have fewer heads than q, in attention and in decoding."""
    cuda_graphs: bool = True
    """Whether a call can be captured in a CUDA graph."""
    plugin: str = ""
    """The entry point of the plug-in that registers it: a module; set by the registry."""
    error_slack: float = 1.0
    """The multiple of its precision class's error budget allowed; see judge.truth."""

    def __post_init__(self) -> None:
        classes, slack = self.precisions, self.error_slack
        most = 1.0 if "tf32" in classes.values() else MOST_ERROR_SLACK  # tf32 is the coarsest class
        if not classes or any(name not in PRECISIONS.get(x, ()) for x, name in classes.items()):
            known = "; ".join(f"{', '.join(names)} for {x}" for x, names in PRECISIONS.items())
            wrong = f"precisions must be {known}, not {dict(classes)}"
        elif not all(1 <= head_dim <= 1024 for head_dim in self.head_dims):
            wrong = f"head_dims must be between 1 and 1024, not {self.head_dims}"
        elif not self.device_types or not {*self.device_types} <= {"cuda", "cpu"}:
            wrong = f"device_types must be among cuda and cpu, not {self.device_types}"
        elif not 1 <= slack <= most:
            wrong = f"error_slack must be between 1 and {most:g}, not {slack}"
        else:
            return
        raise ValueError(f"{self.name}: {wrong}")


@dataclass(frozen=True, eq=False, kw_only=True)
class BackendSpec(Description):
    """One attention backend: what it takes, where it runs, and how it is loaded."""

    loader: Loader = field(repr=False)
    """The function that builds or imports the kernels; called once, on first use."""
    probe: Callable[[str], str | None] | None = field(default=None, repr=False)
    """A function that returns why it cannot run on a device type here, or None if it can.

    Called for every listing, so it must be cheap.
    """
    version: VersionHeader | None = field(default=None, repr=False)
    """The header of its version file, if it has one."""
    chooses: Callable[[torch.dtype, int, torch.device, int | None], BackendSpec] | None = field(
        default=None, repr=False
    )
    """For an alias: the function that picks a backend for a dtype, head_dim, device and seqlen."""
    _kernels: list[Kernels] = field(default_factory=list, init=False, repr=False)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The names of the dtypes that it takes."""
        return tuple(self.precisions)

    @property
    def is_ours(self) -> bool:
        """Whether this package builds it: from a version file, or as one of its own backends."""
        module = str(getattr(self.loader, "func", self.loader).__module__)  # also of a partial
        return self.version is not None or module.startswith("attention_kernels.backends.")

    def is_emulated(self, device_type: str) -> bool:
        """Return whether its source runs in an emulator; the word of a plug-in does not count."""
        return device_type in self.emulated_on and self.is_ours

    def unavailable_reason(self, device: torch.device | str) -> str | None:
        """Return why it cannot run on a device, or None if it can, without compiling anything.

        "cuda" is the current CUDA device.
        """
        device = torch.device(device)
        if device.type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)} only, not on {device.type}"
        # torch asks NVML if it can, which creates no context.
        if device.type == "cuda" and torch.cuda.device_count() == 0:
            return "needs a CUDA device, but none was found"
        if reason := self.lacking(device):
            return reason
        try:
            return self.probe(device.type) if self.probe else None
        except (Exception, SystemExit) as error:  # a listing must still show the other backends
            return f"its probe raised {errors.describe(error)}"

    def lacking(self, device: torch.device) -> str | None:
        """Return which compute capability it needs, if it is not that of a CUDA device."""
        least = self.min_compute_capability
        if device.type != "cuda" or least is None:
            return None
        found = torch.cuda.get_device_capability(device)
        is_exact = self.version is not None and self.version.needs_exactly
        if found == least or (found > least and not is_exact):
            return None
        needs = f"{least[0]}.{least[1]} {'and no other' if is_exact else 'or higher'}"
        return f"needs compute capability {needs}, and this device has {found[0]}.{found[1]}"

    def refusals(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, decode: bool = False
    ) -> list[str]:
        """Return every reason to refuse this call, with the supported values; loads the backend.

        decode: k and v are caches; the kernel itself may still refuse them.
        """
        if reasons := self._refusals(q, k):
            return reasons
        device_type, kernels = q.device.type, self.load()
        if decode:
            return [] if self.has_decode(device_type) else [f"{NO_DECODE} on {device_type}"]
        if kernels.attention is None:
            return [DECODES_ONLY]
        return kernels.refusals(q, k, v, is_causal) if kernels.refusals else []

    def _refusals(self, q: Tensor, k: Tensor) -> list[str]:
        """Return those refusals() that do not need loading."""
        reasons = self.static_refusals(q.dtype, q.shape[3], q.device.type)
        if k.shape[2] != q.shape[2] and not self.supports_gqa:
            heads = f"{k.shape[2]} key heads for {q.shape[2]} query heads"
            reasons.append(f"{heads} (it takes as many of both)")
        return reasons

    def static_refusals(self, dtype: torch.dtype, head_dim: int, device_type: str) -> list[str]:
        """Return those refusals() that need neither tensors nor loading."""
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
        """Return the kernels, compiled or imported on first use; raises UnavailableBackendError."""
        if torch.compiler.is_compiling() or not self._kernels:
            self._load()
        return self._kernels[0]

    def prepare(self, device_type: str) -> None:
        """Load the backend and build its kernels for a device type, ahead of the first call.

        Raises UnavailableBackendError; if a build fails, with the compiler's first error.
        """
        if prepare := self.load().prepare:
            prepare(device_type)

    @untraced
    def _load(self) -> bool:
        with _lock:
            if not self._kernels:
                reasons = dict.fromkeys(map(self.unavailable_reason, self.device_types))
                if None not in reasons:
                    raise errors.UnavailableBackendError(self.name, "; ".join(map(str, reasons)))
                try:
                    kernels = cast("object", self.loader())
                except errors.AttentionError:
                    raise
                except (Exception, SystemExit) as error:
                    reason = f"its loader raised {errors.describe(error)}"
                    raise errors.UnavailableBackendError(self.name, reason) from error
                if not isinstance(kernels, Kernels):
                    reason = f"its loader returned {type(kernels).__name__} instead of Kernels"
                    raise errors.UnavailableBackendError(self.name, reason)
                self._kernels.append(kernels)
        return True

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Compute attention over (batch, seqlen, num_heads, head_dim); see contract.

        Raises ArgumentError, UnsupportedError (with all reasons), UnavailableBackendError,
        KernelError or OutputError.
        """
        scale = contract.check_attention(q, k, v, softmax_scale, is_causal)
        if reasons := self._refusals(q, k):
            raise errors.UnsupportedError(self.name, reasons)
        if self.needs_contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        kernel = self.load().attention
        if kernel is None:
            raise errors.UnsupportedError(self.name, [DECODES_ONLY])
        return self._run(kernel, q, k, v, scale, is_causal)

    def chosen(
        self,
        dtype: torch.dtype,
        head_dim: int,
        device: torch.device | str,
        seqlen: int | None = None,
    ) -> BackendSpec:
        """Return self or, for an alias, the backend that it picks for such calls.

        seqlen: the longest; None if unknown. Raises UnsupportedError or UnavailableBackendError if
        an alias finds no backend.
        """
        if self.chooses is None:
            return self
        device = torch.device(device)
        if reasons := self.static_refusals(dtype, head_dim, device.type):
            raise errors.UnsupportedError(self.name, reasons)
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        return self.chooses(dtype, head_dim, device, seqlen)

    def has_attention(self) -> bool:
        """Return whether it has an attention kernel (loads the backend)."""
        return self.load().attention is not None

    def has_decode(self, device_type: str) -> bool:
        """Return whether it has a decode kernel for that device type (loads the backend)."""
        if device_type not in self.device_types:
            return False
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
        """Compute attention of one new token per row against a cache; see contract.

        Raises the errors of attention(), and UnsupportedError if it has no decode kernel.
        """
        scale = contract.check_decode(q, k_cache, v_cache, seqlens, softmax_scale)
        if reasons := self.refusals(q, k_cache, v_cache, decode=True):
            raise errors.UnsupportedError(self.name, reasons)
        kernel = self.load().decode
        assert kernel is not None
        return self._run(kernel, q, k_cache, v_cache, seqlens, scale)

    def _run(self, kernel: Callable[..., object], *arguments: Any) -> Tensor:
        """Call a kernel, whose first argument is q, and check its output against the contract."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        wants_gradient = torch.is_grad_enabled() and True in [x.requires_grad for x in tensors]
        if wants_gradient and not self.load().backward:
            reason = "a gradient (it has no backward pass: call it under torch.no_grad())"
            raise errors.UnsupportedError(self.name, [reason])
        try:
            o = kernel(*arguments)
        except (errors.AttentionError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise errors.KernelError(self.name, f"raised {errors.describe(error)}") from error
        q = tensors[0]
        # A subclass could compute its numbers when somebody looks at them.
        if type(o) is not Tensor and not (torch.compiler.is_compiling() and isinstance(o, Tensor)):
            raise errors.OutputError(self.name, type(o).__name__, _kind(q))
        if o.shape != q.shape or o.dtype != q.dtype or o.device != q.device:
            raise errors.OutputError(self.name, _kind(o), _kind(q))
        if not o.is_contiguous():
            raise errors.OutputError(self.name, f"strides {o.stride()}", "a contiguous tensor")
        # A traced tensor has no address.
        if not torch.compiler.is_compiling() and o.data_ptr() in [x.data_ptr() for x in tensors]:
            raise errors.OutputError(self.name, "the memory of an input", "a new tensor")
        return o


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


_specs: dict[str, BackendSpec] = {}
_lock = threading.RLock()


def register(**fields: Any) -> Callable[[Loader], Loader]:
    """Register the decorated loader as a backend; `fields` are those of BackendSpec.

    Raises ValueError for a name that is taken or an invalid field, TypeError for an unknown field.
    """

    def decorate(loader: Loader) -> Loader:
        add(BackendSpec(loader=loader, **fields))
        return loader

    return decorate


def add(spec: BackendSpec) -> None:
    """Register a backend; raises ValueError if its name is taken or malformed."""
    if not re.fullmatch("[A-Z][A-Z0-9_]*", spec.name):
        raise ValueError(
            f"a backend's name must be upper case letters, digits and '_', not {spec.name!r}"
        )
    # Takes no lock: discovery holds one while it waits for a plug-in that another thread imports.
    if _specs.setdefault(spec.name, spec) is not spec:
        raise ValueError(f"an attention backend named {spec.name} is already registered")


def unavailable(
    name: str, family: str, reason: str, device_types: tuple[str, ...] = ("cpu",)
) -> BackendSpec:
    """Return a stand-in for a backend that is unavailable for the given reason.

    It is on one device type by default, so that listings give the reason once.
    """
    return BackendSpec(
        name=name,
        family=family,
        summary="It could not be loaded.",
        loader=Kernels,
        precisions={"float32": PLAIN_PRECISIONS["float32"]},
        device_types=device_types,
        probe=lambda _: reason,
    )


def list_backends() -> list[BackendSpec]:
    """Return every registered backend, in order of registration."""
    discover()
    return list(_specs.values())


def get_backend(name: str) -> BackendSpec:
    """Return the backend of that name; lower case and '-' for '_' are accepted.

    Raises UnknownBackendError, which suggests similar names.
    """
    discover()
    if spec := _specs.get(key := _key(name)):
        return spec
    # To compare a very long name would take seconds.
    similar = difflib.get_close_matches(key[:100], [*_specs])
    raise errors.UnknownBackendError(name, similar or [x for x in _specs if key and key in x][:3])


def registered(name: str) -> BackendSpec | None:
    """Return the backend of that name, like get_backend(), but import no plug-in to find it."""
    shipped()
    return _specs.get(_key(name))


def shipped() -> list[BackendSpec]:
    """Return the backends that are registered without importing any plug-in."""
    importlib.import_module("attention_kernels.backends")
    return [*_specs.values()]


def stand_in(name: str) -> BackendSpec:
    """Return the backend of that name or, if no module in this process has it, a stand-in."""
    return registered(name) or unavailable(_key(name), "", "")


def _key(name: str) -> str:
    if not isinstance(name, str):
        raise errors.UnknownBackendError(name, [])
    return name.strip().upper().replace("-", "_")


def device_for(spec: BackendSpec, wanted: str | None = None) -> str:
    """Return the wanted device or, without one, "cuda" if a backend runs there, else "cpu"."""
    return wanted or ("cpu" if spec.unavailable_reason("cuda") else "cuda")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Compute softmax(softmax_scale * q k^T + mask) v with the named or the default backend.

    q, k, v: (batch, seqlen, num_heads, head_dim), last stride 1; returns the same shape,
    contiguous. Raises UnknownBackendError and everything that BackendSpec.attention() raises.
    """
    contract.check_tensors({"q": q})
    if backend is not None:
        spec = get_backend(backend)
    else:
        spec = default_backend(q.device, q.dtype, q.shape[3] if q.dim() == 4 else 0)
    return spec.attention(q, k, v, softmax_scale=softmax_scale, is_causal=is_causal)


def default_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> BackendSpec:
    """Return the backend to use if none is named.

    On CUDA it is CUSTOM_CUDA, if it is available and takes the dtype and head_dim; otherwise
    memory-efficient SDPA. On the CPU it is torch's own flash kernel.
    """
    other = "PYTORCH_SDPA_EFFICIENT_ATTENTION"
    return get_backend(_first_or("CUSTOM_CUDA", other, device, dtype, head_dim))


MANY_HEADS = 1024
"""The number of rows times heads from which on one warp per head reads a cache fastest."""


def default_decode_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, heads: int = 1
) -> BackendSpec:
    """Return the backend to decode with if none is named or the one named cannot decode.

    heads: rows times heads. On CUDA it is DECODE_SPLIT_KV_VERSION_1, which splits the keys of a
    head over blocks, or from MANY_HEADS on version 3, with one warp per head, if it is available
    and the kernel takes the dtype and head_dim; otherwise plain matrix-vector products. On the CPU
    it is torch's own flash kernel.
    """
    ours = f"DECODE_SPLIT_KV_VERSION_{3 if heads >= MANY_HEADS else 1}"
    return get_backend(_first_or(ours, "NAIVE_PYTORCH", device, dtype, head_dim))


@untraced
def _first_or(
    first: str, other: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str:
    """Return the first name if that backend serves on a CUDA device, otherwise the other.

    On the CPU it is that of torch's own flash kernel.
    """
    if device.type != "cuda":
        return "PYTORCH_SDPA_FLASH_ATTENTION"
    return first if _serves(first, device, dtype, head_dim) else other


@functools.cache  # called for every layer and token
def _serves(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    spec = get_backend(name)
    return not (spec.static_refusals(dtype, head_dim, "cuda") or spec.unavailable_reason(device))


_discovered: bool | None = False  # None during discovery
_adopted: list[str] = []


def discover(only: str | None = None) -> None:
    """Import attention_kernels.backends and, once, plug-ins, or one module ("": none)."""
    global _discovered  # noqa: PLW0603 (functools.cache would stop torch.compile)
    if _discovered:
        return
    with _lock:
        if _discovered is not False:  # already done, or called by a plug-in that is loading
            return
        _discovered = None
        try:
            importlib.import_module("attention_kernels.backends")
            for entry_point in plugins():
                if only in (None, entry_point.value):
                    _load_plugin(entry_point)
        except BaseException:
            _discovered = False  # the next call must not use an incomplete registry
            raise
        _discovered = True


def adopt(describe: Callable[[], Iterable[BackendSpec]]) -> None:
    """Register the backends of plug-ins, unless this process has imported or adopted them.

    Nothing but import_adopted() imports them here afterwards. describe: returns them.
    """
    if _discovered is False:
        specs = describe()
        discover("")
        for spec in specs:
            if _specs.setdefault(spec.name, spec) is spec:
                _adopted.append(spec.name)


def import_adopted() -> None:
    """Import the plug-ins whose backends were adopted: nothing is judged here any more."""
    global _discovered  # noqa: PLW0603 (see discover())
    while _adopted:
        _specs.pop(_adopted.pop(), None)
        _discovered = False
    discover()


def plugins() -> importlib.metadata.EntryPoints | tuple[()]:
    """Return the entry points of plug-ins; raises AttentionError for a bad setting."""
    setting = os.environ.get("ATTENTION_KERNELS_PLUGINS", "on")
    if setting not in ("on", "off"):
        raise errors.AttentionError(f"ATTENTION_KERNELS_PLUGINS must be on or off, not {setting!r}")
    group = "attention_kernels.backends"
    return importlib.metadata.entry_points(group=group) if setting == "on" else ()


def _load_plugin(entry_point: importlib.metadata.EntryPoint) -> None:
    """Import a plug-in, which registers its backends; if that fails, add an unavailable backend."""
    before = {*_specs}
    try:
        entry_point.load()
    except (Exception, SystemExit) as error:  # the other backends must still work
        name = f"PLUGIN_{re.sub('[^A-Z0-9]', '_', entry_point.name.upper())}"
        _specs[name] = unavailable(
            name, "plug-in", f"its plug-in failed to load: {errors.describe(error)}"
        )
    for name in {*_specs} - before:
        object.__setattr__(_specs[name], "plugin", entry_point.value)
