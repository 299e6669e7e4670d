"""The command `gpt2-infer report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gpt2_infer.cli.console import EXIT_FAILED, show
from gpt2_infer.cli.options import HIDDEN, TIMEOUT, Count, Seconds
from gpt2_infer.cli.versions import usual_head_dim, versions_of
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


def report(
    names: Annotated[tuple[str, ...], Parameter(name="WHAT")] = (),
    /,
    *,
    family: str | None = None,
    out: Path = Path("report.html"),
    gpu: str = "h200",
    seqlen: Count = 128,
    head_dim: Count | None = None,
    full: bool = False,
    timeout_s: Annotated[Seconds, TIMEOUT] = 600.0,
    live: Annotated[bool, HIDDEN] = False,
) -> Page:
    """Write an HTML report on kernels, line by line.

    Raises RequestError and the errors of make_page().

    Args:
        names: backend names or version files, *.cu; they are verified and predicted, too
        family: ladder whose versions are added
        out: HTML file
        gpu: GPU to predict for, or none
        seqlen: sequence length in tokens
        head_dim: head dimension (default: 64, or the first supported)
        full: omit the causal mask
        timeout_s: time limit in seconds
        live: print each verdict when it is there
    """
    from gpt2_infer.bench import selection
    from gpt2_infer.bench.record import Shape

    check_writable(out)
    versions = selection.versions_of(family) if family else {}
    own = versions_of(names)
    versions |= own
    if not versions:
        raise RequestError("nothing to report: give backends, version files or --family")
    head_dim = head_dim or usual_head_dim(next(iter(versions.values())))
    shape = Shape(batch=1, num_heads=1, seqlen=seqlen, head_dim=head_dim, is_causal=not full)
    try:
        from gpt2_infer.bench.report import make_page
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing: install gpt2-infer[report]") from error
    verdicts = dict(_verdicts(own, timeout_s, live)) if own else {}
    page = make_page(
        versions,
        shape,
        gpu=None if gpu == "none" else gpu,
        predict=own,
        verdicts=verdicts,
        timeout_s=timeout_s,
    )
    out.write_text(page, "utf-8")
    failed = [k for k, found in verdicts.items() if not (isinstance(found, str) or found.passed)]
    return Page(str(out), out.stat().st_size, failed)


def text(found: Page, **_: object) -> str:
    """Return the name and size of the page."""
    return f"wrote {found.out}, {found.bytes / 1024:.0f} KiB"


def exit_status(found: Page) -> int:
    """Return whether a version failed."""
    return EXIT_FAILED if found.failed else 0


def _verdicts(
    versions: Mapping[str, VersionHeader], timeout_s: float, live: bool
) -> Iterator[tuple[str, Report | str]]:
    """Yield what the first checks of `verify` find on the CPU, or why they cannot run there."""
    from attention_kernels import UnavailableBackendError, UnsupportedError, registry

    whats = {
        name: name if registry.registered(name) else str(version.path)
        for name, version in versions.items()
    }
    from attention_kernels.judge import suite

    for name, what in whats.items():
        try:
            found = suite.verify(what, "cpu", quick=True, progress=True, timeout_s=timeout_s)
        except (UnavailableBackendError, UnsupportedError) as error:
            yield name, str(error)
            continue
        if live:
            failures = f"FAILED: {len(found.failures)} of " if found.failures else "passed "
            show(f"{name}: {failures}{found.checks} checks")
        yield name, found
