"""gpt2-infer cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt2_infer.cli.console import show


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--clear", action="store_true", help="delete everything in the cache")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels.ladder import build

    if arguments.clear:
        show(f"freed {build.clear_cache() / 2**20:.1f} MiB in {build.cache_dir()}")
        return 0
    sizes = {entry.name: _size(entry) for entry in build.cache_entries()}
    for name, size in sizes.items():
        show(f"{size / 2**20:8.1f} MiB  {name}")
    show(f"{sum(sizes.values()) / 2**20:8.1f} MiB in {build.cache_dir()}")
    return 0


def _size(entry: Path) -> int:
    files = entry.rglob("*") if entry.is_dir() else [entry]
    return sum(file.lstat().st_size for file in files if file.is_file())
