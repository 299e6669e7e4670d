"""Find nvcc and g++, and run compilers: flags, architectures, errors, source lines."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from attention_kernels import child
from attention_kernels.errors import AttentionError
from attention_kernels.ladder.header import VersionHeader, csrc_of

# Environment variables that name a compiler, by precedence.
NVCC_VARIABLES = ("CUDACXX", "CUDA_HOME", "CUDA_PATH")
GXX_VARIABLES = ("CXX",)
# Environment variables with flags for every compilation; nvcc itself reads the last two.
FLAGS = ("ATTENTION_KERNELS_FLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
# Characters in a path for which nvcc fails, or runs the path in a shell.
UNSAFE = re.compile(r"""["'$,`\\\x00-\x1f]""")
COMPILER_TIMEOUT_S = 600.0
Target = Literal["cuda", "emulator"]
TARGETS: dict[str, Target] = {"cuda": "cuda", "cpu": "emulator"}


class BuildError(AttentionError, RuntimeError):
    """A version could not be built; after a compiler error the text ends with its log's path."""


def find_nvcc() -> str | None:
    """Return the nvcc of CUDACXX, CUDA_HOME, CUDA_PATH, PATH or the packages of the extra `cuda`.

    None if it is not found; a variable that names a missing file does not fall through to the next.
    """
    return _find(NVCC_VARIABLES, itertools.chain(["nvcc"], _pip_nvcc()))


def find_gxx() -> str | None:
    """Return the C++ compiler of CXX, else g++, clang++ or c++ on PATH; None if not found."""
    return _find(GXX_VARIABLES, ("g++", "clang++", "c++"))


def _named(variables: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of these variables that is set, and the compiler that it names."""
    for variable in variables:
        if value := os.environ.get(variable):
            return variable, f"{value}/bin/nvcc" if variable.startswith("CUDA_") else value
    return None


def _pip_nvcc() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("cu[0-9]*/bin/nvcc", "cuda_nvcc/bin/nvcc"):
            yield from map(str, sorted(Path(root).glob(pattern), reverse=True))


def _find(variables: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the program that the user named; if none was named, the first that exists."""
    candidates = [named[1]] if (named := _named(variables)) else names
    found = next((path for name in candidates if (path := shutil.which(name))), None)
    return os.path.abspath(found) if found else None


def missing_compiler(target: Target) -> str | None:
    """Return why nothing can be built for a target, such as a missing compiler; else None.

    Called by every generate(), so it must be fast.
    """
    if sys.platform != "linux":
        return "its kernels are built on Linux only"
    if find_gxx() is None:
        return _misnamed(GXX_VARIABLES) or "needs a C++ compiler: install g++, or name one with CXX"
    if target == "cuda" and find_nvcc() is None:
        return _misnamed(NVCC_VARIABLES) or (
            "needs nvcc: install the CUDA toolkit or the extra `cuda` of this package, or name it "
            "with CUDACXX or CUDA_HOME"
        )
    return None


def _misnamed(variables: Iterable[str]) -> str | None:
    named = _named(variables)
    return f"{named[0]} asks for {named[1]}, which is not an executable here" if named else None


def extra_flags() -> list[str]:
    """Return the flags of ATTENTION_KERNELS_FLAGS; raises BuildError for an unbalanced quote."""
    try:
        return shlex.split(os.environ.get(FLAGS[0], ""))
    except ValueError as error:
        raise BuildError(f"{FLAGS[0]}: {error}") from error


@functools.cache
def asked(compiler: str, *options: str) -> str:
    """Return what a compiler prints for some options, by default --version; cached."""
    return execute([compiler, *(options or ["--version"])]).output


def code_name(arch: str) -> str:
    """Return nvcc's name for the code of an architecture: sm_90, or compute_90 for PTX."""
    return arch if arch.startswith("compute_") else f"sm_{arch}"


def native_macros(gxx: str) -> str:
    """Return the macros that tell which CPU -march=native means here."""
    return asked(gxx, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)


def capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each CUDA device that torch sees."""
    import torch

    return [*map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))]


def architectures() -> str:
    """Return the compute capabilities of the CUDA devices here, as build() takes them: "80,90".

    Those that nvcc cannot compile for are left out if others remain, so that an old card does not
    keep a newer one in the same machine from being used.
    """
    archs = [f"{major}{minor}" for major, minor in sorted({*capabilities()})]
    nvcc = find_nvcc()
    known = re.findall(r"compute_(\d+)", asked(nvcc, "--list-gpu-arch")) if nvcc else []
    return ",".join([arch for arch in archs if arch in known] or archs)


def cuda_root(nvcc: str) -> Path:
    """Return the toolkit's folder; nvcc is asked, because on PATH it may be a link or a script."""
    top = re.search(r"^#\$ TOP=(.*)$", asked(nvcc, "-dryrun", "-c", "-x", "cu", os.devnull), re.M)
    return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parents[1]


def cuda_runtime(nvcc: str) -> Path:
    """Return the toolkit's libcudart.so; the pip packages have it only under its full name."""
    root = cuda_root(nvcc)
    folders = [root / "lib64", root / "lib", *root.glob("targets/*/lib")]
    for folder in [*folders, *root.parent.glob("cuda_runtime/lib")]:
        if found := sorted(folder.glob("libcudart.so*")):
            return found[-1]
    raise BuildError(f"{nvcc} has no libcudart.so in or below {root}")


def compile_flags(version: VersionHeader, target: Target, arch: str) -> list[str]:
    """Return compiler, target, macros and include folders: the flags of every compilation.

    For the emulator, g++ gets only some of the version's own flags: macros, folders, those that
    nvcc passes to the host compiler, and a macro if subnormal numbers are flushed. Raises
    BuildError if a compiler is missing, or for a path that nvcc would not take or would let a shell
    change.
    """
    csrc = csrc_of(version)
    flags = [*binding_flags(target, csrc), *macros(version)]
    if version.uses_torch:
        folders = [torch_folder() / "include", torch_folder() / "include/torch/csrc/api/include"]
        for folder in [*folders, sysconfig.get_paths()["include"]]:
            flags += ["-isystem", str(folder)]
        flags += ["-include", "torch/extension.h", "-DATTENTION_TORCH"]
        flags += ["-DTORCH_EXTENSION_NAME=attention_entry", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        flags += ["--expt-relaxed-constexpr"] if target == "cuda" else []
    if target == "cuda":
        for path in (version.path, csrc, torch_folder()):
            if UNSAFE.search(str(path)):
                raise BuildError(f"nvcc cannot use {path}: the path has one of \" ' $ , ` \\")
        for each in arch.split(","):
            digits = each.removeprefix("compute_")
            if version.compiles_for(digits):
                only = "a" * version.needs_exactly  # with the instructions that no other GPU has
                flags.append(f"-gencode=arch=compute_{digits}{only},code={code_name(each)}{only}")
        return [*flags, *version.flags]
    for flag in version.flags:
        if flag.startswith(("-D", "-I", "-std=")):
            flags.append(flag)
        elif flag.startswith("-Xcompiler="):
            flags += flag.removeprefix("-Xcompiler=").split(",")
        elif re.fullmatch("--?(use_fast_math|ftz=true)", flag):
            flags.append("-DATTENTION_EMULATOR_FLUSHES")  # flushes subnormals to 0
    return flags


def macros(version: VersionHeader) -> list[str]:
    """Return the macros that describe a version to common.cuh."""
    flags = [f"-DATTENTION_VERSION={version.op}", f"-DATTENTION_DTYPE={version.dtype}"]
    if version.layout == "contiguous":
        flags.append("-DATTENTION_CONTIGUOUS")
    if version.entry:
        flags.append("-DATTENTION_ENTRY")
    if version.role != "attention":
        flags.append(f"-DATTENTION_{version.role.upper()}")
    return flags


def binding_flags(target: Target, csrc: Path) -> list[str]:
    """Return the flags of compile_flags() that are the same for every version."""
    if reason := missing_compiler(target):
        raise BuildError(reason)
    gxx = str(find_gxx())
    if target == "emulator":
        include = [f"-I{csrc}/emulator", f"-I{csrc}"]
        return [gxx, "-std=c++17", "-DATTENTION_EMULATOR", *include]
    return [str(find_nvcc()), f"-ccbin={gxx}", "-std=c++17", f"-I{csrc}"]


def torch_folder() -> Path:
    """Return torch's folder."""
    import torch

    return Path(torch.__file__).parent


def torch_libraries(version: VersionHeader) -> list[str]:
    """Return the flags with which a program of a version is linked to torch, if it uses that."""
    folder = torch_folder() / "lib"
    names = ["-ltorch", "-ltorch_cpu", "-lc10"]
    # Python's own functions are missing, and nobody calls them.
    flags = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-Wl,--unresolved-symbols=ignore-all", *names]
    return flags if version.uses_torch else []


def execute(command: Sequence[str], folder: str | None = None) -> child.Ended:
    """Run a compiler in `folder`, which also gets its temporary files."""
    env = {**os.environ, "LC_ALL": "C", **({"TMPDIR": "."} if folder else {})}
    return child.run(command, timeout_s=COMPILER_TIMEOUT_S, env=env, folder=folder)


def output_of(command: Sequence[str], folder: str | None = None) -> str:
    """Return the output of a command; raises BuildError with its first error line if it fails."""
    done = execute(command, folder)
    if done.status != 0:
        raise BuildError(first_error(done.output) or f"{command[0]} {done.how}")
    return done.output


def source_lines(binary: str, addresses: Iterable[str]) -> list[list[tuple[str, int]]]:
    """Return file and line of each hexadecimal address; callers of inlined functions come first.

    Raises BuildError.
    """
    addr2line = asked(str(find_gxx()), "-print-prog-name=addr2line").strip()
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
    """Return the source line of an address in a library, e.g. "v07_x.cu:31 (from 73, 164)".

    The callers of inlined code are in parentheses. None if the library has no line numbers or
    addr2line is missing: an error message is still correct without the line.
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
    """Return the first error line of a compiler's output, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    markers = re.compile(r"\b(error|fatal)\b|undefined (reference|symbol)", re.I)
    return next((line for line in lines if markers.search(line)), lines[-1] if lines else None)
