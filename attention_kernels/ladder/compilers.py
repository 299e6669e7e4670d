"""Find nvcc and g++, and run them: flags, architectures, errors, source lines."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from attention_kernels.errors import AttentionError
from attention_kernels.ladder.header import VersionHeader, csrc_of

# What the environment adds to every compilation, the last two of them nvcc's own.
FLAGS = ("ATTENTION_KERNELS_FLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
COMPILER_TIMEOUT_S = 600.0
Target = Literal["cuda", "emulator"]


class BuildError(AttentionError, RuntimeError):
    """A version could not be built; the text ends with the path of the compiler's log."""


def find_nvcc() -> str | None:
    """The nvcc of CUDACXX, CUDA_HOME, CUDA_PATH, PATH or the pip packages of the extra `cuda`."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    spec = importlib.util.find_spec("nvidia")
    pip = [
        str(path)
        for root in (spec.submodule_search_locations or () if spec else ())
        for pattern in ("cu[0-9]*/bin/nvcc", "cuda_nvcc/bin/nvcc")
        for path in sorted(Path(root).glob(pattern), reverse=True)
    ]
    candidates = [os.environ.get("CUDACXX"), *(f"{home}/bin/nvcc" for home in homes), "nvcc", *pip]
    return _first_program(candidates)


def find_gxx() -> str | None:
    """The C++ compiler of CXX, else g++, clang++ or c++ on PATH."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return _first_program(candidates)


def _first_program(names: Iterable[str | None]) -> str | None:
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return os.path.abspath(found) if found else None


def missing_compiler(target: Target) -> str | None:
    """The reason against building for a target, where a compiler is missing; cheap."""
    if sys.platform != "linux":
        return "its kernels are built on Linux only"
    if find_gxx() is None:
        return "needs a C++ compiler: install g++, or name one with CXX"
    if target == "cuda" and find_nvcc() is None:
        return (
            "needs nvcc: install the CUDA toolkit or the extra `cuda` of this package, or name it "
            "with CUDACXX or CUDA_HOME"
        )
    return None


@functools.cache
def identity(compiler: str, _mtime: float) -> str:
    """What the compiler says of its version; asked again when its file has changed."""
    return execute([compiler, "--version"])[1]


def nvcc_architectures() -> set[str]:
    """The compute capabilities that nvcc compiles for: {"75", ..., "120"}; none without nvcc."""
    nvcc = find_nvcc()
    output = execute([nvcc, "--list-gpu-arch"])[1] if nvcc else ""
    return set(re.findall(r"compute_(\d+)", output))


@functools.cache
def _cuda_root(nvcc: str) -> Path:
    """The toolkit's folder, from nvcc itself: on PATH there may be a link or a script."""
    _, output = execute([nvcc, "-dryrun", "-c", "-x", "cu", os.devnull])
    top = re.search(r"^#\$ TOP=(.*)$", output, re.M)
    return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parents[1]


def cuda_runtime(nvcc: str) -> Path:
    """The toolkit's libcudart.so: the pip packages have it under its full name only."""
    root = _cuda_root(nvcc)
    folders = [root / "lib64", root / "lib", *root.glob("targets/*/lib")]
    for folder in [*folders, *root.parent.glob("cuda_runtime/lib")]:
        if found := sorted(folder.glob("libcudart.so*")):
            return found[-1]
    raise BuildError(f"{nvcc} has no libcudart.so in or below {root}")


def compile_flags(version: VersionHeader, target: Target, arch: str) -> list[str]:
    """Compiler, target, macros and include folders: what every compilation of a version shares.

    Of a version's flags g++ takes the macros, and what is passed through nvcc to it; the others
    are nvcc's own.
    """
    if reason := missing_compiler(target):
        raise BuildError(reason)
    csrc, gxx = csrc_of(version), str(find_gxx())
    common = [f"-DATTENTION_VERSION={version.op}", f"-DATTENTION_DTYPE={version.dtype}"]
    common.append(f"-I{csrc}")
    if version.layout == "contiguous":
        common.append("-DATTENTION_CONTIGUOUS")
    if target == "emulator":
        own = [flag for flag in version.flags if flag.startswith("-D")]
        for flag in version.flags:
            if flag.startswith("-Xcompiler="):
                own += flag.removeprefix("-Xcompiler=").split(",")
        return [gxx, "-std=c++17", "-DATTENTION_EMULATOR", f"-I{csrc}/emulator", *common, *own]
    nvcc = str(find_nvcc())
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in arch.split(",")]
    return [nvcc, f"-ccbin={gxx}", "-std=c++17", *gencode, *common, *version.flags]


def execute(command: Sequence[str], folder: str | None = None) -> tuple[int, str]:
    """Run a command in a folder, which is also where its temporary files go: status and output."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C", **({"TMPDIR": folder} if folder else {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMPILER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"error: {error}"
    return done.returncode, done.stdout.decode(errors="replace")


def output_of(command: Sequence[str]) -> str:
    """The output of a command; raises BuildError with the first error line where it fails."""
    status, output = execute(command)
    if status != 0:
        raise BuildError(first_error(output) or f"{command[0]}: exit status {status}")
    return output


def source_lines(binary: str, addresses: Iterable[str]) -> list[list[tuple[str, int]]]:
    """File and line of each address, in hexadecimal; callers of inlined functions first.

    Raises BuildError.
    """
    addr2line = execute([str(find_gxx()), "-print-prog-name=addr2line"])[1].strip()
    command = [addr2line, "--addresses", "--inlines", "--exe", binary, *addresses]
    found: list[list[tuple[str, int]]] = []
    for line in output_of(command).splitlines():
        if line.startswith("0x"):
            found.append([])
        elif place := re.match(r"(.+):(\d+)", line):
            found[-1].insert(0, (place[1], int(place[2])))
    return found


@functools.cache
def source_line(library: str, address: str) -> str | None:
    """Where in a version's source an address of its library is, e.g. "v07_x.cu:31 (from 73, 164)".

    Callers follow where the code was inlined. None where the library does not tell, or addr2line is
    missing: what is told of a fault is right without it.
    """
    try:
        (frames,) = source_lines(library, [address])
    except BuildError:
        return None
    places = [(Path(file).name, line) for file, line in frames if file.endswith((".cu", ".cuh"))]
    if not places:
        return None
    *callers, (name, line) = places
    text = [str(n) if file == name else f"{file}:{n}" for file, n in reversed(callers)]
    return f"{name}:{line}" + (f" (from {', '.join(text)})" if text else "")


def first_error(output: str) -> str | None:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    markers = re.compile(r"\b(error|fatal)\b|undefined (reference|symbol)", re.I)
    return next((line for line in lines if markers.search(line)), lines[-1] if lines else None)
