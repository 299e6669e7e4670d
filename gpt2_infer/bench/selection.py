"""Select the backends of a comparison, and check each before it is timed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from attention_kernels import BackendSpec, UnsupportedError, ladder, list_backends
from attention_kernels.judge.calls import describe_error
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import judged, run_check
from attention_kernels.judge.truth import Verdict
from attention_kernels.judge.worker import Runner, open_runner
from attention_kernels.ladder.header import VersionHeader
from attention_kernels.registry import DECODES_ONLY, NO_DECODE
from gpt2_infer.bench import environment
from gpt2_infer.bench.record import Check, KernelCell, ResultsError, Row, Shape
from gpt2_infer.bench.study import BackendStudy
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.errors import RequestError

EMULATED_SEQLEN = 64  # maximum length at which an emulated kernel is checked
EMULATED = "its source runs in the CPU emulator, where a time would mean nothing"


def select(
    study: BackendStudy, *, decode: bool = False
) -> tuple[str, list[BackendSpec], BackendSpec]:
    """Return a study's device, backends and baseline.

    A backend may be the path of a version file, *.cu, that belongs to no ladder. Backends of a
    family are skipped if they cannot run, support none of the dtypes, only decode (with `decode`,
    if they do not) or run emulated. A line on stderr names each family that
    has none left, with the reasons. Raises UnknownBackendError, HeaderError, or RequestError for an
    unknown family, a named backend that cannot be compared for one of these reasons, or when
    nothing is left.
    """
    device, registered = str(resolve_device(study.device)), list_backends()
    known = {spec.family for spec in registered}
    if missing := {*study.families} - known:
        raise RequestError(
            f"no family named {', '.join(sorted(missing))}, only {', '.join(sorted(known))}"
        )

    def refusal(spec: BackendSpec) -> str | None:
        if reason := spec.unavailable_reason(device):
            return reason
        if not {*study.dtypes} & {*spec.dtypes}:
            return f"takes {', '.join(spec.dtypes)}, not {', '.join(study.dtypes)}"
        if spec.version is not None and (spec.version.role == "decode") != decode:
            return NO_DECODE if decode else DECODES_ONLY
        return None

    *named, baseline = ladder.resolve_all([*study.backends, study.baseline])
    for spec in (*named, baseline):
        if reason := refusal(spec):
            raise RequestError(f"{spec.name} cannot be compared on {device}: {reason}")
    reasons = {
        spec: EMULATED if spec.is_emulated(device) else refusal(spec)
        for spec in registered
        if spec.family in study.families or not (study.families or study.backends)
    }
    specs = [spec for spec, reason in reasons.items() if reason is None] + named
    left_out = []
    for family in dict.fromkeys(study.families):
        of_it = [reason for spec, reason in reasons.items() if spec.family == family]
        if None not in of_it:
            left_out.append(f"{family} ({'; '.join(dict.fromkeys(filter(None, of_it)))})")
    if left_out:
        sentence = f"not measured on {device}: {', '.join(left_out)}"
        if not specs:
            raise RequestError(sentence)
        print(sentence, file=sys.stderr)
    return device, list(dict.fromkeys(specs)), baseline


class Runners(contextlib.AbstractContextManager["Runners"]):
    """The processes of backends, each of which starts once and ends with the context.

    most: how many may run at once; the first, the baseline's, stays.
    """

    def __init__(self, device: str, most: int | None = None) -> None:
        self._device, self._most = device, most
        self._open: dict[str, Runner] = {}

    def of(self, spec: BackendSpec) -> Runner:
        """Return a backend's; raises the errors of open_runner()."""
        if spec.name not in self._open:
            if len(self._open) == self._most:
                self._open.pop([*self._open][1]).close()
            self._open[spec.name] = open_runner(spec, self._device)
        return self._open[spec.name]

    def rest(self) -> None:
        """Stop them until the next request, so that their load is in no other backend's time."""
        for runner in self._open.values():
            runner.rest()

    def record(self, row: Row, error: Exception) -> None:
        """Record a kernel's exception; unless it is a refusal, the backend gets a new process.

        The old one may have ended, or have a broken CUDA context.
        """
        record_failure(row, error, self._device)
        if row.status != "refused" and (runner := self._open.pop(row.contender, None)):
            runner.close()

    def __exit__(self, *_: object) -> None:
        for runner in self._open.values():
            runner.close()


def versions_of(family: str) -> dict[str, VersionHeader]:
    """Return the versions of a ladder by backend name; raises RequestError for another name."""
    if versions := ladder.versions(family):
        return versions
    raise RequestError(f"no ladder named {family}, only {', '.join(ladder.families())}")


def case_of(shape: Shape | KernelCell, dtype: str) -> Case:
    """Return the judge's case of a shape."""
    return Case(**msgspec.structs.asdict(shape) | {"dtype": getattr(torch, dtype)})


def chosen(
    specs: Iterable[BackendSpec], kinds: Sequence[tuple[str, int, int]], device: str
) -> list[BackendSpec]:
    """Return the backends, each once, with aliases replaced by the backends they stand for.

    kinds: the measured dtypes, head_dims and lengths. Raises the exceptions of
    BackendSpec.chosen().
    """
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

    Raises the errors of Runner.call(), except a refusal.
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
