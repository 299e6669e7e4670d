"""What `gpt2-infer predict` predicts: a version file, or one kernel of any file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpt2_infer.cli.kernels import describe, shape_of, version_of
from gpt2_infer.cli.options import integer
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.sass.gpus import GpuModel
    from attention_kernels.inspection.sass.timing import Prediction
    from gpt2_infer.bench.record import Row

KERNEL = "predict this kernel of the file: *.cu, a cubin or a library with cubins"
AXES = "{} of the kernel: X, X,Y or X,Y,Z"
SHARED = "dynamic shared memory per block of the kernel, in bytes (default: what it accesses)"
ARGUMENTS = "arguments of the kernel: f32[COUNT] for a buffer, ptr, a number, hex:BYTES or @FILE"
DTYPE = "dtype of a version that takes several (default: its first)"
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


class Target(NamedTuple):
    """What is predicted."""

    heading: str
    """The file, the GPU, and the shape of the call or launch."""
    predict: Callable[[], list[Prediction]]
    """Returns a prediction per length."""
    row: Callable[[int], Row] | None
    """Returns the row of a prediction without samples, which finds its measurement."""


def target_of(arguments: argparse.Namespace, gpu: GpuModel) -> Target:
    """Return what the options of the command ask for.

    Raises RequestError for options that exclude each other, and UnsupportedError for a backend
    that cannot be predicted.
    """
    of_a_launch = {name: getattr(arguments, name) for name in ("grid", "block", "shared", "args")}
    if arguments.kernel is None:
        if given := [name for name, value in of_a_launch.items() if value is not None]:
            raise RequestError(f"--{given[0]} is of a launch: it needs --kernel")
        return _calls(arguments, gpu)
    if missing := [name for name in ("grid", "block") if of_a_launch[name] is None]:
        raise RequestError(f"--kernel needs --{missing[0]}")
    for name, default in (*_OF_A_CALL.items(), ("dtype", None)):
        if getattr(arguments, name) != default:
            option = name.replace("_", "-")
            raise RequestError(f"--{option} is of an attention call: give it or --kernel")
    from attention_kernels.inspection.sass import predict
    from attention_kernels.inspection.sass.binary import Request

    path, grid, block = Path(arguments.name), arguments.grid, arguments.block
    request = Request(path, arguments.kernel, grid, block, arguments.shared, arguments.args or ())
    blocks, threads = ("x".join(map(str, sizes)) for sizes in (grid, block))
    return Target(
        f"{arguments.kernel} of {path.name} on {gpu.name}: {blocks} blocks of {threads} threads",
        lambda: [predict.predict_kernel(request, gpu, lines=arguments.lines)],
        None,
    )


def _calls(arguments: argparse.Namespace, gpu: GpuModel) -> Target:
    """Return the calls of a version file."""
    from attention_kernels import UnsupportedError
    from attention_kernels.inspection.sass import predict
    from gpt2_infer.bench.environment import version_digest
    from gpt2_infer.bench.prediction import prediction_row
    from gpt2_infer.bench.record import KernelCell

    backend, version = version_of(arguments.name)
    builds = {build.dtype: build for build in version.builds()}
    dtype = arguments.dtype or next(iter(builds))
    if dtype not in builds:
        reason = f"dtype {dtype} (it takes {', '.join(builds)})"
        raise UnsupportedError(version.path.name, [reason])
    shape = shape_of(arguments, version)
    cases = [predict.Case(seqlen=seqlen, **shape) for seqlen in arguments.seqlen]
    return Target(
        f"{version.path.name} on {gpu.name}: {describe(shape)}",
        lambda: predict.predict(builds[dtype], gpu, cases, lines=arguments.lines),
        lambda seqlen: prediction_row(
            backend, KernelCell(seqlen, dtype=dtype, **shape), version_digest(version.source)
        ),
    )
