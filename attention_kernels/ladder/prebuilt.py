"""Find the library of a version's CUDA kernel among those in the wheel for Linux on x86-64.

They contain machine code for ARCHITECTURES and use torch through its stable ABI only, so that they
load into any later release of torch. scripts/make_wheel.py builds them.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from attention_kernels.ladder import build, compilers
from attention_kernels.ladder.compilers import FLAGS, macros
from attention_kernels.ladder.header import VersionHeader, csrc_of

FOLDER = Path(__file__).resolve().parents[1] / "prebuilt"
# As build() takes them; the driver compiles the PTX of the last for later GPUs.
ARCHITECTURES = "75,80,86,89,90,100,120,compute_120"
CUDA_RUNTIME = "libcudart.so.13"


def find(version: VersionHeader, device_type: str = "cuda") -> Path | None:
    """Return a version's prebuilt library, or None if the version has to be compiled.

    That is the case if its sources have changed, if the environment adds compiler flags, if torch
    uses another CUDA runtime than CUDA_RUNTIME, or if no GPU here runs code for ARCHITECTURES.
    """
    if device_type != "cuda" or not FOLDER.is_dir() or any(map(os.environ.get, FLAGS)):
        return None
    library = FOLDER / library_name(version)
    return library if library.exists() and _has_runtime() and _has_code() else None


def library_name(version: VersionHeader) -> str:
    """Return the file name of a version's library, with a digest of its sources and flags."""
    csrc = csrc_of(version)
    contents = build.digests([version.path, csrc / "binding.cpp"], csrc, []).values()
    return f"{build.digest_name(version.op, macros(version), version.flags, sorted(contents))}.so"


def _has_code() -> bool:
    """Return whether a GPU of this machine runs code for ARCHITECTURES; true without any."""
    archs = [divmod(int(arch), 10) for arch in ARCHITECTURES.split(",") if arch.isdigit()]
    gpus = compilers.capabilities()
    return not gpus or any(
        (major, minor) >= max(archs) or any(major == x and minor >= y for x, y in archs)
        for major, minor in gpus
    )


def _has_runtime() -> bool:
    try:
        ctypes.CDLL(CUDA_RUNTIME)  # torch has loaded it if it uses it
    except OSError:
        return False
    return True
