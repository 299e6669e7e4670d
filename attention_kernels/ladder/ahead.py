"""Build a version file while torch is imported, which takes as long: nothing here imports it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from attention_kernels.errors import AttentionError
from attention_kernels.ladder import build, compilers, header

# What the server of workers builds when it starts: a device, which may be empty, ":" and a file.
VARIABLE = "ATTENTION_KERNELS_AHEAD"


def start() -> int:
    """Begin to build what VARIABLE names, in a forked process; return its id, or 0."""
    device, _, file = os.environ.get(VARIABLE, "").partition(":")
    if not file:
        return 0
    if process := os.fork():
        return process
    try:  # what goes wrong here goes wrong again in the worker, which reports it
        with contextlib.suppress(AttentionError, OSError):
            build_ahead(file, device)
    finally:
        os._exit(0)


def build_ahead(file: str, device: str) -> None:
    """Build a version file for a device; "": for CUDA if it can be built and run, else the CPU."""
    version = header.of_file(Path(file))
    builds, label, archs = version.builds(), version.label.upper(), ""
    if device != "cpu" and not version.is_host and not compilers.missing_compiler("cuda"):
        archs = compilers.architectures()
    if archs:
        build.build_many(builds, "cuda", archs, label=label)
    elif device != "cuda":
        checked = [] if version.is_host else header.race_checked(version).builds()
        build.build_many([*builds, *checked], "emulator", label=label)
