"""The command `gpt2-infer compare`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt2_infer.cli.console import show, show_json
from gpt2_infer.cli.options import (
    DEFAULT_PROMPT,
    DEVICE,
    DTYPES,
    POSITIVE,
    ROUNDS,
    current_family,
    device_name,
)
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from gpt2_infer.bench.record import File

MODES = ("recompute", "kv-cache")
MAX_TOKENS = "text lengths in tokens, prompt included (default: 32 to 512; on a CPU, to 64)"
SEQLENS = "sequence lengths in tokens (default: 64 to 4096; on a CPU, to 512)"
HEAD_DIMS = "head dimensions (default: 64)"


@dataclass(frozen=True)
class Timing:
    """The time of a kernel alone in one shape, in microseconds per call."""

    backend: str
    dtype: str
    batch: int
    num_heads: int
    seqlen: int
    head_dim: int
    is_causal: bool
    status: Literal["ok", "failed", "refused", "emulated"]
    """Only "ok" has a time: the outputs of the timed calls were judged, and were right."""
    reason: str
    """Why there is no time."""
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; options not given are absent from the namespace."""
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("--task", choices=("generation", "kernel"), default="generation", help="what to time")
    add("--out", type=Path, required=True, help="JSON file to write; never overwritten")
    add("--name", help="task name in the results (default: --task's)")
    add("--backends", nargs="+", metavar="NAME", help="backend names or version files, *.cu")
    add("--families", nargs="+", metavar="NAME", help="families, from `gpt2-infer backends`")
    add("--baseline", metavar="NAME", help="backend that ratios refer to (default: NAIVE_PYTORCH)")
    add("--device", type=device_name, metavar="NAME", help=DEVICE)
    add("--dtypes", nargs="+", choices=(*DTYPES, "float64"), help="dtypes (default: float32)")
    add("--batch-sizes", nargs="+", type=POSITIVE, metavar="N", help="batch sizes (default: 1)")
    add("--rounds", type=ROUNDS, help="timed rounds, after a warm-up round (default: 5)")
    add("--json", action="store_true", help="print the results as JSON, not as a table")
    text = parser.add_argument_group("generation").add_argument
    text("--max-tokens", nargs="+", type=POSITIVE, metavar="N", help=MAX_TOKENS)
    text("--modes", nargs="+", choices=MODES, help="modes (default: recompute)")
    text("--model", help="hub id, local folder or demo (default: demo)")
    text("--random-weights", action="store_true", help="random weights in the size of --model")
    text("--prompt", help=f"text to complete (default: {DEFAULT_PROMPT!r})")
    kernel = parser.add_argument_group("kernel").add_argument
    kernel("--seqlens", nargs="+", type=POSITIVE, metavar="N", help=SEQLENS)
    kernel("--heads", type=POSITIVE, help="number of heads (default: 12)")
    kernel("--head-dims", nargs="+", type=POSITIVE, metavar="D", help=HEAD_DIMS)
    kernel("--full", action="store_true", help="omit the causal mask")
    kernel("--decode", action="store_true", help="time decode kernels; N is a cache's length")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    import msgspec

    from gpt2_infer.bench.show import tables

    out = arguments.out
    if "families" in arguments:
        arguments.families = [*map(current_family, arguments.families)]
    try:
        file = find(arguments)
    except KeyboardInterrupt:
        partial = out.with_name(f"{out.name}.partial")
        kept = f"rerun to resume from {partial}" if partial.exists() else "nothing was saved"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        raise
    if "json" in arguments:
        show_json(msgspec.to_builtins(file))
    else:
        show(tables.render(str(out), file))
    print(f"wrote {out}", file=sys.stderr)
    return 0


def find(arguments: argparse.Namespace) -> File:
    """Return the results for the options of the command; options not given are absent.

    out: None writes no file. Raises RequestError and the errors of study.run().
    """
    from gpt2_infer.bench import study

    others = {"task", "out", "name", "debug", "json"}
    options = {name: value for name, value in vars(arguments).items() if name not in others}
    task = arguments.task
    kind = study.KernelStudy if task == "kernel" else study.GenerationStudy
    for name in options:
        if name not in kind.__struct_fields__:
            raise RequestError(f"--{name.replace('_', '-')} is not for --task {task}")
    return study.run(kind(**options), getattr(arguments, "name", task), arguments.out)


def timings(file: File) -> list[Timing]:
    """Return the times in the results of a KernelStudy."""
    found = []
    for row in file.of("time"):
        cell = row.kernel
        times = (row.median, *row.spread) if row.samples else ()
        shape = (cell.dtype, cell.batch, cell.num_heads, cell.seqlen, cell.head_dim, cell.is_causal)
        found.append(Timing(row.contender, *shape, row.status, row.reason, *times))
    return found
