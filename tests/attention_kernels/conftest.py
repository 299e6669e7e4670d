"""The probe, C functions that use the emulator without a backend, and a GPU's counters."""

from __future__ import annotations

import csv
import ctypes
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.op import load_op

# Of the negative controls. The build that checks for races reports every fault.
BUILDS = ["races", pytest.param("", marks=pytest.mark.slow)]
PROBE = Path(__file__).parent / "probe" / "emulator.cpp"


@pytest.fixture(scope="session")
def probe() -> Callable[..., str]:
    """Build emulator.cpp; call(name, *arguments) returns a message, empty for success."""
    gxx = compilers.find_gxx() or pytest.skip("needs g++")
    csrc, flags = header.CSRC, ["-std=c++17", "-O0", "-fPIC", "-shared", "-DATTENTION_EMULATOR"]
    command = [gxx, *flags, "-Wall", "-Wextra", "-Werror", f"-I{csrc}/emulator", f"-I{csrc}"]

    def make(library: Path) -> None:
        objects = [str(PROBE), str(build.object_file("emulator", csrc, *build.RUNTIME))]
        subprocess.run([*command, *objects, "-o", library, "-pthread", "-ldl"], check=True)
        subprocess.run([*command, "-fsyntax-only", runtime], check=True)  # without a warning

    runtime = csrc / build.RUNTIME[0]
    functions = ctypes.CDLL(str(build.kept("probe", ".so", [PROBE, runtime], csrc, command, make)))

    def call(name: str, *arguments: torch.Tensor | int) -> str:
        function = getattr(functions, name)
        function.restype = ctypes.c_char_p
        pointers = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else int(a)
            for a in arguments
        ]
        return function(*pointers).decode()

    return call


@functools.cache
def faulty_op(file: Path, build: str, prefix: str = "negative_") -> Callable[..., None]:
    """Return the emulated op of a file in negative/; build: "races" or, without that check, "".

    prefix: of the op's name, another one for a copy of a file.
    """
    version = header.parse_header(file, prefix)
    if build == "races":
        version = header.race_checked(version)
    return load_op(version, "cpu", f"the kernel {file.name}")


@functools.cache
def _probe_op(file: Path, device: str) -> Callable[..., None]:
    return load_op(header.parse_header(file, "probe_"), device, "the probe")


def run_probe(file: Path, device: str, out: torch.Tensor, params: bytes) -> torch.Tensor:
    """Call a probe with its parameters, and return what it leaves in `out`, on the CPU."""
    _probe_op(file, device)(out, torch.frombuffer(bytearray(params), dtype=torch.uint8))
    return out.cpu()


def profiled(options: str, code: str) -> list[dict[str, str]]:
    """Return the rows that ncu (Nsight Compute) prints of a program, or skip without ncu."""
    if not shutil.which("ncu"):
        pytest.skip("ncu is not on PATH")
    options += " --csv --clock-control none --print-units base --kernel-name-base mangled"
    command = ["ncu", *options.split(), "-k", "regex:9attention", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [*csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))]


def place_of(marker: str | int, file: Path = PROBE) -> str:
    """Return the file and line that end with a marker, as a message has them."""
    lines = file.read_text("utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"// {marker}"))
    return f"{file.name}:{number}"
