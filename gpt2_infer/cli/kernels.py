"""The command `gpt2-infer kernels`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpt2_infer.cli.console import show, show_json
from gpt2_infer.cli.options import POSITIVE, current_family
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from attention_kernels.inspection.resources import Resources
    from attention_kernels.ladder.header import VersionHeader

NAMES = "backend names or version files, *.cu (default: a whole ladder)"
ARCH = "compute capabilities, such as 90 or sm_90 (default: 75 80 90 120)"
HEAD_DIM = "head dimensions (default: all that a version supports)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("names", nargs="*", metavar="BACKEND", help=NAMES)
    add("--arch", nargs="+", type=arch, metavar="SM", help=ARCH)
    add("--head-dim", nargs="+", type=POSITIVE, metavar="D", help=HEAD_DIM)
    add("--family", help="ladder, from `gpt2-infer backends`, or all (default: fp32)")
    add("--json", action="store_true", help="print a JSON list")


def arch(text: str) -> str:
    """Return the digits of a compute capability, given as 90 or sm_90."""
    found = re.fullmatch(r"(?:sm_)?(\d{2,3})", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be a compute capability, such as 90 or sm_90, not {text[:40]!r}"
        )
    return found[1]


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels.inspection import resources

    rows = find(arguments)
    if arguments.json:
        show_json([dataclasses.asdict(row) for row in rows])
    else:
        show(resources.format_table(rows))
    return 0


def find(arguments: argparse.Namespace) -> list[Resources]:
    """Return what the compiler says for the options of the command.

    Raises RequestError, UnsupportedError for host code, or BuildError.
    """
    from attention_kernels import UnsupportedError, ladder
    from attention_kernels.inspection import resources

    family = current_family(arguments.family or "fp32")
    if arguments.names:
        if arguments.family:
            raise RequestError("--family selects a whole ladder: give it or backends, not both")
        versions = versions_of(arguments.names)
        if host := [name for name, version in versions.items() if version.is_host]:
            raise UnsupportedError(host[0], ["it is host code, not a GPU kernel"])
    else:
        versions = ladder.versions(None if family == "all" else family)
        versions = {name: version for name, version in versions.items() if not version.is_host}
    if not versions:
        families = ", ".join(ladder.families())
        raise RequestError(f"no ladder named {family}, only {families}")
    taken = {head_dim for version in versions.values() for head_dim in version.head_dims}
    if unknown := {*(arguments.head_dim or ())} - taken:
        of = ", ".join(arguments.names) or family
        raise RequestError(f"no version of {of} supports head_dim {', '.join(map(str, unknown))}")
    return resources.resource_table(
        list(versions.values()),
        arguments.arch or resources.ARCHS,
        arguments.head_dim or sorted(taken),
    )


def version_of(what: str) -> tuple[str, VersionHeader]:
    """Return the name and the header of a version file, given it or the backend built from it.

    Raises UnsupportedError for a backend without a version file.
    """
    ((name, version),) = versions_of([what]).items()
    return name, version


def versions_of(whats: Iterable[str]) -> dict[str, VersionHeader]:
    """Return the names and headers of several; see version_of().

    Raises HeaderError if two files make the same name.
    """
    from attention_kernels import UnsupportedError, ladder

    versions = {}
    for spec in ladder.resolve_all(whats):
        if spec.version is None:
            raise UnsupportedError(spec.name, ["it has no version file, *.cu"])
        versions[spec.name] = spec.version
    return versions


def shape_of(arguments: argparse.Namespace, takes: BackendSpec | VersionHeader) -> dict[str, Any]:
    """Return the shape given by add_shape_options(), as keyword arguments."""
    return {
        "batch": arguments.batch,
        "num_heads": arguments.heads,
        "head_dim": arguments.head_dim or usual_head_dim(takes),
        "is_causal": not arguments.full,
    }


def describe(shape: dict[str, Any]) -> str:
    """Return a shape in words."""
    names = {"batch": "B", "num_heads": "H", "seqlen": "N", "head_dim": "head_dim"}
    sizes = [f"{name}={shape[key]}" for key, name in names.items() if key in shape]
    return " ".join([*sizes, "causal" if shape["is_causal"] else "full"])


def usual_head_dim(takes: BackendSpec | VersionHeader) -> int:
    """Return GPT-2's head_dim, 64, if it is supported, else the first that is."""
    return 64 if 64 in (takes.head_dims or (64,)) else takes.head_dims[0]
