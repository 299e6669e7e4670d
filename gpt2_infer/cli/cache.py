"""The command `gpt2-infer cache`."""

from __future__ import annotations

import argparse

from gpt2_infer.cli.console import show, show_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--clear", action="store_true", help="delete everything in the cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels.ladder import build

    freed = build.clear_cache() if arguments.clear else 0
    entries = build.cache_entries()
    if arguments.json:
        sizes = [{"name": entry.name, "bytes": size} for entry, size in entries.items()]
        show_json({"folder": str(build.cache_dir()), "entries": sizes, "freed_bytes": freed})
        return 0
    if arguments.clear:
        show(f"freed {freed / 2**20:.1f} MiB in {build.cache_dir()}")
        return 0
    for entry, size in entries.items():
        show(f"{size / 2**20:8.1f} MiB  {entry.name}")
    show(f"{sum(entries.values()) / 2**20:8.1f} MiB in {build.cache_dir()}")
    return 0
