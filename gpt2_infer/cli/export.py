"""The command `gpt2-infer export`."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_infer.cli import predict, verify
from gpt2_infer.cli.versions import version_of

if TYPE_CHECKING:
    from gpt2_infer.bench.verdict import Findings

GPU = "h200"


@dataclass(frozen=True)
class Exported:
    """The repository that was written; a kernel that did not pass has no files."""

    out: str
    name: str
    files: list[str]
    verdict: Findings

    @property
    def passed(self) -> bool:
        """Whether the kernel passed."""
        return self.verdict.passed

    def to_json(self) -> dict[str, Any]:
        """Return every field."""
        return {**vars(self), "verdict": self.verdict.to_json()}


def export(name: str, /, *, out: Path) -> Exported:
    """Write a verified kernel as a repository for Hugging Face's Hub.

    Nothing is written if it fails. Raises RequestError for a folder that cannot be used, and
    UnsupportedError for a version that the Hub does not take.

    Args:
        name: version file, *.cu, or a backend built from one: an attention kernel with one dtype
        out: new folder, whose name becomes the kernel's
    """
    from gpt2_infer import export as repository

    version = version_of(name)
    planned = repository.plan(version, out)
    verdict = verify.verify(name)
    files = []
    if verdict.passed:
        files = planned.write(
            _evidence(verdict, planned.kernel), _times(name, verdict, planned.kernel)
        )
    return Exported(str(planned.folder), planned.name, files, verdict)


def text(exported: Exported, **_: object) -> str:
    """Return what was written and where to read on, or the verdict."""
    if not exported.passed:
        return f"{verify.text(exported.verdict)}: nothing was written"
    written = f"wrote {exported.out}: {len(exported.files)} files, hub {exported.name}"
    return f"{written}\nnext: see {Path(exported.out) / 'README.md'}"


def _evidence(verdict: Findings, kernel: str) -> str:
    """Return the verdict, the command that repeats it, and where the kernel ran."""
    import torch

    report = verdict.report
    where = "in the CPU emulator" if verdict.emulated else "on the CPU"
    if report.device == "cuda":
        where = f"on {torch.cuda.get_device_name()}"
    words = ["gpt2-infer", "verify", kernel, "--device", report.device, "--seed", str(report.seed)]
    block = _block(words, verify.text(dataclasses.replace(verdict, timing=[])))
    return f"It passed {report.checks} checks against float64 {where}:\n\n{block}"


def _times(name: str, verdict: Findings, kernel: str) -> str:
    """Return the measured time, if there is a GPU, and the predicted time, with their commands."""
    from attention_kernels import UnsupportedError
    from attention_kernels.ladder.compilers import BuildError

    command = ["gpt2-infer", "verify", kernel]
    measured = f"Not measured, because there was no GPU: `{shlex.join(command)}` times it on one."
    if verdict.timing:
        measured = _block(command, "\n".join(verify.times(verdict.timing)))
    try:
        predictions = predict.predict(name, gpu=GPU)
    except (BuildError, UnsupportedError) as error:
        return f"{measured}\n\nNo time is predicted: {error}."
    command = ["gpt2-infer", "predict", kernel, "--gpu", GPU]
    predicted = _block(command, predict.text(predictions, lines=False))
    return f"{measured}\n\nPredicted from its machine code, not measured:\n\n{predicted}"


def _block(command: list[str], output: str) -> str:
    return f"```\n$ {shlex.join(command)}\n{output}\n```"
