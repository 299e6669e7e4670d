"""gpt2-infer predict."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import show
from gpt2_infer.cli.kernels import usual_head_dim, version_of
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.predict import Prediction


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("name", metavar="BACKEND", help="or a version file, *.cu")
    add("--gpu", default="h200", help="h200, h100, a100, t4 or rtx4090 (default: %(default)s)")
    add("--seqlen", type=int, nargs="+", default=[1024], help="default: 1024")
    add("--head-dim", type=int, metavar="D", help="default: 64, or what it takes")
    add("--batch", type=int, default=1, help="default: %(default)s")
    add("--heads", type=int, default=12, help="default: %(default)s")
    add("--full", action="store_true", help="without the causal mask")
    add("--results", type=Path, default=Path("results"), help="folder of measured results")
    add("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels.inspection import predict
    from attention_kernels.inspection.resources import aligned
    from gpt2_infer.bench import environment

    if arguments.gpu not in predict.gpus():
        known = ", ".join(predict.gpus())
        raise RequestError(f"there are no numbers of {arguments.gpu}: there are {known}")
    gpu = predict.gpus()[arguments.gpu]
    name, version = version_of(arguments.name)
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
    digest = environment.version_digest(version.path.read_text("utf-8"))
    cells = [("N", "predicted", "measured", "ratio", "bound", *_parts(found[0]))]
    for one in found:
        seen = _measured(arguments, head_dim, name, digest, gpu.name.split()[0], one.seqlen)
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


def _parts(one: Prediction) -> dict[str, float]:
    """Return what the time consists of, by heading: each resource, and what comes on top."""
    return {
        **one.needs_us,
        "+ waiting": one.waiting_us,
        "+ uneven blocks": one.uneven_us,
        "+ launch": one.launch_us,
    }


def _measured(
    arguments: argparse.Namespace, head_dim: int, name: str, digest: str, gpu: str, seqlen: int
) -> float | None:
    """Return the latest median that was measured with the same version file on such a GPU."""
    from gpt2_infer.bench.results import KernelCell, KernelTiming, Predicted, read

    cell = KernelCell(
        seqlen,
        arguments.batch,
        arguments.heads,
        head_dim,
        is_causal=not arguments.full,
    )
    files = [read(path) for path in sorted(arguments.results.glob("*.json"))]
    wanted = Predicted(name=name, cell=cell, version_digest=digest)
    for known in files:  # predictions know earlier results of the same file
        for one in getattr(known, "series", []):
            if isinstance(one, Predicted) and one.version_digest == digest:
                wanted.measured_digests.extend(one.measured_digests)
    medians = [
        (timing.provenance.date, statistics.median(series.samples))
        for timing in files
        if isinstance(timing, KernelTiming)
        and timing.provenance.gpu
        and gpu in timing.provenance.gpu.name
        for series in timing.series
        if series.samples and wanted.is_of(series)
    ]
    return max(medians)[1] if medians else None
