"""gpt2-infer verify."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import EXIT_FAILED, show
from gpt2_infer.cli.kernels import usual_head_dim
from gpt2_infer.cli.options import DTYPES, SEED, seconds

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from attention_kernels.judge.conformance import Case, DecodeCase, Failure, Report
    from attention_kernels.ladder.header import VersionHeader

SHOWN_FAILURES = 5
SANITIZE = (
    "also look for bad accesses and races: with AddressSanitizer in the emulator, with "
    "compute-sanitizer on a GPU"
)
NVCC_ARCH = "90"  # an emulated version is also test-compiled for this


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("name", metavar="BACKEND", help="backend name or version file, *.cu, of no ladder")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if it runs there, else cpu")
    add("--dtypes", nargs="+", choices=(*DTYPES, "float64"), help="default: all")
    add("--seed", type=SEED, help="seed of the inputs (default: drawn)")
    add(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds per check (default: 300)",
    )
    add("--sanitize", action="store_true", help=SANITIZE)
    add("--no-timing", action="store_true", help="only check; emulated kernels are never timed")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels import registry

    names = [arguments.name]
    if (spec := registry.registered(arguments.name)) and spec.chooses is not None:
        import torch

        device = arguments.device or ("cpu" if spec.unavailable_reason("cuda") else "cuda")
        rungs = {
            spec.chosen(torch.float32, head_dim, device, seqlen).name
            for head_dim, seqlen in itertools.product(spec.head_dims, (1, None))
        }
        names = sorted(rungs)
    passed = [_verify(arguments, name) for name in names]
    show("PASSED" if all(passed) else "FAILED")
    return 0 if all(passed) else EXIT_FAILED


def _verify(arguments: argparse.Namespace, name: str) -> bool:
    """Check one backend, by name or version file, and print the findings."""
    from attention_kernels.judge.conformance import verify

    if arguments.sanitize and not _sanitized(name, arguments.device):
        return False
    report = verify(
        name,
        arguments.device or "",
        dtypes=tuple(arguments.dtypes or ()),
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        progress=True,
    )
    spec, device = report.spec, report.device
    is_emulated = device in spec.emulated_on
    sanitized = ", sanitized" if arguments.sanitize else ""
    ran = f"{report.checks} of {report.total}" if report.stopped else report.checks
    counted = f": {ran} checks, seed {report.seed}" if report.total else ""
    show(f"{_where(spec, device)}{counted}{sanitized}")
    if spec.error_slack != 1:
        show(f"  its budgets are {spec.error_slack:g} times its precision class's, as it declares")
    _print_findings(report)
    if report.worst:
        show(f"  a budget is {_rule(spec, report.worst[0])}")
    if report.killed and is_emulated and not arguments.sanitize:
        show("  probably an access out of bounds: --sanitize shows where")
    passed = report.passed
    if passed and is_emulated and spec.version:
        passed = _nvcc_compiles(spec.version)
    if passed and is_emulated:
        show("  no timing: it ran in the CPU emulator, which says nothing about its speed")
    elif passed and not arguments.no_timing and report.has_attention:
        dtypes = tuple(arguments.dtypes or spec.dtypes)
        passed = _short_timing(spec, name, device, dtypes)
    return passed


def _where(spec: BackendSpec, device: str) -> str:
    return f"{spec.name} on {device}{', emulated' if device in spec.emulated_on else ''}"


def _sanitized(name: str, device: str | None) -> bool:
    """Print what the sanitizers of the device find; return whether that is nothing."""
    from attention_kernels import ladder
    from attention_kernels.inspection.sanitize import sanitize

    spec = ladder.resolve(name)
    device = device or ("cpu" if spec.unavailable_reason("cuda") else "cuda")
    where = _where(spec, device)
    print(f"{where}: looking for bad accesses and races ...", file=sys.stderr)
    faults = sanitize([name], device)
    if faults:
        show(f"{where}, sanitized")
        for fault in faults:
            show(f"  FAILED: {fault}")
        show("  the suite did not run")
    return not faults


def _print_findings(report: Report) -> None:
    """Print the refusals and the first few failures; similar failures are shown once."""
    for refusal in report.refusals:
        show(f"  refused: {refusal}")
    if report.total and report.failures:
        stopped = ", and the suite stopped there" if report.stopped else ""
        show(f"  {len(report.failures)} of them failed{stopped}")
    alike: dict[str, list[Failure]] = {}
    for failure in report.failures:
        numberless = re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", failure.why)
        alike.setdefault(numberless, []).append(failure)
    groups = list(alike.values())
    for first, *others in groups[:SHOWN_FAILURES]:
        show(f"  FAILED: {first.what}\n          {first.why}")
        if others:
            show(f"          and {len(others)} more like it")
    if more := sum(map(len, groups[SHOWN_FAILURES:])):
        show(f"  and {more} more failures")
    if report.passed and report.worst:
        case, verdict = report.worst
        show(f"  {'worst' if verdict.status == 'passed' else 'borderline'}: {case}")
        for name, error, budget, naive in (
            ("error", verdict.error, verdict.budget, verdict.naive_error),
            ("by row", verdict.row_error, verdict.row_budget, verdict.naive_row_error),
            ("by column", verdict.column_error, verdict.column_budget, verdict.naive_column_error),
        ):
            if budget < math.inf:
                show(f"    {name:<9} {error:.2e}, budget {budget:.2e}, plain PyTorch's {naive:.2e}")


def _rule(spec: BackendSpec, case: Case | DecodeCase) -> str:
    """Return the rule for error budgets in words."""
    from attention_kernels.contract import dtype_name
    from attention_kernels.judge.reference import budget_factor

    times = spec.error_slack * budget_factor(spec.precisions[dtype_name(case.dtype)])
    return (
        f"{times:g} times the distance of plain PyTorch from float64, or what rounding the scores "
        "explains, and a few units in the last place"
    )


def _nvcc_compiles(version: VersionHeader) -> bool:
    """Print whether nvcc compiles an emulated version; return False only if it does not."""
    from attention_kernels.inspection import resources
    from attention_kernels.ladder import compilers

    if compilers.find_nvcc() is None:
        show("  nvcc not found: its flags were not tried")
        return True
    try:
        summary = resources.compile_summary(version, NVCC_ARCH)
    except compilers.BuildError as error:
        show(f"  FAILED: nvcc does not compile it for sm_{NVCC_ARCH}: {error}")
        return False
    show(f"  nvcc: compiles for sm_{NVCC_ARCH}, {summary}")
    return True


def _short_timing(spec: BackendSpec, name: str, device: str, dtypes: Sequence[str]) -> bool:
    """Print the time next to plain PyTorch's; return whether the check before it passed."""
    from gpt2_infer.bench.record import KernelCell
    from gpt2_infer.bench.study import KernelStudy, run

    head_dim = usual_head_dim(spec)
    seqlen = 1024 if device == "cuda" else 256
    cells = [KernelCell(seqlen, 1, 12, head_dim, dtype) for dtype in dtypes]
    study = KernelStudy(backends=[name], cells=cells, dtypes=[*dtypes])
    study.device = "cuda" if device == "cuda" else "cpu"
    found = run(study)
    for dtype in dtypes:
        show(f"  time of the kernel alone, N={seqlen} H=12 head_dim={head_dim}, {dtype}:")
        for row in found.of("time"):
            if row.samples and row.kernel.dtype == dtype:
                low, high = row.spread
                show(f"    {row.contender:<34} {row.median:9.1f} us ({low:.1f} .. {high:.1f})")
    mine = (row for row in found.of("time") if row.contender == spec.name)
    failed = [row for row in mine if row.status == "failed"]
    for row in failed:
        show(f"  FAILED: N={seqlen} H=12 head_dim={head_dim}, {row.kernel.dtype}")
        show(f"          {row.reason}")
    return not failed
