"""The command `gpt2-infer accesses`."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import show, show_json
from gpt2_infer.cli.kernels import describe, shape_of, version_of
from gpt2_infer.cli.options import POSITIVE, SEQLEN, TIMEOUT, add_shape_options, seconds

if TYPE_CHECKING:
    from attention_kernels.inspection.accesses import Access


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_shape_options(add, heads=1)
    add("--seqlen", type=POSITIVE, default=128, help=SEQLEN)
    add("--timeout", type=seconds, default=600.0, metavar="S", help=TIMEOUT)
    add("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels.inspection import accesses

    _, version = version_of(arguments.name)
    shape = {"seqlen": arguments.seqlen, **shape_of(arguments, version)}
    found = find(arguments)
    if arguments.json:
        show_json([dataclasses.asdict(access) for access in found])
        return 0
    show(f"{version.path.name}, emulated: {describe(shape)}\n")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    show(accesses.format_table(found, width))
    if any(len(access.lines) > 1 for access in found):
        show("\nLine a>b: line a of the kernel calls a function, which accesses memory in line b.")
    return 0


def find(arguments: argparse.Namespace) -> list[Access]:
    """Return the accesses for the options of the command; raises those of count_accesses()."""
    from attention_kernels.inspection import accesses

    _, version = version_of(arguments.name)
    shape = shape_of(arguments, version)
    return accesses.count_accesses(
        version, seqlen=arguments.seqlen, **shape, timeout_s=arguments.timeout
    )
