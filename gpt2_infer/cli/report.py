"""The command `gpt2-infer report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gpt2_infer.cli.options import TIMEOUT, Count, Seconds
from gpt2_infer.cli.versions import adapted, call_shape, versions_of
from gpt2_infer.errors import RequestError
from gpt2_infer.files import check_writable

if TYPE_CHECKING:
    from attention_kernels.judge.suite import Report
    from attention_kernels.ladder.header import VersionHeader


@dataclass(frozen=True)
class Page:
    """The page that was written."""

    out: str
    bytes: int
    failed: list[str]
    """The versions that failed the checks."""

    @property
    def passed(self) -> bool:
        """Whether no version failed."""
        return not self.failed


def report(
    names: Annotated[tuple[str, ...], Parameter(name="WHAT")] = (),
    /,
    *,
    entry: str | None = None,
    family: str | None = None,
    out: Path = Path("report.html"),
    gpu: str = "h200",
    seqlen: Count = 128,
    head_dim: Count | None = None,
    full: bool = False,
    timeout_s: Annotated[Seconds, TIMEOUT] = 600.0,
) -> Page:
    """Write an HTML report on kernels, line by line.

    Raises RequestError and the errors of make_page().

    Args:
        names: backend names or version files, *.cu; they are verified and predicted, too
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        family: ladder whose versions are added
        out: HTML file
        gpu: GPU to predict for, or none
        seqlen: sequence length in tokens
        head_dim: head dimension (default: 64, or the first supported)
        full: omit the causal mask
        timeout_s: time limit in seconds
    """
    from gpt2_infer.bench import selection
    from gpt2_infer.bench.prediction import find_gpu
    from gpt2_infer.bench.record import Shape

    check_writable(out)
    card = None if gpu == "none" else find_gpu(gpu)  # fails before minutes of checks
    own = versions_of(adapted(names, entry))
    versions = (selection.versions_of(family) if family else {}) | own
    if not versions:
        raise RequestError("nothing to report: give backends, version files or --family")
    shape = Shape(seqlen, **call_shape(next(iter(versions.values())), head_dim, 1, 1, full))
    try:
        from gpt2_infer.bench.report import make_page
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing: install gpt2-infer[report]") from error
    verdicts = {name: _verdict(version, timeout_s) for name, version in own.items()}
    page = make_page(
        versions, shape, gpu=card, predicted=own, verdicts=verdicts, timeout_s=timeout_s
    )
    out.write_text(page, "utf-8")
    failed = [k for k, found in verdicts.items() if not (isinstance(found, str) or found.passed)]
    return Page(str(out), out.stat().st_size, failed)


def text(page: Page, **_: object) -> str:
    """Return the name and size of the page, and the versions that failed."""
    failed = [f"FAILED: {name}" for name in page.failed]
    return "\n".join([*failed, f"wrote {page.out}, {page.bytes / 1024:.0f} KiB"])


def _verdict(version: VersionHeader, timeout_s: float) -> Report | str:
    """Return the result of the first checks of `verify` on the CPU, or why they cannot run."""
    from attention_kernels import UnavailableBackendError, UnsupportedError
    from attention_kernels.judge import suite

    try:
        return suite.verify(str(version.path), "cpu", quick=True, timeout_s=timeout_s)
    except (UnavailableBackendError, UnsupportedError) as error:
        return str(error)
