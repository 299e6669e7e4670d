"""The command `gpt2-infer cache`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from msgspec import Struct


class Entry(Struct):
    """A file or folder in the cache."""

    name: str
    bytes: int


class Cache(Struct):
    """What is in the cache, and what was deleted."""

    folder: str
    entries: list[Entry]
    freed_bytes: int


def cache(
    *, clear: Annotated[bool, Parameter(help="delete everything in the cache")] = False
) -> Cache:
    """List the cached compiled kernels, or delete them."""
    from attention_kernels.ladder import build

    freed = build.clear_cache() if clear else 0
    entries = [Entry(path.name, size) for path, size in build.cache_entries().items()]
    return Cache(str(build.cache_dir()), entries, freed)


def text(found: Cache, *, clear: bool) -> str:
    """Return a line per entry and the total, or how much was freed."""
    if clear:
        return f"freed {found.freed_bytes / 2**20:.1f} MiB in {found.folder}"
    lines = [f"{entry.bytes / 2**20:8.1f} MiB  {entry.name}" for entry in found.entries]
    total = sum(entry.bytes for entry in found.entries)
    return "\n".join([*lines, f"{total / 2**20:8.1f} MiB in {found.folder}"])
