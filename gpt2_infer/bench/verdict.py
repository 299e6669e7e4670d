"""The whole verdict on a backend: the stages before and after the judge's suite."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_kernels.contract import dtype_name
from attention_kernels.inspection import resources
from attention_kernels.judge.cases import usual_head_dim
from attention_kernels.judge.pattern import pattern
from attention_kernels.judge.suite import RACES, Failure, Report
from attention_kernels.judge.truth import budget_factor
from attention_kernels.ladder import compilers
from gpt2_infer.bench.kernels import Kernels
from gpt2_infer.bench.record import BASELINE, Row
from gpt2_infer.bench.study import KernelStudy, time_cells

NVCC_ARCH = "90"  # an emulated version is also test-compiled for this


@dataclass
class Findings:
    """The judge's report on a backend, and the results of the stages before and after the suite."""

    report: Report
    sanitized: bool
    """Whether the sanitizers ran, too."""
    quick: bool
    failures: list[Failure]
    nvcc: str = ""
    """For a version that passed in the emulator: whether nvcc compiles it."""
    timing: list[Row] = field(default_factory=list)
    """For a kernel that passed, unless emulated: its time and NAIVE_PYTORCH's, per dtype."""

    @property
    def passed(self) -> bool:
        """Whether the suite ran, and no stage found a failure."""
        return self.report.passed and not self.failures

    @property
    def emulated(self) -> bool:
        """Whether it ran in the CPU emulator."""
        return self.report.spec.is_emulated(self.report.device)

    @property
    def few_shapes(self) -> bool:
        """Whether it is compiled for each shape, so that only a few were tried."""
        return self.report.device in self.report.spec.compiles_per_shape_on

    @property
    def budget_rule(self) -> str:
        """The rule for error budgets, in words; empty if no case ran."""
        if self.report.worst is None:
            return ""
        spec, dtype = self.report.spec, dtype_name(self.report.worst[0].dtype)
        return (
            f"{spec.error_slack * budget_factor(spec.precisions[dtype]):g} times the distance of "
            "plain PyTorch from float64, or what rounding the scores explains, and a few units in "
            "the last place"
        )

    @property
    def pattern(self) -> str:
        """What all failed cases have in common and few others do, in words."""
        return pattern(self.report.tried)

    @property
    def worst(self) -> dict[str, Any] | None:
        """The case nearest to its budget, and its errors by each rule that judges it."""
        if self.report.worst is None:
            return None
        case, verdict = self.report.worst
        rows = [
            {"rule": rule, "error": error, "budget": budget, "naive_error": naive}
            for rule, error, budget, naive in verdict.rules
            if math.isfinite(budget)
        ]
        return {"case": str(case), "status": verdict.status, "errors": rows}

    def to_json(self) -> dict[str, Any]:
        """Return the fields that docs/cli.md lists."""
        fields = {**vars(self.report), **vars(self)}
        for name in ("report", "spec", "tried"):
            del fields[name]
        for name in ("passed", "emulated", "few_shapes", "budget_rule", "pattern", "worst"):
            fields[name] = getattr(self, name)
        spec = self.report.spec
        return {"name": spec.name, **fields, "error_slack": spec.error_slack}


def start_cuda() -> None:
    """Start CUDA in this process, which takes a second, while the suite runs."""
    if torch.cuda.is_available():
        threading.Thread(target=torch.zeros, args=[1], kwargs={"device": "cuda"}).start()


def sanitize(name: str, device: str, schedules: int) -> list[Failure]:
    """Return what the sanitizers of the device find, in the emulator in several orders."""
    from attention_kernels.inspection import sanitize as sanitizers

    print(f"{name}: looking for bad accesses and races ...", file=sys.stderr)
    faults = sanitizers.sanitize([name], device, schedules=schedules)
    return [Failure("bad accesses and races", fault, "sanitizers") for fault in faults]


def conclude(
    findings: Findings, faults: Sequence[Failure], name: str, dtypes: Sequence[str], *, timed: bool
) -> Findings:
    """Add what the sanitizers found and, for a backend that passed, what nvcc says or the times.

    name, dtypes: as suite.verify() got them. timed: time it, unless it is emulated.
    """
    races = sum(failure.what.startswith(RACES) for failure in findings.failures)
    findings.failures[races:races] = faults  # a race explains other faults
    if findings.passed and findings.emulated:
        _compile(findings)
    elif findings.passed and timed:
        _time(findings, name, dtypes or findings.report.spec.dtypes)
    return findings


def _compile(findings: Findings) -> None:
    """Add whether nvcc compiles an emulated version."""
    version = findings.report.spec.version
    if version is None:
        return
    if compilers.find_nvcc() is None:
        findings.nvcc = "nvcc not found: its flags were not tried"
        return
    if version.uses_torch and torch.version.cuda is None:
        findings.nvcc = "nvcc was not tried: it needs the headers of a PyTorch with CUDA"
        return
    try:
        summary = resources.compile_summary(version, NVCC_ARCH)
    except compilers.BuildError as error:
        what = f"nvcc does not compile it for sm_{NVCC_ARCH}"
        findings.failures.append(Failure(what, str(error), "nvcc"))
    else:
        findings.nvcc = f"nvcc: compiles for sm_{NVCC_ARCH}, {summary}"


def _time(findings: Findings, name: str, dtypes: Sequence[str]) -> None:
    """Add the times of a kernel and of plain PyTorch, or why the check before them failed."""
    report = findings.report
    study = KernelStudy(
        backends=[name],
        seqlens=[1024 if report.device == "cuda" else 256],
        head_dims=[usual_head_dim(report.spec.head_dims)],
        dtypes=[*dtypes],
        decode=not report.has_attention,
    )
    study.device = "cuda" if report.device == "cuda" else "cpu"
    subject = Kernels(study)
    with subject.processes:
        subject.limits(is_recorded=False)
        findings.timing = [row for row in time_cells(subject) if row.metric == "time"]
    for row in findings.timing:
        is_other = row.contender == BASELINE != report.spec.name
        if row.status == "failed" and not is_other:
            findings.failures.append(Failure(str(row.kernel), row.reason, "timing"))
