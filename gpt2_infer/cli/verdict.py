"""What verify finds out about a backend, as data: for its text, its JSON and the tool of `mcp`."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gpt2_infer.cli.compare import Timing, timings
from gpt2_infer.cli.kernels import usual_head_dim

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from attention_kernels.judge import conformance
    from attention_kernels.judge.conformance import Case, DecodeCase, Report
    from attention_kernels.judge.reference import Verdict
    from attention_kernels.ladder.header import VersionHeader

NVCC_ARCH = "90"  # an emulated version is also test-compiled for this


@dataclass(frozen=True)
class Failure:
    """Something that is wrong, and the stage that found it."""

    stage: Literal["sanitizers", "suite", "nvcc", "timing"]
    what: str
    """What was checked."""
    why: str


@dataclass(frozen=True)
class Error:
    """An error of the case nearest to its budget, and plain PyTorch's; None if not finite."""

    rule: Literal["error", "by row", "by column"]
    error: float | None
    budget: float | None
    naive_error: float | None


@dataclass(frozen=True)
class Worst:
    """The case nearest to its budget, or farthest over it."""

    case: str
    status: Literal["passed", "borderline", "failed"]
    errors: list[Error]


@dataclass
class Findings:
    """What the stages of verify() found: sanitizers, suite, nvcc and timing."""

    name: str
    device: str
    emulated: bool
    sanitized: bool
    """Whether the sanitizers ran; if they found something, the suite did not run."""
    quick: bool = False
    """Whether only the beginning of the suite ran."""
    seed: int | None = None
    """The seed of the inputs; None if the suite did not run."""
    total: int = 0
    """The number of checks in the suite: cases and others."""
    checks: int = 0
    """The number of checks that ran."""
    cases: int = 0
    """The number of cases that ran."""
    calls: int = 0
    """The number of calls of the kernel, all in one process."""
    has_attention: bool = True
    """Whether it has an attention kernel; without one, only decode was tested."""
    stopped: bool = False
    """Whether the suite stopped early."""
    killed: bool = False
    """Whether a signal killed the process that the kernel ran in."""
    few_shapes: bool = False
    """Whether it was tried with a few shapes only, because it is compiled for each."""
    error_slack: float = 1.0
    """The factor by which the backend declares its budgets to be larger."""
    budget_rule: str = ""
    """The rule for budgets, in words."""
    failures: list[Failure] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """The cases that the backend refuses, with its reasons; they do not count as failures."""
    pattern: str = ""
    """What all failed cases of the suite have in common, unless it may be chance."""
    worst: Worst | None = None
    nvcc: str = ""
    """For a version that passed in the emulator: what nvcc says."""
    timing: list[Timing] = field(default_factory=list)
    """For a kernel that passed, unless emulated: its time and NAIVE_PYTORCH's, per dtype."""
    passed: bool = False


@dataclass(frozen=True)
class Verdicts:
    """The findings for each backend that a name stands for, usually one."""

    passed: bool
    backends: list[Findings]


def verdicts(
    name: str,
    *,
    device: str | None = None,
    dtypes: Sequence[str] = (),
    seed: int | None = None,
    timeout_s: float = 300.0,
    sanitize: bool = False,
    timing: bool = True,
    quick: bool = False,
    progress: bool = False,
    on_failure: Callable[[conformance.Failure], object] = lambda _: None,
    on_check: Callable[[int, int], object] = lambda done, total: None,
) -> Verdicts:
    """Verify a backend or version file; for an alias, every backend that it stands for.

    The arguments are those of conformance.verify(). sanitize: look for bad accesses and races
    first. timing: time what passes, unless it is emulated. Raises the errors of
    conformance.verify().
    """
    from attention_kernels.judge import conformance

    if timing:  # before a backend's process could write a file that takes a module's place
        importlib.import_module("gpt2_infer.bench.kernels")
    found = []
    for one in _stands_for(name, device):
        if sanitize and (faulty := _sanitized(one, device)):
            found.append(faulty)
            continue
        report = conformance.verify(
            one,
            device or "",
            dtypes=tuple(dtypes),
            seed=seed,
            timeout_s=timeout_s,
            quick=quick,
            progress=progress,
            on_failure=on_failure,
            on_check=on_check,
        )
        findings = _findings(report, sanitized=sanitize)
        findings.quick = quick
        spec = report.spec
        if findings.passed and findings.emulated and spec.version:
            _compile(findings, spec.version)
        elif findings.passed and not findings.emulated and timing:
            _time(findings, spec, one, tuple(dtypes or spec.dtypes))
        findings.passed = findings.passed and not findings.failures
        found.append(findings)
    return Verdicts(all(findings.passed for findings in found), found)


def _stands_for(name: str, device: str | None) -> list[str]:
    """Return the backends that an alias stands for; another name stands for itself."""
    from attention_kernels import registry

    spec = registry.registered(name)
    if spec is None or spec.chooses is None:
        return [name]
    import torch

    from attention_kernels.backends import cuda

    device = device or registry.preferred_device(spec)
    rungs = {
        spec.chosen(getattr(torch, dtype), head_dim, device, seqlen).name
        for dtype, head_dim, seqlen in itertools.product(
            spec.precisions, spec.head_dims, (*cuda.LENGTHS, None)
        )
    }
    return sorted(rungs)


def _sanitized(name: str, device: str | None) -> Findings | None:
    """Return what the sanitizers of the device find, if anything."""
    from attention_kernels import ladder, registry
    from attention_kernels.inspection.sanitize import sanitize

    spec = ladder.resolve(name)
    device = device or registry.preferred_device(spec)
    emulated = device in spec.emulated_on
    where = f"{spec.name} on {device}{', emulated' * emulated}"
    print(f"{where}: looking for bad accesses and races ...", file=sys.stderr)
    faults = sanitize([name], device)
    failures = [Failure("sanitizers", "bad accesses and races", fault) for fault in faults]
    return Findings(spec.name, device, emulated, True, failures=failures) if failures else None


def _findings(report: Report, *, sanitized: bool) -> Findings:
    from attention_kernels.judge.pattern import pattern

    spec = report.spec
    return Findings(
        spec.name,
        report.device,
        report.device in spec.emulated_on,
        sanitized,
        seed=report.seed,
        total=report.total,
        checks=report.checks,
        cases=report.cases,
        calls=report.calls,
        has_attention=report.has_attention,
        stopped=report.stopped,
        killed=report.killed,
        few_shapes=report.device in spec.compiles_per_shape_on,
        error_slack=spec.error_slack,
        budget_rule=_rule(spec, report.worst[0]) if report.worst else "",
        failures=[Failure("suite", failure.what, failure.why) for failure in report.failures],
        refusals=report.refusals,
        pattern=pattern(report.tried),
        worst=_worst(*report.worst) if report.worst else None,
        passed=report.passed,
    )


def _worst(case: Case | DecodeCase, verdict: Verdict) -> Worst:
    def errors() -> Iterator[Error]:
        yield error("error", verdict.error, verdict.budget, verdict.naive_error)
        yield error("by row", verdict.row_error, verdict.row_budget, verdict.naive_row_error)
        column = verdict.column_error, verdict.column_budget, verdict.naive_column_error
        yield error("by column", *column)

    def error(rule: Literal["error", "by row", "by column"], *values: float) -> Error:
        return Error(rule, *(value if math.isfinite(value) else None for value in values))

    return Worst(str(case), verdict.status, [one for one in errors() if one.budget is not None])


def _rule(spec: BackendSpec, case: Case | DecodeCase) -> str:
    """Return the rule for error budgets in words."""
    from attention_kernels.contract import dtype_name
    from attention_kernels.judge.reference import budget_factor

    times = spec.error_slack * budget_factor(spec.precisions[dtype_name(case.dtype)])
    return (
        f"{times:g} times the distance of plain PyTorch from float64, or what rounding the scores "
        "explains, and a few units in the last place"
    )


def _compile(findings: Findings, version: VersionHeader) -> None:
    """Add whether nvcc compiles an emulated version."""
    from attention_kernels.inspection import resources
    from attention_kernels.ladder import compilers

    if compilers.find_nvcc() is None:
        findings.nvcc = "nvcc not found: its flags were not tried"
        return
    try:
        summary = resources.compile_summary(version, NVCC_ARCH)
    except compilers.BuildError as error:
        what = f"nvcc does not compile it for sm_{NVCC_ARCH}"
        findings.failures.append(Failure("nvcc", what, str(error)))
    else:
        findings.nvcc = f"nvcc: compiles for sm_{NVCC_ARCH}, {summary}"


def _time(findings: Findings, spec: BackendSpec, name: str, dtypes: Sequence[str]) -> None:
    """Add the times of a kernel and of plain PyTorch, or why the check before them failed."""
    from gpt2_infer.bench.study import KernelStudy, run

    head_dim = usual_head_dim(spec)
    seqlen = 1024 if findings.device == "cuda" else 256
    study = KernelStudy(
        backends=[name],
        seqlens=[seqlen],
        head_dims=[head_dim],
        dtypes=[*dtypes],
        decode=not findings.has_attention,
    )
    study.device = "cuda" if findings.device == "cuda" else "cpu"
    findings.timing = timings(run(study))
    for one in findings.timing:
        if one.status == "failed" and one.backend == spec.name:
            what = f"N={seqlen} H=12 head_dim={head_dim}, {one.dtype}"
            findings.failures.append(Failure("timing", what, one.reason))
