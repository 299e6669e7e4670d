"""What `gpt2-infer predict` predicts: a version file, a backend, or one kernel of any file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpt2_infer.cli.kernels import describe, shape_of, version_of
from gpt2_infer.cli.options import integer
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.binary import Reader, Request
    from attention_kernels.inspection.explain import Explanation
    from attention_kernels.inspection.gpus import GpuModel
    from attention_kernels.inspection.predict import Case, Prediction
    from attention_kernels.inspection.predictors import Predictor
    from attention_kernels.ladder.header import VersionHeader
    from gpt2_infer.bench.record import Row

KERNEL = "predict this kernel of the file: *.cu, Triton's *.py, a cubin or a library with cubins"
AXES = "{} of the kernel: X, X,Y or X,Y,Z"
SHARED = "dynamic shared memory per block of the kernel, in bytes (default: what it accesses)"
ARGUMENTS = "arguments of the kernel: f32[COUNT] for a buffer, ptr, a number, hex:BYTES or @FILE"
DTYPE = "dtype of a backend or version that takes several (default: its first)"
DTYPES = ("float32", "float16", "bfloat16", "float64")
# Options that have no meaning for a kernel with its own launch, and their defaults.
_OF_A_CALL = {"seqlen": [1024], "head_dim": None, "batch": 1, "heads": 12, "full": False}


def add_options(add: Callable[..., Any]) -> None:
    """Add the options that say what is predicted, besides name and shape."""
    add("--dtype", choices=DTYPES, help=DTYPE)
    add("--kernel", metavar="NAME", help=KERNEL)
    add("--grid", type=axes, metavar="X,Y,Z", help=AXES.format("blocks"))
    add("--block", type=axes, metavar="X,Y,Z", help=AXES.format("threads per block"))
    add("--shared", type=integer(0), metavar="BYTES", help=SHARED)
    add("--args", nargs="+", metavar="ARG", help=ARGUMENTS)


def axes(text: str) -> tuple[int, int, int]:
    """Return the three sizes in `X,Y,Z`; those left out are 1."""
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8}){0,2}", text):
        raise argparse.ArgumentTypeError(
            f"must be a size X, or X,Y or X,Y,Z, each 1 or more, not {text[:40]!r}"
        )
    x, y, z = [*map(int, text.split(",")), 1, 1][:3]
    return x, y, z


class Target(Protocol):
    """What is predicted."""

    def heading(self, gpu: GpuModel) -> str:
        """Return the file or backend, the GPU, and the shape of the call or launch."""

    def predict(self, gpu: GpuModel) -> list[Prediction]:
        """Return a prediction per length."""

    def explain(self, gpu: GpuModel) -> Iterator[Explanation]:
        """Yield an explained prediction per length."""

    def row(self, seqlen: int) -> Row | None:
        """Return the row of a prediction without samples, which finds its measurement."""


def target_of(arguments: argparse.Namespace) -> Target:
    """Return what the options of the command ask for.

    Raises RequestError for options that exclude each other, and UnsupportedError for a backend
    that cannot be predicted.
    """
    of_a_launch = {name: getattr(arguments, name) for name in ("grid", "block", "shared", "args")}
    if arguments.kernel is None:
        if given := [name for name, value in of_a_launch.items() if value is not None]:
            raise RequestError(f"--{given[0]} is of a launch: it needs --kernel")
        return _call_of(arguments)
    if missing := [name for name in ("grid", "block") if of_a_launch[name] is None]:
        raise RequestError(f"--kernel needs --{missing[0]}")
    for name, default in (*_OF_A_CALL.items(), ("dtype", None)):
        if getattr(arguments, name) != default:
            option = name.replace("_", "-")
            raise RequestError(f"--{option} is of an attention call: give it or --kernel")
    from attention_kernels.inspection.binary import Request

    return OfKernel(
        Request(
            Path(arguments.name),
            arguments.kernel,
            arguments.grid,
            arguments.block,
            arguments.shared,
            arguments.args or (),
        )
    )


def _call_of(arguments: argparse.Namespace) -> Target:
    import torch

    from attention_kernels import UnsupportedError, ladder
    from attention_kernels.inspection.predictors import predicts_without_version

    spec = ladder.resolve(arguments.name)
    if not predicts_without_version(spec):
        _, version = version_of(arguments.name)
        builds = {build.dtype: build for build in version.builds()}
        dtype = arguments.dtype or next(iter(builds))
        if dtype not in builds:
            reason = f"dtype {dtype} (it takes {', '.join(builds)})"
            raise UnsupportedError(version.path.name, [reason])
        shape = shape_of(arguments, version)
        return OfCalls(spec.name, builds[dtype], dtype, arguments.seqlen, shape)
    missing = spec.probe("cuda") if spec.probe and spec.family == "triton" else None
    reasons = [missing] if missing else []
    dtype, shape = arguments.dtype or "float32", shape_of(arguments, spec)
    reasons += spec.static_reasons(getattr(torch, dtype), shape["head_dim"], "cuda")
    if reasons:
        raise UnsupportedError(spec.name, reasons)
    return OfCalls(spec.name, None, dtype, arguments.seqlen, shape)


@dataclass(frozen=True)
class OfCalls:
    """Calls of a version file, of a Triton backend, or of PyTorch's memory-efficient attention."""

    name: str
    version: VersionHeader | None
    dtype: str
    seqlens: Sequence[int]
    shape: dict[str, Any]

    def heading(self, gpu: GpuModel) -> str:
        """Return the file or the backend, and the shape."""
        name, dtype = (self.version.path.name, "") if self.version else (self.name, self.dtype)
        return f"{name} on {gpu.name}: {describe(self.shape)} {dtype}".rstrip()

    def predict(self, gpu: GpuModel) -> list[Prediction]:
        """Return a prediction per length."""
        return self._predictor.predict(gpu, self._cases)

    def explain(self, gpu: GpuModel) -> Iterator[Explanation]:
        """Yield an explained prediction per length."""
        return (self._predictor.explain(gpu, case) for case in self._cases)

    def row(self, seqlen: int) -> Row:
        """Return the row of a prediction without samples."""
        from gpt2_infer.bench.environment import version_digest
        from gpt2_infer.bench.prediction import prediction_row
        from gpt2_infer.bench.record import KernelCell

        cell = KernelCell(seqlen, dtype=self.dtype, **self.shape)
        digest = version_digest(self.version.source) if self.version else None
        return prediction_row(self.name, cell, digest)

    @property
    def _predictor(self) -> Predictor:
        from attention_kernels.inspection.predictors import predictor_of

        return predictor_of(self.name, self.version, self.dtype)

    @property
    def _cases(self) -> list[Case]:
        from attention_kernels.inspection.predict import Case

        return [Case(seqlen=seqlen, **self.shape) for seqlen in self.seqlens]


@dataclass(frozen=True)
class OfKernel:
    """One launch of a kernel in any file."""

    request: Request

    @property
    def _reader(self) -> Reader:
        """The function that reads the file."""
        from attention_kernels import get_backend
        from attention_kernels.inspection import binary

        if self.request.path.suffix != ".py":
            return binary.read
        probe = get_backend("TRITON_FLASH_ATTENTION").probe
        if reason := probe and probe("cuda"):
            raise RequestError(f"{self.request.path.name}: {reason}")
        from attention_kernels.inspection import triton_kernel

        return triton_kernel.read

    def heading(self, gpu: GpuModel) -> str:
        """Return the file, the kernel and its launch."""
        grid, block = (
            "x".join(map(str, sizes)) for sizes in (self.request.grid, self.request.block)
        )
        of = f"{self.request.kernel} of {self.request.path.name}"
        return f"{of} on {gpu.name}: {grid} blocks of {block} threads"

    def predict(self, gpu: GpuModel) -> list[Prediction]:
        """Return one prediction."""
        from attention_kernels.inspection import binary

        return [binary.predict_kernel(self.request, gpu, self._reader)]

    def explain(self, gpu: GpuModel) -> Iterator[Explanation]:
        """Yield one explained prediction."""
        from attention_kernels.inspection import binary

        yield binary.explain_kernel(self.request, gpu, self._reader)

    def row(self, seqlen: int) -> None:
        """Return None: a launch is not in the results."""
