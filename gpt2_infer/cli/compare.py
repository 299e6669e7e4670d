"""The command `gpt2-infer compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Group, Parameter

from gpt2_infer.cli.options import (
    DEFAULT_PROMPT,
    DEVICE,
    FULL,
    MANY,
    Count,
    Device,
    KernelDtype,
    Rounds,
)
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from gpt2_infer.bench.record import File

GENERATION, KERNEL = (Parameter(group=Group(f"--task {task}")) for task in ("generation", "kernel"))
OUT = Parameter(required=True, help="JSON file to write; never overwritten")
MODES = "modes (default: recompute)"
MAX_TOKENS = "text lengths in tokens, prompt included (default: 32 to 512; on a CPU, to 64)"
SEQLENS = "sequence lengths in tokens (default: 64 to 4096; on a CPU, to 512)"
BASELINE = "backend that ratios refer to (default: NAIVE_PYTORCH)"
ROUNDS = "timed rounds, after a warm-up round (default: 5)"


def compare(
    *,
    task: Annotated[Literal["generation", "kernel"], Parameter(help="what to time")] = "generation",
    out: Annotated[Path | None, OUT] = None,
    name: Annotated[
        str | None, Parameter(help="task name in the results (default: --task's)")
    ] = None,
    backends: Annotated[
        tuple[str, ...], MANY, Parameter(help="backend names or version files, *.cu")
    ] = (),
    families: Annotated[
        tuple[str, ...], MANY, Parameter(help="families, from `gpt2-infer backends`")
    ] = (),
    baseline: Annotated[str | None, Parameter(help=BASELINE)] = None,
    device: Annotated[Device | None, DEVICE] = None,
    dtypes: Annotated[
        tuple[KernelDtype, ...], MANY, Parameter(help="dtypes (default: float32)")
    ] = (),
    batch_sizes: Annotated[
        tuple[Count, ...], MANY, Parameter(help="batch sizes (default: 1)")
    ] = (),
    rounds: Annotated[Rounds | None, Parameter(help=ROUNDS)] = None,
    max_tokens: Annotated[tuple[Count, ...], MANY, GENERATION, Parameter(help=MAX_TOKENS)] = (),
    modes: Annotated[
        tuple[Literal["recompute", "kv-cache"], ...], MANY, GENERATION, Parameter(help=MODES)
    ] = (),
    model: Annotated[
        str | None, GENERATION, Parameter(help="hub id, local folder or demo (default: demo)")
    ] = None,
    random_weights: Annotated[
        bool, GENERATION, Parameter(help="random weights in the size of --model")
    ] = False,
    prompt: Annotated[
        str | None, GENERATION, Parameter(help=f"text to complete (default: {DEFAULT_PROMPT!r})")
    ] = None,
    seqlens: Annotated[tuple[Count, ...], MANY, KERNEL, Parameter(help=SEQLENS)] = (),
    heads: Annotated[Count | None, KERNEL, Parameter(help="number of heads (default: 12)")] = None,
    head_dims: Annotated[
        tuple[Count, ...], MANY, KERNEL, Parameter(help="head dimensions (default: 64)")
    ] = (),
    full: Annotated[bool, KERNEL, FULL] = False,
    decode: Annotated[
        bool, KERNEL, Parameter(help="time decode kernels; N is a cache's length")
    ] = False,
) -> File:
    """Check backends, and time them in every combination of the lists, in interleaved rounds.

    A time counts only if the outputs of the timed calls are right and two clocks agree; otherwise
    the status says so. Emulated kernels have no time. out: None writes no file. Raises RequestError
    and the errors of study.run().
    """
    asked = {option: value for option, value in locals().items() if value}
    from gpt2_infer.bench import study

    kind: type[study.KernelStudy | study.GenerationStudy]
    kind = study.KernelStudy if task == "kernel" else study.GenerationStudy
    for option in asked.keys() - {"task", "out", "name"}:
        if option not in kind.__struct_fields__:
            raise RequestError(f"--{option.replace('_', '-')} is not for --task {task}")
    settings = {
        option: value for option, value in asked.items() if option not in ("task", "out", "name")
    }
    try:
        found = study.run(msgspec.convert(settings, kind, strict=False), name or task, out)
    except KeyboardInterrupt:
        partial = out and out.with_name(f"{out.name}.partial")
        kept = (
            f"rerun to resume from {partial}"
            if partial and partial.exists()
            else "nothing was saved"
        )
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        raise
    if out:
        print(f"wrote {out}", file=sys.stderr)
    return found


def text(found: File, out: Path, **_: object) -> str:
    """Return the tables of the results."""
    from gpt2_infer.bench.show import tables

    return tables.render(str(out), found)


def timings(found: File) -> list[dict[str, Any]]:
    """Return the times of kernels alone, in microseconds per call, or why there are none."""
    rows = []
    for row in found.of("time"):
        times = (row.median, *row.spread) if row.samples else (None, None, None)
        named = dict(zip(("median_us", "min_us", "max_us"), times, strict=True))
        why = {"status": row.status, "reason": row.reason}
        rows.append({"backend": row.contender, **msgspec.to_builtins(row.kernel), **why, **named})
    return rows
