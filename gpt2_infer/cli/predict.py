"""The command `gpt2-infer predict`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from cyclopts import Parameter

from gpt2_infer.cli.options import (
    BACKEND,
    BATCH,
    FULL,
    HEAD_DIM,
    HEADS,
    MANY,
    Count,
    KernelDtype,
    Size,
    wrong,
)
from gpt2_infer.cli.versions import call_shape, describe, version_of
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from cyclopts import Token

    from attention_kernels.inspection.sass.stalls import StalledLine
    from attention_kernels.inspection.sass.timing import Prediction
    from gpt2_infer.bench.prediction import Likely
    from gpt2_infer.bench.record import File, Row

GPU = "GPU: h200, h100, a100, t4 or rtx4090"
SEQLENS = "sequence lengths in tokens"
RESULTS = "folder of measured results (default: results, if it exists)"
DTYPE = "dtype of a version that takes several (default: its first)"
KERNEL = "predict this kernel of the file: *.cu, a cubin or a library with cubins"
AXES = "{} of the kernel: X, X,Y or X,Y,Z"
SHARED = "dynamic shared memory per block of the kernel, in bytes (default: what it accesses)"
ARGUMENTS = "arguments of the kernel: f32[COUNT] for a buffer, ptr, a number, hex:BYTES or @FILE"
SHOWN_PARTS = 3  # --json has all
SHOWN_LINES = 10


def _axes(_: object, tokens: Sequence[Token]) -> tuple[int, int, int]:
    text = tokens[0].value
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8}){0,2}", text):
        raise wrong(tokens, f"must be a size X, or X,Y or X,Y,Z, each 1 or more, not {text[:40]!r}")
    x, y, z = [*map(int, text.split(",")), 1, 1][:3]
    return x, y, z


Axes: TypeAlias = Annotated[tuple[Count, Count, Count], Parameter(converter=_axes, n_tokens=1)]


@dataclass(frozen=True)
class Predicted:
    """A prediction, next to what the results say."""

    heading: str
    """The file, the GPU, and the shape of the call or launch."""
    prediction: Prediction
    likely: Likely | None
    """How far such predictions were from measured times."""
    measured_us: float | None
    """The latest measured median of the same file in the same cell."""

    @property
    def likely_us(self) -> list[float] | None:
        """The range in which 8 in 10 measured times should be."""
        time, likely = self.prediction.time_us, self.likely
        return [time * likely.low, time * likely.high] if likely else None

    def to_json(self) -> dict[str, Any]:
        """Return every field of the prediction, what limits the time, and where it likely is."""
        fields = asdict(self.prediction)
        stalls = fields.pop("stalls")
        more = {"bound": self.prediction.bound, "likely_us": self.likely_us}
        return fields | (msgspec.to_builtins(stalls) if stalls else {}) | more


def predict(
    name: Annotated[str, BACKEND],
    /,
    *,
    gpu: Annotated[str, Parameter(help=GPU)] = "h200",
    seqlens: Annotated[tuple[Count, ...], MANY, Parameter(name="--seqlen", help=SEQLENS)] = (1024,),
    head_dim: Annotated[Count | None, HEAD_DIM] = None,
    batch: Annotated[Count, BATCH] = 1,
    heads: Annotated[Count, HEADS] = 12,
    full: Annotated[bool, FULL] = False,
    dtype: Annotated[KernelDtype | None, Parameter(help=DTYPE)] = None,
    kernel: Annotated[str | None, Parameter(help=KERNEL)] = None,
    grid: Annotated[Axes | None, Parameter(help=AXES.format("blocks"))] = None,
    block: Annotated[Axes | None, Parameter(help=AXES.format("threads per block"))] = None,
    shared: Annotated[Size | None, Parameter(help=SHARED)] = None,
    args: Annotated[
        tuple[str, ...], MANY, Parameter(help=ARGUMENTS, allow_leading_hyphen=True)
    ] = (),
    results: Annotated[Path | None, Parameter(help=RESULTS)] = None,
    lines: Annotated[bool, Parameter(help="show which source lines stall, and why")] = False,
) -> list[Predicted]:
    """Predict a kernel's time on a GPU in microseconds, and what limits it, without that GPU.

    A model of machine code and memory accesses: rarely off by more than 35 %, but no measurement;
    `assumed` says what it did not know. With `kernel`, grid, block, shared and args replace the
    shape. Needs nvcc for *.cu. Raises RequestError, UnsupportedError and BuildError.
    """
    of_a_call = {
        "--seqlen": seqlens != (1024,),
        "--head-dim": head_dim,
        "--batch": batch != 1,
        "--heads": heads != 12,
        "--full": full,
        "--dtype": dtype,
    }
    of_a_launch = {"--grid": grid, "--block": block, "--shared": shared, "--args": args or None}
    given = [option for option, value in of_a_launch.items() if value is not None]
    if kernel is None and given:
        raise RequestError(f"{given[0]} is of a launch: it needs --kernel")
    if kernel is not None:
        if missing := [option for option in ("--grid", "--block") if option not in given]:
            raise RequestError(f"--kernel needs {missing[0]}")
        for option in (option for option, value in of_a_call.items() if value):
            raise RequestError(f"{option} is of an attention call: give it or --kernel")

    from attention_kernels.inspection.sass import predict as model
    from gpt2_infer.bench.prediction import find_gpu, likely, timed_on, uses_tensor_cores

    on, files = find_gpu(gpu), _read_results(results)
    rows: list[Row | None] = [None]
    if kernel is not None:
        assert grid is not None
        assert block is not None
        from attention_kernels.inspection.sass.binary import Request

        request = Request(Path(name), kernel, grid, block, shared, args)
        blocks, threads = ("x".join(map(str, sizes)) for sizes in (grid, block))
        heading = (
            f"{kernel} of {Path(name).name} on {on.name}: {blocks} blocks of {threads} threads"
        )
        found = [model.predict_kernel(request, on, lines=lines)]
    else:
        from attention_kernels import UnsupportedError
        from gpt2_infer.bench.environment import version_digest
        from gpt2_infer.bench.prediction import prediction_row
        from gpt2_infer.bench.record import KernelCell

        backend, version = version_of(name)
        builds = {build.dtype: build for build in version.builds()}
        first, *_ = builds
        wanted = dtype or first
        if wanted not in builds:
            reason = f"dtype {wanted} (it takes {', '.join(builds)})"
            raise UnsupportedError(version.path.name, [reason])
        shape = call_shape(version, head_dim, batch, heads, full)
        heading = f"{version.path.name} on {on.name}: {describe(shape)}"
        cells = [KernelCell(seqlen, dtype=wanted, **shape) for seqlen in seqlens]
        digest = version_digest(version.source)
        rows = [prediction_row(backend, cell, digest) for cell in cells]
        cases = [model.Case(seqlen=seqlen, **shape) for seqlen in seqlens]
        found = model.predict(builds[wanted], on, cases, lines=lines)
    near = likely(files, on_tensor_cores=uses_tensor_cores(found[0].needs_us))
    timings = timed_on(on, files)
    return [
        Predicted(heading, one, near, _measured(row, timings) if row else None)
        for one, row in zip(found, rows, strict=True)
    ]


def text(found: Sequence[Predicted], lines: bool, **_: object) -> str:
    """Return a table of the predictions or, for `lines`, one of the source lines of each."""
    parts = [found[0].heading + ("" if lines else "; microseconds")]
    parts += [_stalls(one.prediction) for one in found] if lines else [_table(found)]
    if (near := found[0].likely) and not lines:
        from gpt2_infer.bench.prediction import uses_tensor_cores

        kind = "on" if uses_tensor_cores(found[0].prediction.needs_us) else "without"
        parts.append(
            f"likely: of {near.cells} kernels {kind} tensor cores that were measured, 8 in 10 "
            f"took {near.low:.2f} to {near.high:.2f} times as long as predicted."
        )
    assumed = dict.fromkeys(what for one in found for what in one.prediction.assumed)
    return "\n\n".join([*parts, *(f"assumed: {what}" for what in assumed)])


def _table(found: Sequence[Predicted]) -> str:
    from tabulate import tabulate

    rows = []
    for one in found:
        time, measured = one.prediction.time_us, one.measured_us
        largest = sorted(_parts(one.prediction), key=lambda part: -part[1])[:SHOWN_PARTS]
        rows.append(
            {
                "N": str(one.prediction.seqlen or ""),
                "predicted": f"{time:.1f}",
                "likely": "..".join(f"{us:.1f}" for us in one.likely_us or ()),
                "measured": f"{measured:.1f}" if measured else "",
                "ratio": f"{time / measured:.2f}" if measured else "",
                "bound": one.prediction.bound,
                "largest parts": ", ".join(
                    f"{us:.1f} {part}" for part, us in largest if us >= 0.05
                ),
            }
        )
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    align = ["left" if name in ("bound", "largest parts") else "right" for name in names]
    cells = [names, *([row[name] for name in names] for row in rows)]
    return tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)


def _stalls(one: Prediction) -> str:
    """Return a table of the lines with most stalls, cut to the width of a terminal."""
    from tabulate import tabulate

    assert one.stalls
    length = f"N={one.seqlen}, " if one.seqlen else ""
    heading = (
        f"{length}{one.time_us:.1f} us: a warp issues in {one.stalls.issuing:.0%} of its cycles "
        "and stalls in the others"
    )
    worst = one.stalls.lines[:SHOWN_LINES]
    heads = ("line", "stalls", "main reason", "second reason", "waits for", "source")
    align = ["left", "right", "left", "left", "right", "left"]
    cells = [heads, *(_line(one.version, line) for line in worst)]
    table = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    rows = [
        row if width is None or len(row) <= width else f"{row[: width - 3]}..."
        for row in table.splitlines()
    ]
    if any(line.through for line in worst):
        rows += ["", "Line a>b: line a of the kernel calls a function, whose line b stalls."]
    return "\n".join([heading, "", *rows])


def _line(version: str, line: StalledLine) -> tuple[str, ...]:
    first, second, *_ = [f"{share:.0%} {why}" for why, share in line.reasons.items()] + ["", ""]
    place = ">".join(map(str, (line.line, *line.through))) if line.line else "none"
    awaited = next((f"{at}" for at in line.waits_for if at), "")
    return f"{version}:{place}", f"{line.share:.1%}", first, second, awaited, line.source


def _parts(one: Prediction) -> Iterator[tuple[str, float]]:
    """Yield the parts of the time by name: each resource, then the overheads."""
    yield from one.needs_us.items()
    yield from (("latency", one.waiting_us), ("uneven blocks", one.uneven_us))
    yield "launch", one.launch_us


def _read_results(folder: Path | None) -> list[File]:
    """Read a folder of results; name skipped files on standard error.

    Raises RequestError for a given folder that does not exist or has no such file.
    """
    from gpt2_infer.bench.record import ResultsError, read

    if folder is not None and not folder.is_dir():
        raise RequestError(f"--results: there is no folder {folder}")
    paths = sorted((folder or Path("results")).glob("*.json"))
    if folder and not paths:
        raise RequestError(f"--results: {folder} has no results file, *.json")
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except ResultsError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return found


def _measured(wanted: Row, timings: Sequence[File]) -> float | None:
    from gpt2_infer.bench.record import timings_of

    medians = [
        (timing.provenance.date, row.median)
        for timing in timings
        for row in timings_of(wanted, timing.of("time"))
    ]
    return max(medians)[1] if medians else None
