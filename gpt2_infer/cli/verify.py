"""The command `gpt2-infer verify`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from attention_kernels import child
from gpt2_infer.cli import options
from gpt2_infer.cli.versions import adapted

if TYPE_CHECKING:
    from attention_kernels.judge.suite import Failure
    from gpt2_infer.bench.record import Row
    from gpt2_infer.bench.verdict import Findings

SHOWN_FAILURES = 5


def verify(
    name: Annotated[str, options.BACKEND],
    /,
    *,
    entry: str | None = None,
    device: options.Device | None = None,
    dtypes: Annotated[tuple[options.KernelDtype, ...], options.MANY] = (),
    seed: options.Seed | None = None,
    timeout_s: Annotated[options.Seconds, options.TIMEOUT] = 300.0,
    sanitize: bool = False,
    schedules: options.Count = 1,
    quick: bool = False,
    no_timing: bool = False,
    on_check: Annotated[Callable[[int, int], object], options.HIDDEN] = lambda done, total: None,
) -> Findings:
    """Check a backend against float64 references, and time it if it passes.

    Passed means that no check of a suite, with inputs drawn from `seed`, found an error over its
    budget, a dependence on later keys, a race or state shared between calls. It is no proof. The
    kernel runs in a process of its own; timeout_s limits each check. Without a seed, one is drawn
    and reported, to repeat the run. Raises the errors of suite.verify().

    Args:
        name: backend name or version file, *.cu
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        device: cuda, cuda:1 or the like, or cpu (default: cuda if it runs there, else
            cpu)
        dtypes: dtypes (default: all)
        seed: seed of the inputs (default: drawn)
        timeout_s: time limit of each check in seconds
        sanitize: also look for bad accesses and races: with AddressSanitizer in the emulator,
            with compute-sanitizer on a GPU
        schedules: with sanitize, the number of orders and delays of blocks and warps in the
            emulator
        quick: run only the checks that find the most in their time, and do not time the kernel
        no_timing: only check; emulated kernels are never timed
        on_check: called after each check with the number that are done and of all
    """
    child.start_server()  # it imports torch while this process does
    from attention_kernels.judge import process, suite
    from gpt2_infer.bench import verdict

    (name,) = adapted([name], entry)
    process.keep_memory()
    timed = not (no_timing or quick)
    if timed and device != "cpu":
        verdict.start_cuda()
    faults = verdict.sanitize(name, device or "", schedules) if sanitize else []
    report = suite.verify(
        name,
        device or "",
        dtypes=dtypes,
        seed=seed,
        quick=quick,
        timeout_s=timeout_s,
        on_check=on_check,
    )
    findings = verdict.Findings(report, sanitize, quick, [*report.failures])
    return verdict.conclude(findings, faults, name, dtypes, timed=timed)


def text(findings: Findings, **_: object) -> str:
    """Return the verdict and its reasons."""
    return "\n".join([*_lines(findings), "PASSED" if findings.passed else "FAILED"])


def _lines(findings: Findings) -> Iterator[str]:
    report = findings.report
    emulated = ", emulated" if findings.emulated else ""
    sanitized = ", sanitized" if findings.sanitized else ""
    of = "" if report.checks == report.total else f" of {report.total}"
    calls = f"{report.calls:,} calls in one process"
    counted = f": {report.checks}{of} checks, {calls}, seed {report.seed}" if report.total else ""
    yield f"{report.spec.name} on {report.device}{emulated}{counted}{sanitized}"
    yield from _scope(findings) if report.total else ["  the suite did not run"]
    shown = _distinct(findings.failures)
    yield from (f"  FAILED: {failure.what}\n          {failure.why}" for failure in shown)
    if report.failures:
        count, more = len(report.failures), len(report.failures) - len(shown)
        stopped = ", and the suite stopped there" if report.stopped else ""
        similar = f"; {more} of them, most like those above, are not shown" if more else ""
        yield f"  {count} of them failed{stopped}{similar}"
        if common := findings.pattern:
            yield f"  {common}"
    elif worst := findings.worst:
        status = worst["status"]
        yield f"  {'worst' if status == 'passed' else status}: {worst['case']}"
        for row in worst["errors"]:
            numbers = (row["error"], row["budget"], row["naive_error"])
            measured, budget, naive = (f"{number:.2e}" for number in numbers)
            yield f"    {row['rule']:<9} {measured}, budget {budget}, plain PyTorch's {naive}"
    if findings.budget_rule:
        yield f"  a budget is {findings.budget_rule}"
    if report.killed and findings.emulated and not findings.sanitized:
        yield "  probably an access out of bounds: --sanitize shows where"
    if findings.nvcc:
        yield f"  {findings.nvcc}"
    if findings.passed and findings.emulated:
        yield "  no timing: it ran in the CPU emulator, which says nothing about its speed"
    yield from times(findings.timing)


def _scope(findings: Findings) -> Iterator[str]:
    """Yield how the checks or their budgets differ from the usual, if they do."""
    from attention_kernels.judge import cases, suite

    report, spec = findings.report, findings.report.spec
    if findings.quick:
        share = f"{suite.QUICK_SHARE:.0%} of the planted faults"
        yield f"  quick: the beginning of the suite, in which {share} show"
    if findings.emulated and report.has_attention:
        yield f"  no length above {cases.LONGEST_EMULATED:,}: it was emulated"
    if findings.few_shapes:
        count = len(cases.COMPILED_RANGES) * cases.shapes_of_range(spec)
        says = "" if spec.is_ours else ", as it says"
        shapes = f"{count} shapes of each dtype"
        yield f"  only {shapes} were tried in the cases: it is compiled for each{says}"
    if spec.head_dims and not spec.is_ours:
        yield f"  only head_dim {', '.join(map(str, spec.head_dims))} was tried, as it declares"
    if spec.version and spec.version.only:
        yield f"  only calls with `{spec.version.only}` were tried, as it declares"
    if spec.error_slack != 1:
        times = f"{spec.error_slack:g} times"
        yield f"  its budgets are {times} its precision class's, as it declares"
    if not report.has_attention:
        yield "  only decode was tested: it has no attention kernel"
    yield from (f"  not isolated: {reason}" for reason in report.not_isolated)
    yield from (f"  refused: {refusal}" for refusal in report.refusals)


def _distinct(failures: Sequence[Failure]) -> list[Failure]:
    """Return the first few failures, without those whose reasons differ in numbers only."""
    kinds: dict[str, Failure] = {}
    for failure in failures:
        kinds.setdefault(re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", failure.why), failure)
    return [*kinds.values()][:SHOWN_FAILURES]


def times(timing: Sequence[Row]) -> Iterator[str]:
    """Yield the time of the kernel alone next to plain PyTorch's."""
    dtype = ""
    for row in timing:
        cell = row.kernel
        if cell.dtype != dtype:
            dtype = cell.dtype
            where = f"N={cell.seqlen} H={cell.num_heads} head_dim={cell.head_dim}, {dtype}"
            yield f"  time of the kernel alone, {where}:"
        if row.samples:
            least, most = row.spread
            remarks = f"; {row.remarks}" if row.remarks else ""
            us = f"{row.median:9.1f} us ({least:.1f} .. {most:.1f})"
            yield f"    {row.contender:<34} {us}{remarks}"
