"""The command `gpt2-infer compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Group, Parameter

from gpt2_infer.cli.options import MANY, Count, Counts, Device, KernelDtype, Names, Rounds
from gpt2_infer.cli.versions import adapted
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from gpt2_infer.bench.record import File

GENERATION, KERNEL = (Parameter(group=Group(f"--task {task}")) for task in ("generation", "kernel"))
OUT = Parameter(required=True)


def compare(
    *,
    task: Literal["generation", "kernel"] = "generation",
    out: Annotated[Path | None, OUT] = None,
    name: str | None = None,
    backends: Names = (),
    entry: str | None = None,
    families: Names = (),
    baseline: str | None = None,
    device: Device | None = None,
    dtypes: Annotated[tuple[KernelDtype, ...], MANY] = (),
    batch_sizes: Counts = (),
    rounds: Rounds | None = None,
    max_tokens: Annotated[Counts, GENERATION] = (),
    modes: Annotated[tuple[Literal["recompute", "kv-cache"], ...], MANY, GENERATION] = (),
    model: Annotated[str | None, GENERATION] = None,
    random_weights: Annotated[bool, GENERATION] = False,
    prompt: Annotated[str | None, GENERATION] = None,
    seqlens: Annotated[Counts, KERNEL] = (),
    heads: Annotated[Count | None, KERNEL] = None,
    head_dims: Annotated[Counts, KERNEL] = (),
    full: Annotated[bool, KERNEL] = False,
    decode: Annotated[bool, KERNEL] = False,
) -> File:
    """Check backends, and time them in every combination of the lists, in interleaved rounds.

    A time counts only if the outputs of the timed calls are right and two clocks agree; otherwise
    the status says so. Emulated kernels have no time. An interrupted comparison resumes when it is
    repeated. out: None writes no file. Raises RequestError and the errors of study.run().

    Args:
        task: what to time
        out: JSON file to write; never overwritten
        name: task name in the results (default: --task's)
        backends: backend names or version files, *.cu
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        families: families, from `gpt2-infer backends`
        baseline: backend that ratios refer to (default: NAIVE_PYTORCH)
        device: cuda, cuda:1 or the like, or cpu (default: cuda if available)
        dtypes: dtypes (default: float32)
        batch_sizes: batch sizes (default: 1)
        rounds: timed rounds, after a warm-up (default: 5, of kernels 8)
        max_tokens: text lengths in tokens, prompt included (default: 32 to 512; on a CPU, to
            64)
        modes: modes (default: recompute)
        model: hub id, local folder, demo, or a size such as qwen3-0.6b (default: demo)
        random_weights: random weights in the size of --model
        prompt: text to complete (default: "Hello, I'm a language model,")
        seqlens: sequence lengths in tokens (default: 64 to 4096; on a CPU, to 512)
        heads: number of heads (default: 12)
        head_dims: head dimensions (default: 64)
        full: omit the causal mask
        decode: time decode kernels; N is a cache's length
    """
    given = {option: value for option, value in locals().items() if value}
    from gpt2_infer.bench import study

    kind: type[study.KernelStudy | study.GenerationStudy]
    kind = study.KernelStudy if task == "kernel" else study.GenerationStudy
    settings = {k: v for k, v in given.items() if k not in ("task", "out", "name", "entry")}
    if entry is not None:
        settings["backends"] = adapted(backends, entry)
    for option in settings.keys() - {*kind.__struct_fields__}:
        raise RequestError(f"--{option.replace('_', '-')} is not for --task {task}")
    results = study.run(msgspec.convert(settings, kind, strict=False), name or task, out)
    if out:
        print(f"wrote {out}", file=sys.stderr)
    return results


def text(results: File, out: Path, **_: object) -> str:
    """Return the tables of the results."""
    from gpt2_infer.bench.show import tables

    return tables.render(str(out), results)
