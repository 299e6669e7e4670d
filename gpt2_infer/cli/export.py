"""The command `gpt2-infer export`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import EXIT_FAILED, print_error, show, show_json
from gpt2_infer.cli.verify import start_server

if TYPE_CHECKING:
    from attention_kernels.inspection.predict import Prediction
    from gpt2_infer.cli.verdict import Findings

AS = (
    "package: a plug-in for pip; hub: a repository for Hugging Face's kernel-builder, of an "
    "attention kernel with one dtype"
)
OUT = "new folder, whose name becomes the package's and the backend's"
GPU = "h200"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("name", metavar="BACKEND", help="version file, *.cu, or a backend built from one")
    add("--as", dest="kind", choices=("hub", "package"), required=True, help=AS)
    add("--out", type=Path, metavar="DIR", required=True, help=OUT)
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    start_server(arguments.name, "")
    from gpt2_infer import export
    from gpt2_infer.cli.kernels import version_of
    from gpt2_infer.cli.verdict import verdicts

    _, version = version_of(arguments.name)
    planned = export.plan(version, arguments.kind, arguments.out)
    (findings,) = verdicts(arguments.name, quick=True, progress=True).backends
    if not findings.passed:
        print_error("gpt2-infer", _refusal(findings, arguments.name))
        return EXIT_FAILED
    found = _predict(arguments.name)
    evidence = export.Evidence(
        "\n".join(_verdict(findings, planned.kernel)),
        "\n".join(_times(findings, found, planned.kernel)),
    )
    files = planned.write(evidence)
    if arguments.json:
        predicted = None if isinstance(found, str) else dataclasses.asdict(found)
        value = {"out": str(planned.folder), "name": planned.name, "files": files}
        show_json(value | {"verdict": dataclasses.asdict(findings), "predicted": predicted})
    else:
        show(f"wrote {planned.folder}: {len(files)} files, {planned.kind} {planned.name}")
        show(f"next: see {planned.folder / 'README.md'}")
    return 0


def _verify_command(findings: Findings, name: str) -> str:
    seed = ["--seed", str(findings.seed)]
    return shlex.join(["gpt2-infer", "verify", name, "--device", findings.device, "--quick", *seed])


def _refusal(findings: Findings, name: str) -> str:
    """Return in one sentence why a kernel is not exported."""
    first = findings.failures[0]
    return (
        f"{findings.name} is not exported, because it failed: {first.what}: {first.why} "
        f"({_verify_command(findings, name)})"
    )


def _verdict(findings: Findings, kernel: str) -> Iterator[str]:
    """Yield the lines about correctness: the command, the worst case, its errors and budgets."""
    where = f"on {findings.device}, in the CPU emulator" if findings.emulated else "on a GPU"
    yield f"It passed {findings.checks} checks against float64 {where}:"
    yield f"\n```\n{_verify_command(findings, kernel)}\n```\n"
    if worst := findings.worst:
        yield f"The case closest to its error budget, {worst.case}:\n"
        yield "| rule | error | budget | error of plain PyTorch |\n|---|---|---|---|"
        for one in worst.errors:
            yield f"| {one.rule} | {one.error:.2e} | {one.budget:.2e} | {one.naive_error:.2e} |"
        yield f"\nA budget is {findings.budget_rule}."
    if findings.nvcc:
        yield f"\n{findings.nvcc}."


def _predict(name: str) -> Prediction | str:
    """Return the predicted time of 1,024 tokens, or the reason why there is none."""
    from attention_kernels import UnsupportedError
    from attention_kernels.ladder.compilers import BuildError
    from gpt2_infer.cli import Parser, predict

    parser = Parser()
    predict.add_options(parser)
    try:
        return predict.find(parser.parse_args([name, "--gpu", GPU]))[0]
    except (BuildError, UnsupportedError) as error:
        return str(error)


def _times(findings: Findings, found: Prediction | str, kernel: str) -> Iterator[str]:
    """Yield the lines about time: what was measured, what is predicted, and the commands."""
    if timings := [one for one in findings.timing if one.median_us is not None]:
        yield "The kernel alone, on a GPU:\n"
        yield "| backend | inputs | median, us | fastest | slowest |\n|---|---|---|---|---|"
        for one in timings:
            shape = f"N={one.seqlen} H={one.num_heads} head_dim={one.head_dim}, {one.dtype}"
            times = f"{one.median_us:.1f} | {one.min_us:.1f} | {one.max_us:.1f}"
            yield f"| {one.backend} | {shape} | {times} |"
    elif findings.emulated:
        yield "Not measured, because there was no GPU. On one, this checks and times it:"
    else:
        yield "Not measured: only kernels that compute whole rows of attention are timed by"
    yield f"\n```\n{shlex.join(['gpt2-infer', 'verify', kernel])}\n```\n"
    if isinstance(found, str):
        yield f"No time is predicted: {found}."
        return
    yield f"Predicted for {found.gpu}, {found.seqlen} tokens and 12 heads: {found.time_us:.0f} us,"
    yield f"most of it for {found.bound}. That is a model of its machine code, not a measurement:"
    yield f"\n```\n{shlex.join(['gpt2-infer', 'predict', kernel, '--gpu', GPU])}\n```"
