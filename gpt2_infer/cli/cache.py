"""The command `gpt2-infer cache`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cache:
    """The content of the cache, and how much was deleted."""

    folder: str
    entries: dict[str, int]
    """The size in bytes of each file or folder in it."""
    freed_bytes: int


def cache(*, clear: bool = False) -> Cache:
    """List the cached compiled kernels, or delete them.

    Args:
        clear: delete everything in the cache
    """
    from attention_kernels.ladder import build

    freed = build.clear_cache() if clear else 0
    entries = {path.name: size for path, size in build.cache_entries().items()}
    return Cache(str(build.cache_dir()), entries, freed)


def text(content: Cache, *, clear: bool) -> str:
    """Return a line per entry and the total, or how much was freed."""
    if clear:
        return f"freed {content.freed_bytes / 2**20:.1f} MiB in {content.folder}"
    lines = [f"{size / 2**20:8.1f} MiB  {name}" for name, size in content.entries.items()]
    return "\n".join(
        [*lines, f"{sum(content.entries.values()) / 2**20:8.1f} MiB in {content.folder}"]
    )
