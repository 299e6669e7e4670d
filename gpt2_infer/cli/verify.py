"""The command `gpt2-infer verify`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from attention_kernels import child
from attention_kernels.ladder import ahead, header
from gpt2_infer.cli.console import EXIT_FAILED, show, show_json
from gpt2_infer.cli.options import DTYPES, SEED, device_name, seconds

if TYPE_CHECKING:
    from attention_kernels.judge import conformance
    from gpt2_infer.cli.verdict import Failure, Findings, Verdicts

SHOWN_FAILURES = 5
DEVICE = "cuda, cuda:1 or the like, or cpu (default: cuda if it runs there, else cpu)"
SANITIZE = (
    "also look for bad accesses and races: with AddressSanitizer in the emulator, with "
    "compute-sanitizer on a GPU"
)

QUICK = "run only the checks that find the most in their time, and do not time the kernel"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("name", metavar="BACKEND", help="backend name or version file, *.cu, of no ladder")
    add("--device", type=device_name, metavar="NAME", help=DEVICE)
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
    add("--quick", action="store_true", help=QUICK)
    add("--no-timing", action="store_true", help="only check; emulated kernels are never timed")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    start_server(arguments.name, arguments.device or "")
    ahead.import_to_stay("attention_kernels.judge.conformance")
    from gpt2_infer.cli.verdict import verdicts

    failures = _Failures()
    found: Verdicts = verdicts(
        arguments.name,
        device=arguments.device,
        dtypes=arguments.dtypes or (),
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        sanitize=arguments.sanitize,
        timing=not (arguments.no_timing or arguments.quick),
        quick=arguments.quick,
        progress=True,
        on_failure=(lambda _: None) if arguments.json else failures.show,
    )
    if arguments.json:
        show_json(dataclasses.asdict(found))
    else:
        for findings in found.backends:
            _show(findings, failures)
        show("PASSED" if found.passed else "FAILED")
    return 0 if found.passed else EXIT_FAILED


def start_server(name: str, device: str) -> None:
    """Have the server that workers are forked from import torch while this process does.

    It also builds a version file. That may run what the file's author wrote, so hide from it.
    """
    if name.endswith(".cu"):
        header.of_file(Path(name))  # what is wrong with it is told before torch is imported
        os.environ[ahead.VARIABLE] = f"{device}:{name}"
    child.start_server()
    os.environ.pop(ahead.VARIABLE, None)


class _Failures:
    """Prints the first few failures of the suite when they are found, similar ones once."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.shown = 0

    def show(self, failure: conformance.Failure) -> None:
        """Print a failure, unless a similar one was printed."""
        kind = re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", failure.why)
        if kind not in self.kinds and len(self.kinds) < SHOWN_FAILURES:
            show(f"  FAILED: {failure.what}\n          {failure.why}")
            self.shown += 1
        self.kinds.add(kind)


def _show(findings: Findings, printed: _Failures) -> None:
    """Print what was found about one backend, except the failures that were printed already."""
    emulated = ", emulated" if findings.emulated else ""
    sanitized = ", sanitized" if findings.sanitized else ""
    is_whole = findings.checks == findings.total
    ran = findings.checks if is_whole else f"{findings.checks} of {findings.total}"
    counted = (
        f": {ran} checks, {findings.calls:,} calls in one process, seed {findings.seed}"
        if findings.total
        else ""
    )
    show(f"{findings.name} on {findings.device}{emulated}{counted}{sanitized}")
    stages: dict[str, list[Failure]] = {}
    for failure in findings.failures:
        stages.setdefault(failure.stage, []).append(failure)
    if faults := stages.get("sanitizers"):
        for fault in faults:
            show(f"  FAILED: {fault.why}")
        show("  the suite did not run")
        return
    _show_scope(findings)
    suite = stages.get("suite", [])
    _show_outcome(suite, findings, printed)
    if findings.budget_rule:
        show(f"  a budget is {findings.budget_rule}")
    if findings.killed and emulated and not sanitized:
        show("  probably an access out of bounds: --sanitize shows where")
    if findings.nvcc:
        show(f"  {findings.nvcc}")
    for failure in stages.get("nvcc", []):
        show(f"  FAILED: {failure.what}: {failure.why}")
    if findings.passed and emulated:
        show("  no timing: it ran in the CPU emulator, which says nothing about its speed")
    _show_timing(findings)
    for failure in stages.get("timing", []):
        show(f"  FAILED: {failure.what}\n          {failure.why}")


def _show_scope(findings: Findings) -> None:
    """Print what was tested by which budgets, if not everything by the usual ones."""
    if findings.quick:
        from attention_kernels.judge.conformance import QUICK_SHARE

        share = f"{QUICK_SHARE:.0%} of the planted faults"
        show(f"  quick: the beginning of the suite, in which {share} show")
    if findings.emulated and findings.has_attention:
        from attention_kernels.judge.cases import LONGEST_EMULATED

        show(f"  no length above {LONGEST_EMULATED:,}: it was emulated")
    if findings.few_shapes:
        from attention_kernels.judge.cases import COMPILED_RANGES

        shapes = f"{len(COMPILED_RANGES)} shapes of each dtype"
        show(f"  only {shapes} were tried in the cases: it is compiled for each")
    if findings.error_slack != 1:
        times = f"{findings.error_slack:g} times"
        show(f"  its budgets are {times} its precision class's, as it declares")
    if not findings.has_attention:
        show("  only decode was tested: it has no attention kernel")
    for refusal in findings.refusals:
        show(f"  refused: {refusal}")


def _show_outcome(failures: list[Failure], findings: Findings, printed: _Failures) -> None:
    """Print how many checks of the suite failed; without any, the worst case."""
    if findings.total and failures:
        stopped = ", and the suite stopped there" if findings.stopped else ""
        more = len(failures) - printed.shown
        similar = f"; {more} of them, most like those above, are not shown" if more > 0 else ""
        show(f"  {len(failures)} of them failed{stopped}{similar}")
        if findings.pattern:
            show(f"  {findings.pattern}")
    if findings.worst and not failures:
        worst = findings.worst
        show(f"  {'worst' if worst.status == 'passed' else worst.status}: {worst.case}")
        for one in worst.errors:
            measured, budget, naive = f"{one.error:.2e}", f"{one.budget:.2e}", one.naive_error
            show(f"    {one.rule:<9} {measured}, budget {budget}, plain PyTorch's {naive:.2e}")


def _show_timing(findings: Findings) -> None:
    """Print the time of the kernel alone next to plain PyTorch's."""
    dtype = ""
    for one in findings.timing:
        if one.dtype != dtype:
            dtype = one.dtype
            where = f"N={one.seqlen} H={one.num_heads} head_dim={one.head_dim}, {dtype}"
            show(f"  time of the kernel alone, {where}:")
        if one.median_us is not None:
            spread = f"{one.min_us:.1f} .. {one.max_us:.1f}"
            show(f"    {one.backend:<34} {one.median_us:9.1f} us ({spread})")
