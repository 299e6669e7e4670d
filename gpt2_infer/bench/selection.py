"""Select the backends of a comparison, and check each before it is timed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from attention_kernels import BackendSpec, UnsupportedError, ladder, list_backends
from attention_kernels.judge.suite import (
    KERNEL_ERRORS,
    Case,
    DecodeCase,
    describe_error,
    judged,
    run_check,
)
from attention_kernels.judge.truth import Verdict
from attention_kernels.judge.worker import Runner
from attention_kernels.ladder.header import VersionHeader
from attention_kernels.registry import DECODES_ONLY, NO_DECODE
from gpt2_infer.bench import environment
from gpt2_infer.bench.record import Check, KernelCell, ResultsError, Row, Shape
from gpt2_infer.bench.study import BackendStudy, InspectionStudy, ProfileStudy, RejectedError
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.errors import RequestError

EMULATED_SEQLEN = 64  # maximum length at which an emulated kernel is checked
EMULATED = "its source runs in the CPU emulator, where a time would mean nothing"


def selected(
    study: BackendStudy,
    *,
    cpu_families: tuple[str, ...] = (),
    emulated: bool = False,
    decode: bool = False,
) -> tuple[str, list[BackendSpec], BackendSpec]:
    """Return a study's device, backends and baseline; see select()."""
    device = str(resolve_device(study.device))
    families = study.families
    if device == "cpu" and not (families or study.backends):
        families = [*cpu_families]
    specs = select(
        study.backends,
        device,
        families=families,
        dtypes=study.dtypes,
        emulated=emulated,
        decode=decode,
    )
    (baseline,) = select([study.baseline], device, dtypes=study.dtypes, decode=decode)
    return device, specs, baseline


def select(
    names: Sequence[str],
    device_type: str,
    *,
    families: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    emulated: bool = False,
    decode: bool = False,
) -> list[BackendSpec]:
    """Return the named backends and those of the families; without either, all that run here.

    A name may be the path of a version file, *.cu, that belongs to no ladder. Backends of a family
    are skipped if they cannot run, support none of the dtypes, only decode (with `decode`, if they
    do not) or, without `emulated`, run emulated. A line on stderr names each family that has none
    left, with the reasons. Raises UnknownBackendError, HeaderError, or RequestError for an unknown
    family, a named backend that cannot be compared for one of these reasons, or when nothing is
    left.
    """
    known = {spec.family for spec in list_backends()}
    if missing := {*families} - known:
        raise RequestError(
            f"no family named {', '.join(sorted(missing))}, only {', '.join(sorted(known))}"
        )

    def refusal(spec: BackendSpec) -> str | None:
        if reason := spec.unavailable_reason(device_type):
            return reason
        if dtypes and not {*dtypes} & {*spec.dtypes}:
            return f"takes {', '.join(spec.dtypes)}, not {', '.join(dtypes)}"
        if spec.version is not None and (spec.version.role == "decode") != decode:
            return NO_DECODE if decode else DECODES_ONLY
        return None

    reasons = {
        spec: EMULATED if not emulated and device_type in spec.emulated_on else refusal(spec)
        for spec in list_backends()
        if spec.family in families or not (families or names)
    }
    specs = [spec for spec, reason in reasons.items() if reason is None]
    specs += ladder.resolve_all(names)
    left_out = []
    for family in dict.fromkeys(families):
        of_it = [reason for spec, reason in reasons.items() if spec.family == family]
        if None not in of_it:
            left_out.append(f"{family} ({'; '.join(dict.fromkeys(filter(None, of_it)))})")
    if left_out:
        sentence = f"not measured on {device_type}: {', '.join(left_out)}"
        if not specs:
            raise RequestError(sentence)
        print(sentence, file=sys.stderr)
    for spec in specs:
        if reason := refusal(spec):
            raise RequestError(f"{spec.name} cannot be compared on {device_type}: {reason}")
    return list({spec.name: spec for spec in specs}.values())


def versions_of(family: str, *, may_decode: bool = False) -> dict[str, VersionHeader]:
    """Return the versions of a ladder by backend name.

    Raises RequestError if no ladder has that name, or if its kernels only decode and may not.
    """
    versions = ladder.versions(family)
    if not versions:
        families = ", ".join(ladder.families())
        raise RequestError(f"no ladder named {family}, only {families}")
    if not may_decode and {version.role for version in versions.values()} == {"decode"}:
        raise RequestError(f"the kernels of {family} only decode, which is not supported here")
    return versions


def shape_of(study: ProfileStudy | InspectionStudy) -> Shape:
    """Return the shape that a ladder study uses."""
    return Shape(
        batch=study.batch,
        num_heads=study.heads,
        seqlen=study.seqlen,
        head_dim=study.head_dim,
        is_causal=not study.full,
    )


def case_of(shape: Shape | KernelCell, dtype: str) -> Case:
    """Return the judge's case of a shape."""
    return Case(**msgspec.structs.asdict(shape) | {"dtype": getattr(torch, dtype)})


def unit_of(metric: str) -> str:
    """Return the unit in which a metric of a profile or an inspection is recorded."""
    if metric.endswith("_us"):
        return "us"
    if metric.endswith("percent"):
        return "%"
    return "bytes" if metric.endswith("bytes") else "count"


def with_baseline(
    baseline: BackendSpec,
    specs: Sequence[BackendSpec],
    kinds: Sequence[tuple[str, int, int]],
    device: str,
) -> tuple[BackendSpec, list[BackendSpec]]:
    """Return the baseline, and the backends including it.

    Aliases are replaced by the backends they stand for. kinds: the measured dtypes, head_dims and
    lengths. Raises the exceptions of BackendSpec.chosen().
    """
    first = next(iter(_chosen([baseline], kinds, device)), baseline)
    specs = _chosen(specs, kinds, device)
    lacks = first.name not in {spec.name for spec in specs}
    return first, [*[first] * lacks, *specs]


def _chosen(
    specs: Sequence[BackendSpec], kinds: Sequence[tuple[str, int, int]], device: str
) -> list[BackendSpec]:
    found = [
        spec.chosen(getattr(torch, dtype), head_dim, device, length)
        for spec in specs
        for dtype, head_dim, length in kinds
        if spec.chooses is None or dtype in spec.precisions
    ]
    return list({spec.name: spec for spec in found}.values())


def row_of(
    spec: BackendSpec, dtype: str, metric: str, unit: str, sources: Mapping[str, str | None]
) -> Row:
    """Return a backend's row without samples, with a description of the backend in `extra`."""
    extra = {"family": spec.family, "precision": spec.precisions[dtype]}
    if digest := sources.get(spec.name):
        extra["source_digest"] = digest
    if version := spec.version:
        extra |= {"flags": " ".join(version.flags), "change": version.title}
        extra["version_digest"] = environment.version_digest(version.source)
    return Row(contender=spec.name, metric=metric, unit=unit, extra=extra)


def check(row: Row, runner: Runner, cases: Sequence[Case | DecodeCase]) -> None:
    """Check a backend against the reference and record the result in its row.

    Raises the errors of Runner.receive(), except a refusal.
    """
    worst = None
    if not runner.has_decode and any(isinstance(case, DecodeCase) for case in cases):
        row.status, row.reason = "refused", f"{NO_DECODE} on {runner.device}"
        return
    for case in map(_emulated, cases) if runner.is_emulated else cases:
        try:
            verdict = run_check(runner, judged(runner, case))
        except UnsupportedError as error:
            row.status, row.reason = "refused", "; ".join(error.reasons)
            return
        assert isinstance(verdict, Verdict)
        worst = max(worst or verdict, verdict, key=lambda verdict: verdict.nearness)
        if not verdict.passed:
            row.status, row.reason = "failed", f"{case}: {verdict}"
            break
    if worst:
        row.check = Check(
            **{name: _rounded(getattr(worst, name)) for name in Check.__struct_fields__}
        )
    if runner.is_emulated and row.status == "ok":
        row.status, row.reason = "emulated", EMULATED


@contextlib.contextmanager
def rejecting(row: Row, device: str) -> Iterator[None]:
    """Turn an exception of the kernel being timed into RejectedError.

    Raises ResultsError if the exception broke the CUDA context.
    """
    try:
        yield
    except KERNEL_ERRORS as error:
        record_failure(row, error, device)
        raise RejectedError(f"while it was timed: {describe_error(error)}") from error


def record_failure(row: Row, error: Exception, device: str) -> None:
    """Record a kernel's exception; raises ResultsError if it broke the CUDA context."""
    row.status = "refused" if isinstance(error, UnsupportedError) else "failed"
    row.reason = describe_error(error)
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as broken:
            why = describe_error(broken)
            raise ResultsError(f"{row.contender} broke the CUDA context: {why}") from error


def _emulated(case: Case | DecodeCase) -> Case | DecodeCase:
    """Return a case that is small enough for the emulator."""
    seqlen = min(case.seqlen, EMULATED_SEQLEN)
    if isinstance(case, Case):
        return dataclasses.replace(case, seqlen=seqlen, batch=1)
    lengths = tuple(min(length, seqlen) for length in case.lengths[:3])
    return dataclasses.replace(case, lengths=lengths, max_seqlen=seqlen)


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None  # JSON has no infinity


def usual_head_dim(takes: BackendSpec | VersionHeader) -> int:
    """Return GPT-2's head_dim, 64, if it is supported, else the first that is."""
    return 64 if 64 in (takes.head_dims or (64,)) else takes.head_dims[0]
