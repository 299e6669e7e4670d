"""The command `gpt2-infer kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gpt2_infer.cli.options import Counts
from gpt2_infer.cli.versions import versions_of
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.inspection.resources import Resources


def kernels(
    names: Annotated[tuple[str, ...], Parameter(name="BACKEND")] = (),
    /,
    *,
    archs: Annotated[Counts, Parameter(name="--arch")] = (),
    head_dims: Annotated[Counts, Parameter(name="--head-dim")] = (),
    family: str | None = None,
) -> list[Resources]:
    """Show registers, spills, shared memory and occupancy of versions, as nvcc compiles them.

    Needs nvcc, but no GPU. Raises RequestError, UnsupportedError for host code, or BuildError.

    Args:
        names: backend names or version files, *.cu (default: a whole ladder)
        archs: compute capabilities, such as 90 (default: 75 80 90 120)
        head_dims: head dimensions (default: all that a version supports)
        family: ladder, from `gpt2-infer backends`, or all (default: fp32)
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
        raise RequestError(f"no version here supports head_dim {min(unknown)}")
    wanted = [*map(str, archs)] or resources.ARCHS
    return resources.resource_table([*versions.values()], wanted, head_dims or sorted(taken))


def text(rows: list[Resources], **_: object) -> str:
    """Return a table."""
    from attention_kernels.inspection.resources import format_table

    return format_table(rows)
