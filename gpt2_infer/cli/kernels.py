"""The command `gpt2-infer kernels`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter
from msgspec import Meta

from gpt2_infer.cli.options import MANY, Count, wrong
from gpt2_infer.cli.versions import versions_of
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from cyclopts import Token

    from attention_kernels.inspection.resources import Resources


def _arch(_: object, tokens: Sequence[Token]) -> str:
    text = tokens[0].value
    if (found := re.fullmatch(r"(?:sm_)?(\d{2,3})", text)) is None:
        raise wrong(tokens, f"must be a compute capability, such as 90 or sm_90, not {text[:40]!r}")
    return found[1]


Arch: TypeAlias = Annotated[str, Meta(pattern=r"^\d{2,3}$"), Parameter(converter=_arch)]
NAMES = "backend names or version files, *.cu (default: a whole ladder)"
ARCHS = "compute capabilities, such as 90 or sm_90 (default: 75 80 90 120)"
HEAD_DIMS = "head dimensions (default: all that a version supports)"
FAMILY = "ladder, from `gpt2-infer backends`, or all (default: fp32)"


def kernels(
    names: Annotated[tuple[str, ...], Parameter(name="BACKEND", help=NAMES)] = (),
    /,
    *,
    archs: Annotated[tuple[Arch, ...], MANY, Parameter(name="--arch", help=ARCHS)] = (),
    head_dims: Annotated[
        tuple[Count, ...], MANY, Parameter(name="--head-dim", help=HEAD_DIMS)
    ] = (),
    family: Annotated[str | None, Parameter(help=FAMILY)] = None,
) -> list[Resources]:
    """Show registers, spills, shared memory and occupancy of versions, as nvcc compiles them.

    Needs nvcc, but no GPU. Raises RequestError, UnsupportedError for host code, or BuildError.
    """
    from attention_kernels import UnsupportedError, ladder
    from attention_kernels.inspection import resources

    if names:
        if family:
            raise RequestError("--family selects a whole ladder: give it or backends, not both")
        versions = versions_of(names)
        if host := [name for name, version in versions.items() if version.is_host]:
            raise UnsupportedError(host[0], ["it is host code, not a GPU kernel"])
    else:
        versions = ladder.versions(None if family == "all" else family or "fp32")
        versions = {name: version for name, version in versions.items() if not version.is_host}
    if not versions:
        raise RequestError(f"no ladder named {family}, only {', '.join(ladder.families())}")
    taken = {head_dim for version in versions.values() for head_dim in version.head_dims}
    if unknown := {*head_dims} - taken:
        of = ", ".join(names) or family or "fp32"
        raise RequestError(f"no version of {of} supports head_dim {', '.join(map(str, unknown))}")
    return resources.resource_table(
        list(versions.values()), archs or resources.ARCHS, head_dims or sorted(taken)
    )


def text(found: list[Resources], **_: object) -> str:
    """Return a table."""
    from attention_kernels.inspection.resources import format_table

    return format_table(found)
