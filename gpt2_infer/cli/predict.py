"""The command `gpt2-infer predict`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter

from gpt2_infer.cli.options import BACKEND, Count, Counts, KernelDtype, Names, Size, matching
from gpt2_infer.cli.versions import adapted, build_of, call_shape, describe, version_of
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.sass.explain import StalledLine
    from attention_kernels.inspection.sass.predict import Prediction

SHOWN_PARTS = 3  # --json has all
SHOWN_LINES = 10
STALL_COLUMNS = {
    "line": "left", "stalls": "right", "main reason": "left", "second reason": "left",
    "waits for": "right", "source": "left",
}  # fmt: skip

AXES = matching(
    r"[1-9]\d{0,8}(,[1-9]\d{0,8}){0,2}",
    "a size X, or X,Y or X,Y,Z, each 1 or more",
    lambda text: tuple([*map(int, text.split(",")), 1, 1][:3]),
    n_tokens=1,
)
Axes: TypeAlias = Annotated[tuple[Count, Count, Count], AXES]


@dataclass(frozen=True)
class Launch:
    """A launch of one kernel in a file.

    Attributes:
        kernel: predict this kernel of the file, *.cu, *.ptx, cubin or library: a part of its name
        grid: blocks of the kernel: X, X,Y or X,Y,Z
        block: threads per block of the kernel: X, X,Y or X,Y,Z
        shared: dynamic shared memory per block of the kernel, in bytes
        cluster: blocks per cluster of the kernel: X, X,Y or X,Y,Z
        args: arguments: f32[COUNT] or ptr for a buffer, f16[SIZES/BOX] for TMA, a number, @FILE
    """

    kernel: str
    grid: Axes
    block: Axes
    shared: Size = 0
    cluster: Axes = (1, 1, 1)
    args: Annotated[Names, Parameter(allow_leading_hyphen=True)] = ()


@dataclass(frozen=True)
class Predicted:
    """A prediction, and what it is for."""

    heading: str
    """The file, the GPU, and the shape of the call or launch."""
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        """Return every field of the prediction, and what limits the time."""
        fields = asdict(self.prediction)
        stalls = fields.pop("stalls")
        return fields | (stalls or {}) | {"bound": self.prediction.bound}


def predict(
    name: Annotated[str, BACKEND],
    /,
    *,
    entry: str | None = None,
    gpu: str = "h200",
    seqlens: Annotated[Counts, Parameter(name="--seqlen")] = (1024,),
    head_dim: Count | None = None,
    batch: Count = 1,
    heads: Count = 12,
    full: bool = False,
    dtype: KernelDtype | None = None,
    launch: Annotated[Launch | None, Parameter(name="*", group="Any kernel")] = None,
    lines: bool = False,
) -> list[Predicted]:
    """Predict a kernel's time on a GPU in microseconds, and what limits it, without that GPU.

    A model of machine code and memory accesses: rarely off by more than 35 %, but no measurement;
    `assumed` says what it did not know. A `launch` of any kernel replaces the shape. Needs nvcc for
    *.cu. Raises RequestError, UnsupportedError and BuildError.

    Args:
        name: backend name or version file, *.cu
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        gpu: GPU: h200, h100, a100, t4 or rtx4090
        seqlens: sequence lengths in tokens
        head_dim: head dimension (default: 64, or the first supported)
        batch: batch size
        heads: number of heads
        full: omit the causal mask
        dtype: dtype of a version that takes several (default: its first)
        launch: a launch of one kernel of a file, instead of an attention call
        lines: show which source lines stall, and why
    """
    from attention_kernels.inspection.sass import predict as model
    from gpt2_infer.bench.prediction import find_gpu

    on = find_gpu(gpu)
    if launch:
        if (seqlens, head_dim, batch, heads, full, dtype) != ((1024,), None, 1, 12, False, None):
            raise RequestError("--kernel takes a launch, not the shape of an attention call")
        found = [model.predict_kernel(Path(name), on, **vars(launch), lines=lines)]
        blocks, threads = ("x".join(map(str, sizes)) for sizes in (launch.grid, launch.block))
        what = f"{launch.kernel} of {Path(name).name} on {on.name}"
        heading = f"{what}: {blocks} blocks of {threads} threads"
    else:
        version = version_of(*adapted([name], entry))
        build = build_of(version, dtype)
        shape = call_shape(version, head_dim, batch, heads, full)
        found = [model.predict(build, on, seqlen=n, **shape, lines=lines) for n in seqlens]
        heading = f"{version.path.name} on {on.name}: {describe(shape)}"
    return [Predicted(heading, one) for one in found]


def text(found: Sequence[Predicted], lines: bool, **_: object) -> str:
    """Return a table of the predictions or, for `lines`, one of the source lines of each."""
    parts = [found[0].heading + ("" if lines else "; microseconds")]
    parts += [_stalls(one.prediction) for one in found] if lines else [_table(found)]
    assumed = dict.fromkeys(what for one in found for what in one.prediction.assumed)
    return "\n\n".join([*parts, *(f"assumed: {what}" for what in assumed)])


def _table(found: Sequence[Predicted]) -> str:
    from attention_kernels.inspection.table import table

    rows = []
    for one in found:
        parts = sorted(one.prediction.parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
        row = {
            "N": str(one.prediction.seqlen or ""),
            "predicted": f"{one.prediction.time_us:.1f}",
            "bound": one.prediction.bound,
            "largest parts": ", ".join(f"{us:.1f} {part}" for part, us in parts if us >= 0.05),
        }
        rows.append(row)
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    columns = {name: "left" if name in ("bound", "largest parts") else "right" for name in names}
    return table(columns, ([row[name] for name in names] for row in rows))


def _stalls(one: Prediction) -> str:
    """Return a table of the lines with most stalls, cut to the width of a terminal."""
    from attention_kernels.inspection.table import table

    assert one.stalls
    length = f"N={one.seqlen}, " if one.seqlen else ""
    heading = (
        f"{length}{one.time_us:.1f} us: a warp issues in {one.stalls.issuing:.0%} of its cycles "
        "and stalls in the others"
    )
    worst = one.stalls.lines[:SHOWN_LINES]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    rows = table(STALL_COLUMNS, [_line(one.version, line) for line in worst], width)
    legend = "\n\nLine a>b: line a of the kernel calls a function, whose line b stalls."
    return f"{heading}\n\n{rows}" + legend * any(line.through for line in worst)


def _line(version: str, line: StalledLine) -> tuple[str, ...]:
    first, second, *_ = [f"{share:.0%} {why}" for why, share in line.reasons.items()] + ["", ""]
    place = ">".join(map(str, (line.line, *line.through))) if line.line else "none"
    awaited = next((f"{at}" for at in line.waits_for if at), "")
    return f"{version}:{place}", f"{line.share:.1%}", first, second, awaited, line.source
