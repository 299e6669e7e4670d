"""Build a version file while torch is imported, which takes as long: this file does not need it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from pathlib import Path

from attention_kernels.errors import AttentionError
from attention_kernels.ladder import build, compilers, header

# What the server of workers builds when it starts: a device, which may be empty, ":" and a file.
VARIABLE = "ATTENTION_KERNELS_AHEAD"


_building = -1  # the end to read of a pipe that closes when the build ends


def start() -> None:
    """Begin to build what VARIABLE names, in a process of its own."""
    global _building
    device, _, file = os.environ.get(VARIABLE, "").partition(":")
    if not file:
        return
    _building, held = os.pipe()
    if child := os.fork():
        os.close(held)
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:  # no child of the server's, which takes each for a worker
            # What goes wrong here goes wrong again in the worker, which reports it.
            with contextlib.suppress(AttentionError, OSError):
                build_ahead(file, device)
    finally:
        os._exit(0)


def wait() -> None:
    """Wait until the build has ended that this process, or one it was forked from, began."""
    if _building >= 0:
        os.read(_building, 1)


def import_to_stay(module: str) -> None:
    """Import a module without garbage collection, which would search in vain what stays."""
    gc.disable()
    importlib.import_module(module)
    gc.freeze()
    gc.enable()


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
