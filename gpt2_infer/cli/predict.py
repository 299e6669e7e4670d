"""gpt2-infer predict."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import show
from gpt2_infer.cli.kernels import usual_head_dim, version_of
from gpt2_infer.cli.options import POSITIVE
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.predict import Prediction
    from gpt2_infer.bench.record import File, Row

RESULTS = "folder of measured results (default: results, if it exists)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("name", metavar="BACKEND", help="backend name or version file, *.cu")
    add("--gpu", default="h200", help="h200, h100, a100, t4 or rtx4090 (default: %(default)s)")
    add("--seqlen", type=POSITIVE, nargs="+", default=[1024], help="tokens (default: 1024)")
    add("--head-dim", type=POSITIVE, metavar="D", help="default: 64, or the first supported")
    add("--batch", type=POSITIVE, default=1, help="batch size (default: %(default)s)")
    add("--heads", type=POSITIVE, default=12, help="number of heads (default: %(default)s)")
    add("--full", action="store_true", help="omit the causal mask")
    add("--results", type=Path, metavar="DIR", help=RESULTS)
    add("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels.inspection import predict
    from attention_kernels.inspection.resources import aligned
    from gpt2_infer.bench import environment
    from gpt2_infer.bench.prediction import find_gpu, prediction_row, timed_on
    from gpt2_infer.bench.record import KernelCell

    gpu = find_gpu(arguments.gpu)
    name, version = version_of(arguments.name)
    files = [] if arguments.json else _read_results(arguments.results)
    head_dim = arguments.head_dim or usual_head_dim(version)
    found = predict.predict(
        version,
        gpu,
        arguments.seqlen,
        head_dim=head_dim,
        batch=arguments.batch,
        num_heads=arguments.heads,
        is_causal=not arguments.full,
    )
    if arguments.json:
        show(
            json.dumps([dataclasses.asdict(one) | {"bound": one.bound} for one in found], indent=2)
        )
        return 0
    show(
        f"{version.path.name} on {gpu.name}: B={arguments.batch} H={arguments.heads} "
        f"head_dim={head_dim} {'full' if arguments.full else 'causal'}; microseconds\n"
    )
    digest = environment.version_digest(version.source)
    timings = timed_on(gpu, files)
    cells = [("N", "predicted", "measured", "ratio", "bound", *_parts(found[0]))]
    for one in found:
        cell = KernelCell(
            one.seqlen, arguments.batch, arguments.heads, head_dim, is_causal=not arguments.full
        )
        seen = _measured(prediction_row(name, cell, digest), timings)
        cells.append(
            (
                str(one.seqlen),
                f"{one.time_us:.1f}",
                f"{seen:.1f}" if seen else "no results",
                f"{one.time_us / seen:.2f}" if seen else "",
                one.bound,
                *(f"{value:.1f}" for value in _parts(one).values()),
            )
        )
    show(aligned(cells))
    return 0


def _read_results(folder: Path | None) -> list[File]:
    """Read a folder of results; name skipped files on standard error.

    Raises RequestError if the folder does not exist.
    """
    from gpt2_infer.bench.record import ResultsError, read

    if folder is not None and not folder.is_dir():
        raise RequestError(f"--results: there is no folder {folder}")
    found, left_out = [], []
    for path in sorted((folder or Path("results")).glob("*.json")):
        try:
            found.append(read(path))
        except ResultsError as error:
            left_out.append(str(error))
    if left_out:
        others = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        print(f"skipped: {left_out[0]}{others}", file=sys.stderr)
    return found


def _parts(one: Prediction) -> dict[str, float]:
    """Return the parts of the time by column heading: each resource, then the overheads."""
    return {
        **one.needs_us,
        "+ waiting": one.waiting_us,
        "+ uneven blocks": one.uneven_us,
        "+ launch": one.launch_us,
    }


def _measured(wanted: Row, timings: Sequence[File]) -> float | None:
    """Return the latest measured median of the same version file in the same cell."""
    from gpt2_infer.bench.show.tables import is_of

    medians = [
        (timing.provenance.date, row.median)
        for timing in timings
        for row in timing.of("time")
        if row.samples and is_of(wanted, row)
    ]
    return max(medians)[1] if medians else None
