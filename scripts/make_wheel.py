"""Build the wheel for Linux on x86-64, which contains the library of every CUDA kernel.

    python scripts/make_wheel.py [--out FOLDER]

It needs nvcc 13 and g++. Compiled kernels stay in the cache, so that the next run compiles only
those that have changed. The wheel is for every Python and for torch 2.10 or later; problems()
checks that.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm.contrib.concurrent import thread_map

from attention_kernels import ladder
from attention_kernels.ladder import build as cache
from attention_kernels.ladder import compilers, prebuilt
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import CSRC, VersionHeader

ROOT = Path(__file__).parents[1]
TAG = "manylinux_2_28_x86_64"
MOST_MIB = 60
# What TAG promises: these libraries, and symbols up to these versions (auditwheel's policy).
LIBRARIES = {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libstdc++.so.6"}
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# torch's stable ABI. Its headers declare only what torch 2.10 has: see TORCH_TARGET_VERSION.
STABLE = re.compile(r"(aoti_)?torch_\w+")
UNDEFINED = re.compile(r" (GLOBAL|WEAK) +\w+ +UND (\w+)(?:@(\S+))?")


def problems(library: Path) -> list[str]:
    """Return what would keep a library from loading on a machine that TAG stands for."""
    command = ["readelf", "--dynamic", "--dyn-syms", "--wide", str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    expected = {*LIBRARIES, "libtorch.so", prebuilt.CUDA_RUNTIME}
    needed = {*re.findall(r"\(NEEDED\).*\[(.+)\]", text)}
    found = [f"needs {name}" for name in sorted(needed - expected)]
    paths = re.findall(r"\(R(?:UN)?PATH\).*\[(.+)\]", text)
    found += [f"looks for libraries in {path}" for path in paths]
    for binding, symbol, version in UNDEFINED.findall(text):
        if not version:
            if binding == "GLOBAL" and not STABLE.fullmatch(symbol):
                found.append(f"needs {symbol}, which is not in torch's stable ABI")
        elif version != prebuilt.CUDA_RUNTIME and not _has(version):
            found.append(f"needs {symbol} of {version}, which {TAG} lacks")
    return found


def _has(version: str) -> bool:
    """Return whether TAG promises a version of symbols, e.g. GLIBC_2.14."""
    name, _, number = version.partition("_")
    if name not in NEWEST or not re.fullmatch(r"\d+(\.\d+)*", number):
        return False
    return tuple(map(int, number.split("."))) <= NEWEST[name]


def build(versions: Iterable[VersionHeader], folder: Path) -> list[Path]:
    """Build the libraries of versions in a folder, on all cores. Raises BuildError."""
    gxx, libtorch = str(compilers.find_gxx()), compilers.torch_folder()
    nvcc = compilers.binding_flags("cuda", CSRC)[0]
    settings = [torch.__version__, compilers.asked(gxx), *map(os.environ.get, compilers.FLAGS)]

    def compiled(name: str, source: Path, command: Sequence[str]) -> str:
        def make(output: Path) -> None:
            compilers.output_of([*command, "-c", str(source), "-o", str(output)])

        return str(cache.kept(f"wheel-{name}", ".o", [source], CSRC, command, make, *settings))

    older = compiled("older", ROOT / "scripts/older_libraries.cpp", [gxx, "-O1", "-fPIC"])
    hidden = "-Xcompiler=-fPIC,-fvisibility=hidden"
    shared = [*compilers.binding_flags("cuda", CSRC), hidden, "-isystem", f"{libtorch}/include"]
    for prefix in (f"{CSRC}/", f"{libtorch}/include/"):  # in torch's error messages
        shared.append(f"-Xcompiler=-fmacro-prefix-map={prefix}=")
    binding = compiled("binding", CSRC / "binding.cpp", [*shared, "-O1"])
    link = [gxx, "-shared", "-s", "-Wl,--no-as-needed", f"-L{libtorch}/lib", "-ltorch"]
    link.append(str(compilers.cuda_runtime(nvcc)))

    def library(version: VersionHeader) -> Path:
        # Without -lineinfo, which would double the size.
        command = compilers.compile_flags(version, "cuda", prebuilt.ARCHITECTURES)
        command += [hidden, "-O3", "--compress-mode=size", "--disable-warnings"]
        kernel = compiled(version.op, version.path, command)
        file = folder / prebuilt.library_name(version)
        compilers.output_of([*link, kernel, binding, older, "-o", str(file)])
        return file

    return thread_map(library, [*versions], desc="building", max_workers=os.cpu_count(), unit="")


def pack(libraries: Iterable[Path], out: Path, tag: str = TAG) -> Path:
    """Build the wheel with these libraries, for a platform tag, into a folder; return its path."""
    with tempfile.TemporaryDirectory() as temporary:
        source, wheels = Path(temporary) / "source", Path(temporary) / "wheels"
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("attention_kernels", "gpt2_infer"):
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        folder = source / prebuilt.FOLDER.relative_to(ROOT)
        folder.mkdir()
        for library in libraries:
            shutil.copy(library, folder)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
        options = ["--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={wheels}"]
        options.append(f"--config-settings=--build-option=--plat-name={tag}")
        subprocess.run([*pip, *options, str(source)], check=True)
        (wheel,) = wheels.iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    arguments = parser.parse_args()
    wanted = [version for version in ladder.versions().values() if not version.is_host]
    versions = [one for version in wanted for one in version.builds()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            libraries = build(versions, Path(folder))
        except BuildError as error:
            sys.exit(str(error))
        if found := [f"{file.name} {text}" for file in libraries for text in problems(file)]:
            sys.exit("\n".join(found))
        wheel = pack(libraries, arguments.out)
    mib = wheel.stat().st_size / 2**20
    print(f"{wheel}: {len(libraries)} libraries, {mib:.1f} MiB")
    if mib > MOST_MIB:
        sys.exit(f"a wheel may have at most {MOST_MIB} MiB")


if __name__ == "__main__":
    main()
