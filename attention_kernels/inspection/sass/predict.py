"""Predict how long a kernel takes on a GPU, and what limits it, without running it there.

A version file says itself what it launches; any other kernel needs its launch.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tqdm import tqdm

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import launches
from attention_kernels.inspection.sass import binary, timing
from attention_kernels.inspection.sass.explain import explain
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.program import CUBIN, Program, compile_program, launches_of
from attention_kernels.inspection.sass.stalls import Watch
from attention_kernels.inspection.sass.timing import LaunchModel, Prediction
from attention_kernels.ladder.header import VersionHeader

_Models: TypeAlias = list[tuple[int, LaunchModel]]
"""The launches of a call, each with how often it occurs."""


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
            _time(program, _models(version, program, case), case.seqlen, Path(folder), lines)
            for case in shown
        ]


def predict_kernel(request: binary.Request, gpu: GpuModel, *, lines: bool = False) -> Prediction:
    """Predict one launch of a kernel in a file; lines: also explain the stalls by source line.

    Raises the errors of binary.read(), UnsupportedError, and SassError.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, launch, size = binary.read(request, gpu, Path(folder))
        model = timing.model_of(program, launch, size, as_accessed=request.dynamic_smem is None)
        assumed = [] if size else ["memory is fast enough: no argument has a buffer's size"]
        if request.dynamic_smem is None and (dynamic := model.launch.dynamic_smem):
            accessed = f"{dynamic} bytes of dynamic shared memory: the kernel accesses no more"
            assumed.append(accessed)
        found = _time(program, [(1, model)], 0, Path(folder), lines)
    return dataclasses.replace(found, assumed=(*found.assumed, *assumed))


def _time(program: Program, models: _Models, seqlen: int, folder: Path, lines: bool) -> Prediction:
    """Time the launches of a call."""
    each, explained = [], []
    for count, model in models:
        watch = Watch()
        one = timing.time_of(model, watch if lines else None)
        each.append((count, one))
        explained.append((model, count * (one.time_us - one.launch_us), watch.cycles))
    found = timing.sum_of(each, seqlen)
    if lines:
        stalls = explain(program, folder / CUBIN, explained, found.time_us)
        found = dataclasses.replace(found, stalls=stalls)
    return found


def _checked(version: VersionHeader, gpu: GpuModel, cases: Sequence[Case]) -> VersionHeader:
    """Return a version in its first dtype; raise UnsupportedError with every reason against it."""
    batch, _, num_heads, head_dim, _ = cases[0]
    shape = {"head_dim": head_dim, "batch": batch, "num_heads": num_heads}
    seqlens = [case.seqlen for case in cases]
    reasons = launches.case_faults(version, seqlens=seqlens, **shape, may_decode=True)
    if version.needs and not version.compiles_for(gpu.arch):
        needed = "".join(map(str, version.needs)) + "a" * version.needs_exactly
        reasons.append(f"it needs sm_{needed}, and {gpu.name} is sm_{gpu.arch}")
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    return version.builds()[0]


def _models(version: VersionHeader, program: Program, case: Case) -> _Models:
    """Execute some blocks of each launch of a call."""
    batch, seqlen, num_heads, head_dim, is_causal = case
    shape = batch, seqlen, num_heads, int(is_causal)
    counted = launches_of(version, program.gpu, shape, head_dim)
    item = {"float32": 4, "float64": 8}.get(version.dtype, 2)
    rows = 2 * seqlen + 2 if version.role == "decode" else 4 * seqlen
    min_bytes = 1.0 * batch * rows * num_heads * head_dim * item
    return [
        (count, timing.model_of(program, launch, min_bytes / counted.total()))
        for launch, count in counted.items()
    ]
