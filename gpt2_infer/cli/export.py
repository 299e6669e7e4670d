"""The command `gpt2-infer export`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from attention_kernels import child
from gpt2_infer.cli.console import EXIT_FAILED, print_error
from gpt2_infer.cli.predict import Predicted, predict
from gpt2_infer.cli.verify import Findings, check, worst_case
from gpt2_infer.cli.versions import usual_head_dim, version_of

if TYPE_CHECKING:
    from attention_kernels.ladder.header import VersionHeader

NAME = "version file, *.cu, or a backend built from one"
AS = "hub: a repository for Hugging Face's kernel-builder, of an attention kernel with one dtype"
OUT = "new folder, whose name becomes the kernel's"
GPU = "h200"


@dataclass(frozen=True)
class Exported:
    """The repository that was written; a kernel that did not pass has none."""

    out: str
    name: str
    files: list[str]
    verdict: Findings
    predicted: Predicted | str
    """The prediction for 1,024 tokens, or why there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return every field; no prediction is null."""
        predicted = None if isinstance(self.predicted, str) else self.predicted.to_json()
        return vars(self) | {"verdict": self.verdict.to_json(), "predicted": predicted}


def export(
    name: Annotated[str, Parameter(help=NAME)],
    /,
    *,
    out: Annotated[Path, Parameter(help=OUT)],
    kind: Annotated[Literal["hub"], Parameter(name="--as", help=AS)] = "hub",
) -> Exported:
    """Write a verified kernel as a repository for Hugging Face's Hub.

    Nothing is written if it fails. Raises RequestError for a folder that cannot be used, and
    UnsupportedError for a version that the Hub does not take.
    """
    child.start_server()
    from gpt2_infer import export as repository

    _, version = version_of(name)
    planned = repository.plan(version, out)
    findings = check(name, quick=True, progress=True)
    if not findings.passed:
        return Exported(str(planned.folder), planned.name, [], findings, "it failed")
    found = _predicted(name)
    evidence = repository.Evidence(
        "\n".join(_verdict(findings, planned.kernel)),
        "\n".join(_times(findings, found, planned.kernel, version)),
    )
    files = planned.write(evidence)
    return Exported(str(planned.folder), planned.name, files, findings, found)


def text(found: Exported, **_: object) -> str:
    """Return what was written, and where to read on; nothing if the kernel failed."""
    if not found.files:
        return ""
    written = f"wrote {found.out}: {len(found.files)} files, hub {found.name}"
    return f"{written}\nnext: see {Path(found.out) / 'README.md'}"


def exit_status(found: Exported) -> int:
    """Return whether the kernel failed, and say so."""
    if found.files:
        return 0
    report, failures = found.verdict.report, found.verdict.failures
    because = "it refused whatever was tried"
    if failures:
        because = f"it failed: {failures[0].what}: {failures[0].why}"
    command = _verify(found.verdict, report.spec.name)
    print_error("gpt2-infer", f"{report.spec.name} is not exported, because {because} ({command})")
    return EXIT_FAILED


def _verify(findings: Findings, kernel: str) -> str:
    """Return the command that repeats the verdict."""
    report = findings.report
    options = ["--device", report.device, "--quick", "--seed", str(report.seed)]
    return shlex.join(["gpt2-infer", "verify", kernel, *options])


def _where(findings: Findings) -> str:
    import torch

    if findings.report.device == "cuda":
        return f"on {torch.cuda.get_device_name()}"
    return "in the CPU emulator" if findings.emulated else "on the CPU"


def _verdict(findings: Findings, kernel: str) -> Iterator[str]:
    """Yield the lines about correctness: the command, the worst case, its errors and budgets."""
    yield f"It passed {findings.report.checks} checks against float64 {_where(findings)}:"
    yield f"\n```\n{_verify(findings, kernel)}\n```\n"
    if findings.report.worst:
        worst = worst_case(*findings.report.worst)
        yield f"The case closest to its error budget, {worst['case']}:\n"
        yield "| rule | error | budget | error of plain PyTorch |\n|---|---|---|---|"
        for one in worst["errors"]:
            numbers = (one["error"], one["budget"], one["naive_error"])
            cells = ("not finite" if number is None else f"{number:.2e}" for number in numbers)
            yield f"| {one['rule']} | {' | '.join(cells)} |"
        yield f"\nA budget is {findings.budget_rule}."
    if findings.nvcc:
        yield f"\n{findings.nvcc}."


def _predicted(name: str) -> Predicted | str:
    from attention_kernels import UnsupportedError
    from attention_kernels.ladder.compilers import BuildError

    try:
        return predict(name, gpu=GPU)[0]
    except (BuildError, UnsupportedError) as error:
        return str(error)


def _times(
    findings: Findings, found: Predicted | str, kernel: str, version: VersionHeader
) -> Iterator[str]:
    """Yield the lines about time: what was measured, what is predicted, and the commands."""
    command = f"\n```\n{shlex.join(['gpt2-infer', 'verify', kernel])}\n```\n"
    if findings.timing:
        yield f"The kernel alone, {_where(findings)}:\n"
        yield "| backend | inputs | median, us | fastest | slowest |\n|---|---|---|---|---|"
        for one in findings.timing:
            sizes = f"N={one['seqlen']} H={one['num_heads']} head_dim={one['head_dim']}"
            times = (one["median_us"], one["min_us"], one["max_us"])
            cells = (one["status"] if time is None else f"{time:.1f}" for time in times)
            yield f"| {one['backend']} | {sizes}, {one['dtype']} | {' | '.join(cells)} |"
        yield command
    else:
        yield f"Not measured, because there was no GPU. This checks and times it on one:\n{command}"
    if isinstance(found, str):
        yield f"No time is predicted: {found}."
        return
    predicted = found.prediction
    shape = f"N={predicted.seqlen} H=12 head_dim={usual_head_dim(version)}"
    time = f"{predicted.time_us:.0f} us, bound by {predicted.bound}"
    yield f"Predicted for {predicted.gpu}, {shape}: {time}."
    yield "That is a model of its machine code, not a measurement:"
    yield f"\n```\n{shlex.join(['gpt2-infer', 'predict', kernel, '--gpu', GPU])}\n```"
