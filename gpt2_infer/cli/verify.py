"""The command `gpt2-infer verify`."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import to_builtins

from attention_kernels import child
from gpt2_infer.cli.compare import timings
from gpt2_infer.cli.console import EXIT_FAILED, show
from gpt2_infer.cli.options import (
    BACKEND,
    HIDDEN,
    MANY,
    TIMEOUT,
    Device,
    KernelDtype,
    Seconds,
    Seed,
)
from gpt2_infer.cli.versions import usual_head_dim

if TYPE_CHECKING:
    from attention_kernels.judge import suite
    from attention_kernels.judge.suite import Case, DecodeCase, Report
    from attention_kernels.judge.truth import Verdict
    from attention_kernels.ladder.header import VersionHeader

NVCC_ARCH = "90"  # an emulated version is also test-compiled for this
SHOWN_FAILURES = 5


@dataclass(frozen=True)
class Failure:
    """Something that is wrong, and the stage that found it."""

    stage: Literal["sanitizers", "suite", "nvcc", "timing"]
    what: str
    """What was checked."""
    why: str


@dataclass
class Findings:
    """The judge's report on a backend, and what the stages before and after the suite found."""

    report: Report
    sanitized: bool
    """Whether the sanitizers ran; if they found something, the suite did not run."""
    quick: bool
    failures: list[Failure]
    nvcc: str = ""
    """For a version that passed in the emulator: what nvcc says."""
    timing: list[dict[str, Any]] = field(default_factory=list)
    """For a kernel that passed, unless emulated: its time and NAIVE_PYTORCH's, per dtype."""

    @property
    def passed(self) -> bool:
        """Whether the suite ran, and no stage found a failure."""
        return self.report.passed and not self.failures

    @property
    def emulated(self) -> bool:
        """Whether it ran in the CPU emulator."""
        return self.report.device in self.report.spec.emulated_on

    @property
    def budget_rule(self) -> str:
        """The rule for error budgets, in words; empty if no case ran."""
        from attention_kernels.contract import dtype_name
        from attention_kernels.judge.truth import budget_factor

        if self.report.worst is None:
            return ""
        spec, dtype = self.report.spec, dtype_name(self.report.worst[0].dtype)
        return (
            f"{spec.error_slack * budget_factor(spec.precisions[dtype]):g} times the distance of "
            "plain PyTorch from float64, or what rounding the scores explains, and a few units in "
            "the last place"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that docs/cli.md lists."""
        from attention_kernels.judge.pattern import pattern

        report = self.report
        copied = ("device", "total", "checks", "cases", "calls", "has_attention", "stopped")
        return {
            "name": report.spec.name,
            "passed": self.passed,
            "emulated": self.emulated,
            "sanitized": self.sanitized,
            "quick": self.quick,
            "few_shapes": report.device in report.spec.compiles_per_shape_on,
            "seed": report.seed if report.total else None,
            **{name: getattr(report, name) for name in (*copied, "killed", "refusals")},
            "error_slack": report.spec.error_slack,
            "budget_rule": self.budget_rule,
            "failures": to_builtins(self.failures),
            "pattern": pattern(report.tried),
            "worst": _worst(*report.worst) if report.worst else None,
            "nvcc": self.nvcc,
            "timing": self.timing,
        }


@dataclass(frozen=True)
class Verdicts:
    """The findings for each backend that a name stands for, usually one."""

    backends: list[Findings]

    @property
    def passed(self) -> bool:
        """Whether all passed."""
        return all(findings.passed for findings in self.backends)

    def to_json(self) -> dict[str, Any]:
        """Return both."""
        found = [findings.to_json() for findings in self.backends]
        return {"passed": self.passed, "backends": found}


def verify(
    name: Annotated[str, BACKEND],
    /,
    *,
    device: Device | None = None,
    dtypes: Annotated[tuple[KernelDtype, ...], MANY] = (),
    seed: Seed | None = None,
    timeout_s: Annotated[Seconds, TIMEOUT] = 300.0,
    sanitize: bool = False,
    quick: bool = False,
    no_timing: bool = False,
    live: Annotated[bool, HIDDEN] = False,
    on_check: Annotated[Callable[[int, int], object], HIDDEN] = lambda done, total: None,
) -> Verdicts:
    """Check a backend against float64 references, and time it if it passes.

    Passed means that no check of a suite, with inputs drawn from `seed`, found an error over its
    budget, a dependence on later keys, a race or state shared between calls. It is no proof. The
    kernel runs in a process of its own; timeout_s limits each check. Without a seed, one is drawn
    and reported, to repeat the run. An alias is every backend that it stands for. Raises the
    errors of suite.verify().

    Args:
        name: backend name or version file, *.cu
        device: cuda, cuda:1 or the like, or cpu (default: cuda if it runs there, else
            cpu)
        dtypes: dtypes (default: all)
        seed: seed of the inputs (default: drawn)
        timeout_s: time limit of each check in seconds
        sanitize: also look for bad accesses and races: with AddressSanitizer in the emulator,
            with compute-sanitizer on a GPU
        quick: run only the checks that find the most in their time, and do not time the kernel
        no_timing: only check; emulated kernels are never timed
        live: print failures when they are found
        on_check: called after each check with the number that are done and of all
    """
    child.start_server()  # it imports torch while this process does
    if not (no_timing or quick):  # before its process could write a file in a module's place
        importlib.import_module("gpt2_infer.bench.kernels")

    def one(name: str) -> Findings:
        return check(
            name,
            device,
            sanitize=sanitize,
            timing=not (no_timing or quick),
            dtypes=dtypes,
            seed=seed,
            timeout_s=timeout_s,
            quick=quick,
            progress=live,
            on_failure=_Printed() if live else lambda _: None,
            on_check=on_check,
        )

    return Verdicts([*map(one, _stands_for(name, device))])


def check(
    name: str,
    device: str | None = None,
    *,
    sanitize: bool = False,
    timing: bool = True,
    quick: bool = False,
    dtypes: tuple[str, ...] = (),
    **options: Any,
) -> Findings:
    """Return what the stages find about one backend. options: others of suite.verify()."""
    from attention_kernels.judge import suite

    if sanitize and (faulty := _sanitized(name, device, quick=quick)):
        return faulty
    report = suite.verify(name, device or "", quick=quick, dtypes=dtypes, **options)
    failures = [Failure("suite", failure.what, failure.why) for failure in report.failures]
    findings = Findings(report, sanitize, quick, failures)
    if findings.passed and findings.emulated and report.spec.version:
        _compile(findings, report.spec.version)
    elif findings.passed and not findings.emulated and timing:
        _time(findings, name, dtypes or report.spec.dtypes)
    return findings


def text(found: Verdicts, **_: object) -> str:
    """Return what was found, except the failures that were printed when they were found."""
    lines = [line for findings in found.backends for line in _lines(findings)]
    return "\n".join([*lines, "PASSED" if found.passed else "FAILED"])


def exit_status(found: Verdicts) -> int:
    """Return whether one failed."""
    return 0 if found.passed else EXIT_FAILED


def _worst(case: Case | DecodeCase, verdict: Verdict) -> dict[str, Any]:
    """Return the case nearest to its budget, and its errors by each rule; None if not finite."""
    errors = {
        "error": (verdict.error, verdict.budget, verdict.naive_error),
        "by row": (verdict.row_error, verdict.row_budget, verdict.naive_row_error),
        "by column": (verdict.column_error, verdict.column_budget, verdict.naive_column_error),
    }
    rows = []
    for rule, numbers in errors.items():
        error, budget, naive = (one if math.isfinite(one) else None for one in numbers)
        if budget is not None:
            rows.append({"rule": rule, "error": error, "budget": budget, "naive_error": naive})
    return {"case": str(case), "status": verdict.status, "errors": rows}


class _Printed:
    """Prints the first few failures of a suite, similar ones once."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def is_new(self, why: str) -> bool:
        """Return whether a failure is one of the first, and none like it came before."""
        kind = re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", why)
        is_new = kind not in self.kinds and len(self.kinds) < SHOWN_FAILURES
        self.kinds.add(kind)
        return is_new

    def __call__(self, failure: suite.Failure) -> None:
        """Print a failure, unless a similar one was printed."""
        if self.is_new(failure.why):
            show(f"  FAILED: {failure.what}\n          {failure.why}")


def _stands_for(name: str, device: str | None) -> list[str]:
    """Return the backends that an alias stands for; another name stands for itself."""
    from attention_kernels import registry

    spec = registry.registered(name)
    if spec is None or spec.chooses is None:
        return [name]
    import torch

    from attention_kernels.backends import cuda

    device = registry.device_for(spec, device)
    rungs = {
        spec.chosen(getattr(torch, dtype), head_dim, device, seqlen).name
        for dtype, head_dim, seqlen in itertools.product(
            spec.precisions, spec.head_dims, (*cuda.LENGTHS, None)
        )
    }
    return sorted(rungs)


def _sanitized(name: str, device: str | None, *, quick: bool) -> Findings | None:
    """Return what the sanitizers of the device find, if anything."""
    from attention_kernels import ladder, registry
    from attention_kernels.inspection.sanitize import sanitize
    from attention_kernels.judge.suite import Report

    spec = ladder.resolve(name)
    device = registry.device_for(spec, device)
    where = f"{spec.name} on {device}{', emulated' * (device in spec.emulated_on)}"
    print(f"{where}: looking for bad accesses and races ...", file=sys.stderr)
    faults = sanitize([name], device)
    failures = [Failure("sanitizers", "bad accesses and races", fault) for fault in faults]
    report = Report(spec, device, has_attention=True)
    return Findings(report, True, quick, failures) if failures else None


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


def _time(findings: Findings, name: str, dtypes: Sequence[str]) -> None:
    """Add the times of a kernel and of plain PyTorch, or why the check before them failed."""
    from gpt2_infer.bench.study import KernelStudy, run

    report = findings.report
    head_dim, seqlen = usual_head_dim(report.spec), 1024 if report.device == "cuda" else 256
    study = KernelStudy(
        backends=[name],
        seqlens=[seqlen],
        head_dims=[head_dim],
        dtypes=[*dtypes],
        decode=not report.has_attention,
    )
    study.device = "cuda" if report.device == "cuda" else "cpu"
    findings.timing = timings(run(study))
    for one in findings.timing:
        if one["status"] == "failed" and one["backend"] == report.spec.name:
            what = f"N={seqlen} H=12 head_dim={head_dim}, {one['dtype']}"
            findings.failures.append(Failure("timing", what, one["reason"]))


def _lines(findings: Findings) -> Iterator[str]:
    report = findings.report
    emulated = ", emulated" if findings.emulated else ""
    sanitized = ", sanitized" if findings.sanitized else ""
    of = "" if report.checks == report.total else f" of {report.total}"
    counted = (
        f": {report.checks}{of} checks, {report.calls:,} calls in one process, seed {report.seed}"
        if report.total
        else ""
    )
    yield f"{report.spec.name} on {report.device}{emulated}{counted}{sanitized}"
    stages: dict[str, list[Failure]] = {}
    for failure in findings.failures:
        stages.setdefault(failure.stage, []).append(failure)
    if faults := stages.get("sanitizers"):
        yield from (f"  FAILED: {fault.why}" for fault in faults)
        yield "  the suite did not run"
        return
    yield from _scope(findings)
    yield from _outcome(report, stages.get("suite", []))
    if findings.budget_rule:
        yield f"  a budget is {findings.budget_rule}"
    if report.killed and emulated and not sanitized:
        yield "  probably an access out of bounds: --sanitize shows where"
    if findings.nvcc:
        yield f"  {findings.nvcc}"
    yield from (f"  FAILED: {one.what}: {one.why}" for one in stages.get("nvcc", []))
    if findings.passed and emulated:
        yield "  no timing: it ran in the CPU emulator, which says nothing about its speed"
    yield from times(findings.timing)
    yield from (f"  FAILED: {one.what}\n          {one.why}" for one in stages.get("timing", []))


def _scope(findings: Findings) -> Iterator[str]:
    """Yield what was tested by which budgets, if not everything by the usual ones."""
    from attention_kernels.judge import cases, suite

    report = findings.report
    if findings.quick:
        share = f"{suite.QUICK_SHARE:.0%} of the planted faults"
        yield f"  quick: the beginning of the suite, in which {share} show"
    if findings.emulated and report.has_attention:
        yield f"  no length above {cases.LONGEST_EMULATED:,}: it was emulated"
    if report.device in report.spec.compiles_per_shape_on:
        shapes = f"{len(cases.COMPILED_RANGES)} shapes of each dtype"
        yield f"  only {shapes} were tried in the cases: it is compiled for each"
    if report.spec.error_slack != 1:
        times = f"{report.spec.error_slack:g} times"
        yield f"  its budgets are {times} its precision class's, as it declares"
    if not report.has_attention:
        yield "  only decode was tested: it has no attention kernel"
    yield from (f"  refused: {refusal}" for refusal in report.refusals)


def _outcome(report: Report, failures: Sequence[Failure]) -> Iterator[str]:
    """Yield how many checks of the suite failed; without any, the worst case."""
    from attention_kernels.judge.pattern import pattern

    if failures:
        stopped = ", and the suite stopped there" if report.stopped else ""
        printed = _Printed()
        more = sum(not printed.is_new(failure.why) for failure in failures)
        similar = f"; {more} of them, most like those above, are not shown" if more else ""
        yield f"  {len(failures)} of them failed{stopped}{similar}"
        if common := pattern(report.tried):
            yield f"  {common}"
    elif report.worst:
        worst = _worst(*report.worst)
        status = worst["status"]
        yield f"  {'worst' if status == 'passed' else status}: {worst['case']}"
        for one in worst["errors"]:
            numbers = (one["error"], one["budget"], one["naive_error"])
            measured, budget, naive = (f"{number:.2e}" for number in numbers)
            yield f"    {one['rule']:<9} {measured}, budget {budget}, plain PyTorch's {naive}"


def times(timing: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the time of the kernel alone next to plain PyTorch's."""
    dtype = ""
    for one in timing:
        if one["dtype"] != dtype:
            dtype = one["dtype"]
            where = f"N={one['seqlen']} H={one['num_heads']} head_dim={one['head_dim']}, {dtype}"
            yield f"  time of the kernel alone, {where}:"
        if one["median_us"] is not None:
            spread = f"{one['min_us']:.1f} .. {one['max_us']:.1f}"
            yield f"    {one['backend']:<34} {one['median_us']:9.1f} us ({spread})"
