"""The command `gpt2-infer predict`."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpt2_infer.cli import lines, target
from gpt2_infer.cli.console import show, show_json
from gpt2_infer.cli.options import POSITIVE, add_shape_options
from gpt2_infer.cli.target import Target, target_of
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.sass.timing import Prediction
    from gpt2_infer.bench.prediction import Likely
    from gpt2_infer.bench.record import File, Row

GPU = "GPU: h200, h100, a100, t4 or rtx4090 (default: %(default)s)"
SEQLENS = "sequence lengths in tokens (default: 1024)"
RESULTS = "folder of measured results (default: results, if it exists)"
LINES = "show which source lines stall, and why"
SHOWN_PARTS = 3  # --json has all


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_shape_options(add, heads=12)
    add("--gpu", default="h200", help=GPU)
    add("--seqlen", type=POSITIVE, nargs="+", default=[1024], help=SEQLENS)
    target.add_options(add)
    add("--results", type=Path, metavar="DIR", help=RESULTS)
    add("--lines", action="store_true", help=LINES)
    add("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from gpt2_infer.bench.prediction import find_gpu, likely, uses_tensor_cores

    gpu = find_gpu(arguments.gpu)
    wanted = target_of(arguments, gpu)
    files = _read_results(arguments.results)
    if not arguments.json:
        show(wanted.heading + ("" if arguments.lines else "; microseconds\n"))
    found = wanted.predict()
    near = likely(files, on_tensor_cores=uses_tensor_cores(found[0].needs_us))
    if arguments.json:
        show_json([to_json(one) | {"likely_us": _likely_us(one, near)} for one in found])
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for one in found:
        if one.stalls:
            show(f"\n{lines.format_lines(one, one.stalls, width)}")
    if not arguments.lines:
        _show_table(arguments.gpu, wanted, found, files, near)
    for what in dict.fromkeys(what for one in found for what in one.assumed):
        show(f"\nassumed: {what}")
    return 0


def _show_table(
    gpu: str,
    wanted: Target,
    found: Sequence[Prediction],
    files: Sequence[File],
    near: Likely | None,
) -> None:
    from tabulate import tabulate

    from gpt2_infer.bench.prediction import find_gpu, timed_on, uses_tensor_cores

    timings = timed_on(find_gpu(gpu), files)
    columns: dict[str, list[str]] = {
        name: []
        for name in ("N", "predicted", "likely", "measured", "ratio", "bound", "largest parts")
    }
    for one in found:
        measured = _measured(wanted.row(one.seqlen), timings) if wanted.row else None
        low_high = _likely_us(one, near)
        largest = sorted(_parts(one).items(), key=lambda part: -part[1])[:SHOWN_PARTS]
        for name, text in {
            "N": str(one.seqlen or ""),
            "predicted": f"{one.time_us:.1f}",
            "likely": "..".join(f"{us:.1f}" for us in low_high or ()),
            "measured": f"{measured:.1f}" if measured else "",
            "ratio": f"{one.time_us / measured:.2f}" if measured else "",
            "bound": one.bound,
            "largest parts": ", ".join(f"{us:.1f} {name}" for name, us in largest if us >= 0.05),
        }.items():
            columns[name].append(text)
    columns = {name: column for name, column in columns.items() if any(column)}
    align = ["left" if name in ("bound", "largest parts") else "right" for name in columns]
    cells = [[*columns], *zip(*columns.values(), strict=True)]
    show(tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align))
    if near:
        kind = "on" if uses_tensor_cores(found[0].needs_us) else "without"
        show(
            f"\nlikely: of {near.cells} kernels {kind} tensor cores that were measured, 8 in 10 "
            f"took {near.low:.2f} to {near.high:.2f} times as long as predicted."
        )


def _likely_us(one: Prediction, near: Likely | None) -> list[float] | None:
    return [one.time_us * near.low, one.time_us * near.high] if near else None


def find(arguments: argparse.Namespace) -> list[Prediction]:
    """Return a prediction per length for the options of the command.

    Raises RequestError for an unknown GPU, and the errors of target_of() and of predict().
    """
    from gpt2_infer.bench.prediction import find_gpu

    return target_of(arguments, find_gpu(arguments.gpu)).predict()


def to_json(one: Prediction) -> dict[str, Any]:
    """Return every field, and what limits the time."""
    fields = dataclasses.asdict(one) | {"bound": one.bound}
    stalls = fields.pop("stalls")
    return (msgspec.to_builtins(stalls) if stalls else {}) | fields


def _read_results(folder: Path | None) -> list[File]:
    """Read a folder of results; name skipped files on standard error.

    Raises RequestError for a given folder that does not exist or has no such file.
    """
    from gpt2_infer.bench.record import ResultsError, read

    if folder is not None and not folder.is_dir():
        raise RequestError(f"--results: there is no folder {folder}")
    found = []
    paths = sorted((folder or Path("results")).glob("*.json"))
    if folder and not paths:
        raise RequestError(f"--results: {folder} has no results file, *.json")
    for path in paths:
        try:
            found.append(read(path))
        except ResultsError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return found


def _parts(one: Prediction) -> dict[str, float]:
    """Return the parts of the time by name: each resource, then the overheads."""
    return {
        **one.needs_us,
        "latency": one.waiting_us,
        "uneven blocks": one.uneven_us,
        "launch": one.launch_us,
    }


def _measured(wanted: Row, timings: Sequence[File]) -> float | None:
    """Return the latest measured median of the same version file in the same cell."""
    from gpt2_infer.bench.record import timings_of

    medians = [
        (timing.provenance.date, row.median)
        for timing in timings
        for row in timings_of(wanted, timing.of("time"))
    ]
    return max(medians)[1] if medians else None
