"""The command `gpt2-infer report`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import EXIT_FAILED, show, show_json
from gpt2_infer.cli.kernels import usual_head_dim, versions_of
from gpt2_infer.cli.options import HEAD_DIM, POSITIVE, SEQLEN, TIMEOUT, seconds
from gpt2_infer.errors import RequestError
from gpt2_infer.files import check_writable

if TYPE_CHECKING:
    from attention_kernels.judge.conformance import Report
    from attention_kernels.ladder.header import VersionHeader

NAMES = "backend names, version files, *.cu, or results files, *.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("names", nargs="*", metavar="WHAT", help=NAMES)
    add("--family", help="ladder whose versions are added, with the predictions in the results")
    add("--out", type=Path, default=Path("report.html"), help="HTML file (default: %(default)s)")
    add("--seqlen", type=POSITIVE, default=128, help=SEQLEN)
    add("--head-dim", type=POSITIVE, metavar="D", help=HEAD_DIM)
    add("--full", action="store_true", help="omit the causal mask")
    add("--gpu", default="h200", help="GPU to predict for, or none (default: %(default)s)")
    add("--timeout", type=seconds, default=600.0, metavar="S", help=TIMEOUT)
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from gpt2_infer.bench import selection
    from gpt2_infer.bench.record import Shape

    check_writable(arguments.out)
    files = [Path(name) for name in arguments.names if name.endswith(".json")]
    versions = selection.versions_of(arguments.family) if arguments.family else {}
    own = versions_of(name for name in arguments.names if not name.endswith(".json"))
    versions |= own
    if not versions and not files:
        raise RequestError("nothing to report: give backends, version files, results or --family")
    gpu = None if arguments.gpu == "none" else arguments.gpu
    first = next(iter(versions.values()), None)
    shape = Shape(
        batch=1,
        num_heads=1,
        seqlen=arguments.seqlen,
        head_dim=arguments.head_dim or (usual_head_dim(first) if first else 64),
        is_causal=not arguments.full,
    )
    try:
        from gpt2_infer.bench.show.page import make_page
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is missing: install gpt2-infer[report]") from error
    verdicts = dict(_verdicts(own, arguments)) if own else {}
    page = make_page(
        versions,
        files,
        shape,
        gpu=gpu,
        predict=own,
        verdicts=verdicts,
        timeout_s=arguments.timeout,
    )
    arguments.out.write_text(page, "utf-8")
    size = arguments.out.stat().st_size
    failed = [k for k, found in verdicts.items() if not (isinstance(found, str) or found.passed)]
    if arguments.json:
        show_json({"out": str(arguments.out), "bytes": size, "failed": failed})
    else:
        show(f"wrote {arguments.out}, {size / 1024:.0f} KiB")
    return EXIT_FAILED if failed else 0


def _verdicts(
    versions: Mapping[str, VersionHeader], arguments: argparse.Namespace
) -> Iterator[tuple[str, Report | str]]:
    """Yield what the first checks of `verify` find on the CPU, or why they cannot run there."""
    from attention_kernels import UnavailableBackendError, UnsupportedError, registry
    from gpt2_infer.cli.verify import start_server

    whats = {
        name: name if registry.registered(name) else str(version.path)
        for name, version in versions.items()
    }
    start_server(next(iter(whats.values())), "cpu")
    from attention_kernels.judge import conformance

    for name, what in whats.items():
        try:
            found = conformance.verify(
                what, "cpu", quick=True, progress=True, timeout_s=arguments.timeout
            )
        except (UnavailableBackendError, UnsupportedError) as error:
            yield name, str(error)
            continue
        if not arguments.json:
            failures = f"FAILED: {len(found.failures)} of " if found.failures else "passed "
            show(f"{name}: {failures}{found.checks} checks")
        yield name, found
