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
    from attention_kernels.inspection.sass.timing import Prediction
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
    from gpt2_infer.cli.kernels import usual_head_dim, version_of
    from gpt2_infer.cli.predict import to_json
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
        "\n".join(_times(findings, found, planned.kernel, usual_head_dim(version))),
    )
    files = planned.write(evidence)
    if arguments.json:
        predicted = None if isinstance(found, str) else to_json(found)
        value = {"out": str(planned.folder), "name": planned.name, "files": files}
        show_json(value | {"verdict": dataclasses.asdict(findings), "predicted": predicted})
    else:
        show(f"wrote {planned.folder}: {len(files)} files, {planned.kind} {planned.name}")
        show(f"next: see {planned.folder / 'README.md'}")
    return 0


def _verify(findings: Findings, kernel: str) -> str:
    """Return the command that repeats the verdict."""
    options = ["--device", findings.device, "--quick", "--seed", str(findings.seed)]
    return shlex.join(["gpt2-infer", "verify", kernel, *options])


def _refusal(findings: Findings, name: str) -> str:
    """Return in one sentence why a kernel is not exported."""
    why = [f"it failed: {failure.what}: {failure.why}" for failure in findings.failures]
    refused = "it refused whatever was tried"
    because = (why or [refused])[0]
    return f"{findings.name} is not exported, because {because} ({_verify(findings, name)})"


def _where(findings: Findings) -> str:
    import torch

    if findings.device == "cuda":
        return f"on {torch.cuda.get_device_name()}"
    return "in the CPU emulator" if findings.emulated else "on the CPU"


def _verdict(findings: Findings, kernel: str) -> Iterator[str]:
    """Yield the lines about correctness: the command, the worst case, its errors and budgets."""
    yield f"It passed {findings.checks} checks against float64 {_where(findings)}:"
    yield f"\n```\n{_verify(findings, kernel)}\n```\n"
    if worst := findings.worst:
        yield f"The case closest to its error budget, {worst.case}:\n"
        yield "| rule | error | budget | error of plain PyTorch |\n|---|---|---|---|"
        for one in worst.errors:
            numbers = (one.error, one.budget, one.naive_error)
            cells = ("not finite" if number is None else f"{number:.2e}" for number in numbers)
            yield f"| {one.rule} | {' | '.join(cells)} |"
        yield f"\nA budget is {findings.budget_rule}."
    if findings.nvcc:
        yield f"\n{findings.nvcc}."


def _predict(name: str) -> Prediction | str:
    """Return the predicted time of 1,024 tokens, or why it cannot be predicted."""
    from attention_kernels import UnsupportedError
    from attention_kernels.ladder.compilers import BuildError
    from gpt2_infer.cli import Parser, predict

    parser = Parser()
    predict.add_options(parser)
    try:
        return predict.find(parser.parse_args([name, "--gpu", GPU]))[0]
    except (BuildError, UnsupportedError) as error:
        return str(error)


def _times(
    findings: Findings, found: Prediction | str, kernel: str, head_dim: int
) -> Iterator[str]:
    """Yield the lines about time: what was measured, what is predicted, and the commands."""
    command = f"\n```\n{shlex.join(['gpt2-infer', 'verify', kernel])}\n```\n"
    if findings.timing:
        yield f"The kernel alone, {_where(findings)}:\n"
        yield "| backend | inputs | median, us | fastest | slowest |\n|---|---|---|---|---|"
        for one in findings.timing:
            shape = f"N={one.seqlen} H={one.num_heads} head_dim={one.head_dim}, {one.dtype}"
            times = (one.median_us, one.min_us, one.max_us)
            cells = (one.status if time is None else f"{time:.1f}" for time in times)
            yield f"| {one.backend} | {shape} | {' | '.join(cells)} |"
        yield command
    elif findings.has_attention:
        yield f"Not measured, because there was no GPU. This checks and times it on one:\n{command}"
    else:
        yield "Not measured: only kernels that compute attention are timed alone, not decoding.\n"
    if isinstance(found, str):
        yield f"No time is predicted: {found}."
        return
    shape = f"N={found.seqlen} H=12 head_dim={head_dim}"
    yield f"Predicted for {found.gpu}, {shape}: {found.time_us:.0f} us, bound by {found.bound}."
    yield "That is a model of its machine code, not a measurement:"
    yield f"\n```\n{shlex.join(['gpt2-infer', 'predict', kernel, '--gpu', GPU])}\n```"
