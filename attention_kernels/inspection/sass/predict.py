"""Predict how long a kernel takes on a GPU, and what limits it, without running it there.

A version file says itself what it launches; any other kernel needs its launch.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import launches
from attention_kernels.inspection.sass import binary, timing
from attention_kernels.inspection.sass.explain import explain
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.program import (
    CUBIN,
    Program,
    VersionProgram,
    compile_program,
)
from attention_kernels.inspection.sass.stalls import Watch
from attention_kernels.inspection.sass.timing import LaunchModel, Prediction
from attention_kernels.ladder.header import VersionHeader


class Case(NamedTuple):
    """The shape of a call."""

    batch: int
    seqlen: int
    """For a decode kernel, the length of the cache, which all rows fill."""
    num_heads: int
    head_dim: int
    is_causal: bool


def predict(
    version: VersionHeader, gpu: GpuModel, cases: Sequence[Case], *, lines: bool = False
) -> list[Prediction]:
    """Predict one call of a version in each case, in the version's first dtype.

    cases: they differ only in length. lines: also explain the stalls by source line. Raises
    UnsupportedError for a version or a case that cannot be predicted, BuildError if a compiler is
    missing or the version does not compile, and SassError for an unknown instruction.
    """
    version = _checked(version, gpu, cases)
    with tempfile.TemporaryDirectory() as folder:
        # The line table leaves the code as it is: test_predict.py compares the predictions.
        program = compile_program(version, gpu, Path(folder), *["-lineinfo"] * lines)
        shown = tqdm(cases, "explaining", unit="", disable=None if lines else True, leave=False)
        return [
            _time(program, _models(program, case), case.seqlen, Path(folder), lines=lines)
            for case in shown
        ]


def predict_kernel(request: binary.Request, gpu: GpuModel, *, lines: bool = False) -> Prediction:
    """Predict one launch of a kernel in a file; lines: also explain the stalls by source line.

    Raises the errors of binary.read(), UnsupportedError, and SassError.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, launch, size = binary.read(request, gpu, Path(folder))
        model = timing.model_of(program, launch, size)
        assumed = [] if size else ["memory is fast enough: no argument has a buffer's size"]
        dynamic = model.line.shared_end - binary.reserved_first(gpu) - model.shared
        if request.dynamic_smem is None and dynamic > 0:
            model = model.with_shared(dynamic)
            accessed = f"{dynamic} bytes of dynamic shared memory: the kernel accesses no more"
            assumed.append(accessed)
        found = _time(program, [(1, model)], 0, Path(folder), lines=lines)
    return dataclasses.replace(found, assumed=(*found.assumed, *assumed))


def _time(
    program: Program,
    models: Sequence[tuple[int, LaunchModel]],
    seqlen: int,
    folder: Path,
    *,
    lines: bool,
) -> Prediction:
    """Time the launches of a call, given how often each occurs."""
    watches = [Watch() if lines else None for _ in models]
    each = [
        (count, timing.time_of(model, watch))
        for (count, model), watch in zip(models, watches, strict=True)
    ]
    found = timing.sum_of(each, seqlen)
    if not lines:
        return found
    launched = [
        (model, count * (one.time_us - one.launch_us), watch.cycles)
        for (_, model), (count, one), watch in zip(models, each, watches, strict=True)
        if watch
    ]
    stalls = explain(program, folder / CUBIN, launched, found.time_us)
    return dataclasses.replace(found, stalls=stalls)


def _checked(version: VersionHeader, gpu: GpuModel, cases: Sequence[Case]) -> VersionHeader:
    """Return a version in its first dtype; raise UnsupportedError with every reason against it."""
    batch, _, num_heads, head_dim, _ = cases[0]
    reasons = launches.case_faults(
        version,
        seqlens=[case.seqlen for case in cases],
        head_dim=head_dim,
        batch=batch,
        num_heads=num_heads,
        may_decode=True,
    )
    if version.needs and not version.compiles_for(gpu.arch):
        needed = "".join(map(str, version.needs)) + "a" * version.needs_exactly
        reasons.append(f"it needs sm_{needed}, and {gpu.name} is sm_{gpu.arch}")
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    return version.builds()[0]


def _models(program: VersionProgram, case: Case) -> list[tuple[int, LaunchModel]]:
    """Execute some blocks of each launch of a call; return how often each launch occurs, too."""
    batch, seqlen, num_heads, head_dim, is_causal = case
    counted = program.launches((batch, seqlen, num_heads, int(is_causal)), head_dim)
    item = {"float32": 4, "float64": 8}.get(program.version.dtype, 2)
    rows = 2 * seqlen + 2 if program.version.role == "decode" else 4 * seqlen
    min_bytes = 1.0 * batch * rows * num_heads * head_dim * item
    return [
        (count, timing.model_of(program, launch, min_bytes / counted.total()))
        for launch, count in counted.items()
    ]
