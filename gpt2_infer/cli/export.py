"""The command `gpt2-infer export`."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from attention_kernels import child
from gpt2_infer.cli import predict, verify
from gpt2_infer.cli.console import EXIT_FAILED, print_error
from gpt2_infer.cli.predict import Predicted
from gpt2_infer.cli.verify import Findings
from gpt2_infer.cli.versions import version_of

GPU = "h200"


@dataclass(frozen=True)
class Exported:
    """The repository that was written; a kernel that did not pass has none."""

    out: str
    name: str
    files: list[str]
    verdict: Findings
    predicted: list[Predicted] | str
    """The prediction for 1,024 tokens, or why there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return every field; no prediction is null."""
        predicted = None if isinstance(self.predicted, str) else self.predicted[0].to_json()
        return vars(self) | {"verdict": self.verdict.to_json(), "predicted": predicted}


def export(
    name: str, /, *, out: Path, kind: Annotated[Literal["hub"], Parameter(name="--as")] = "hub"
) -> Exported:
    """Write a verified kernel as a repository for Hugging Face's Hub.

    Nothing is written if it fails. Raises RequestError for a folder that cannot be used, and
    UnsupportedError for a version that the Hub does not take.

    Args:
        name: version file, *.cu, or a backend built from one
        out: new folder, whose name becomes the kernel's
        kind: hub: a repository for Hugging Face's kernel-builder, of an attention kernel with
            one dtype
    """
    child.start_server()
    from gpt2_infer import export as repository

    _, version = version_of(name)
    planned = repository.plan(version, out)
    findings = verify.check(name, quick=True, progress=True)
    if not findings.passed:
        return Exported(str(planned.folder), planned.name, [], findings, "it failed")
    found = _predicted(name)
    evidence = repository.Evidence(
        _verdict(findings, planned.kernel), _times(findings, found, planned.kernel)
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


def _verdict(findings: Findings, kernel: str) -> str:
    """Return what `verify` says, the command that repeats it, and where it ran."""
    import torch

    where = "in the CPU emulator" if findings.emulated else "on the CPU"
    if findings.report.device == "cuda":
        where = f"on {torch.cuda.get_device_name()}"
    said = verify.text(verify.Verdicts([dataclasses.replace(findings, timing=[])]))
    passed = f"It passed {findings.report.checks} checks against float64 {where}:"
    return f"{passed}\n\n{_block(_verify(findings, kernel), said)}"


def _predicted(name: str) -> list[Predicted] | str:
    from attention_kernels import UnsupportedError
    from attention_kernels.ladder.compilers import BuildError

    try:
        return predict.predict(name, gpu=GPU)
    except (BuildError, UnsupportedError) as error:
        return str(error)


def _times(findings: Findings, found: list[Predicted] | str, kernel: str) -> str:
    """Return the measured time, if there is a GPU, and the predicted one, with their commands."""
    command = shlex.join(["gpt2-infer", "verify", kernel])
    if findings.timing:
        measured = _block(command, "\n".join(verify.times(findings.timing)))
    else:
        measured = (
            f"Not measured, because there was no GPU. `{command}` checks and times it on one."
        )
    if isinstance(found, str):
        return f"{measured}\n\nNo time is predicted: {found}."
    command = shlex.join(["gpt2-infer", "predict", kernel, "--gpu", GPU])
    predicted = _block(command, predict.text(found, lines=False))
    return f"{measured}\n\nPredicted from its machine code, not measured:\n\n{predicted}"


def _block(command: str, output: str) -> str:
    return f"```\n$ {command}\n{output}\n```"
