"""Version files by the names that a user gives, and the shape of a call to predict or to count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels.ladder.header import VersionHeader


def adapted(whats: Iterable[str], entry: str | None) -> list[str]:
    """Return names in which an adapter replaces the one version file, *.cu, if there is an entry.

    Raises RequestError if there is not one file, and OSError.
    """
    from attention_kernels.ladder import build
    from attention_kernels.ladder.entry import adapter

    names = [*whats]
    files = [name for name in names if name.endswith(".cu")]
    if entry is None:
        return names
    if len(files) != 1:
        said = ", ".join(files) or "none"
        raise RequestError(f"--entry says how to call one file, *.cu, but here: {said}")
    made = str(adapter(Path(files[0]), entry, build.cache_dir()))
    return [made if name in files else name for name in names]


def version_of(what: str) -> VersionHeader:
    """Return the header of a version file, given it or the backend built from it.

    Raises UnsupportedError for a backend without a version file.
    """
    (version,) = versions_of([what]).values()
    return version


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


def build_of(version: VersionHeader, dtype: str | None) -> VersionHeader:
    """Return the version of one dtype, by default its first; raises UnsupportedError."""
    from attention_kernels import UnsupportedError

    builds = {build.dtype: build for build in version.builds()}
    wanted = dtype or version.dtypes[0]
    if wanted not in builds:
        reason = f"dtype {wanted} (it takes {', '.join(builds)})"
        raise UnsupportedError(version.path.name, [reason])
    return builds[wanted]


def call_shape(
    version: VersionHeader, head_dim: int | None, batch: int, heads: int, full: bool
) -> dict[str, Any]:
    """Return the shape of a call, except its length, as keyword arguments."""
    from attention_kernels.judge.cases import usual_head_dim

    return {
        "batch": batch,
        "num_heads": heads,
        "head_dim": head_dim or usual_head_dim(version.head_dims),
        "is_causal": not full,
    }


def describe(shape: dict[str, Any]) -> str:
    """Return a call_shape() in words."""
    kind = "causal" if shape["is_causal"] else "full"
    return f"B={shape['batch']} H={shape['num_heads']} head_dim={shape['head_dim']} {kind}"
