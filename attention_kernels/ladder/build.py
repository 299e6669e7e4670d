"""From a version file to a shared library, through a cache of builds.

A library is named by a digest of all that goes into it, so what is found in the cache is right and
is never overwritten. A build happens in a folder of its own and is moved into place in one step:
it cannot be seen half done. A lock, which the kernel of the operating system drops when a process
dies, only saves two processes from doing the same work.

Environment: ATTENTION_KERNELS_CACHE is the folder of the cache; ATTENTION_KERNELS_FLAGS adds
compiler flags, e.g. -DATTENTION_POISON or, for the emulator, "-fsanitize=address -g".
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_kernels.ladder.compilers import (
    FLAGS,
    BuildError,
    Target,
    compile_flags,
    cuda_runtime,
    execute,
    find_gxx,
    first_error,
    identity,
)
from attention_kernels.ladder.header import VersionHeader, csrc_of

INCLUDE = re.compile(r'^\s*#\s*include\s*"(.+?)"', re.M)
LOCK_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Plan:
    """The commands of a build, to be run in an empty folder, and the file name of its result."""

    compile: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]
    stem: str
    label: str


def plan(version: VersionHeader, target: Target, arch: str = "", label: str = "") -> Plan:
    """How to build a version; raises BuildError where a compiler is missing.

    arch: the compute capabilities to build for, e.g. "90" or "80,90"; none for the emulator.
    """
    csrc = csrc_of(version)
    extra = shlex.split(os.environ.get(FLAGS[0], ""))
    flags, gxx = compile_flags(version, target, arch), str(find_gxx())
    torch_folder = Path(torch.__file__).parent
    torch_libraries = torch_folder / "lib"
    # Hidden symbols: the versions define the same names, and live in one process.
    if target == "emulator":
        flags += ["-fPIC", "-fvisibility=hidden"]
        # Line tables, for source_line(): they change no code.
        kernel, libraries = ["-O3", "-g1", "-x", "c++"], ["-ltorch_cpu", "-pthread", "-ldl"]
    else:
        cudart = cuda_runtime(flags[0])
        has_cuda = (torch_libraries / "libtorch_cuda.so").exists()
        flags.append("-Xcompiler=-fPIC,-fvisibility=hidden")
        kernel, libraries = ["-O3", "-lineinfo"], ["-ltorch_cpu", *["-ltorch_cuda"] * has_cuda]
        libraries += [str(cudart), f"-Wl,-rpath,{cudart.parent}"]
    kernel += [*extra, "-c", str(version.path), "-o", "kernel.o"]
    binding = ["-O1", "-isystem", f"{torch_folder}/include", *extra]
    binding += ["-c", f"{csrc}/binding.cpp", "-o", "binding.o"]
    objects = ["kernel.o", "binding.o", "-o", "library.so"]
    openmp = [flag for flag in flags if flag == "-fopenmp"]
    link = (gxx, "-shared", *openmp, *extra, *objects, f"-L{torch_libraries}", *libraries)
    compile_ = ((*flags, *kernel), (*flags, *binding))

    digest = hashlib.sha256()
    headers = [path for path in csrc.iterdir() if path.suffix in (".h", ".cuh")]
    headers += (csrc / "emulator").iterdir() if target == "emulator" else ()
    for path in sorted({csrc / "binding.cpp", *headers, *own_files(version)}):
        digest.update(path.read_bytes() + b"\0")
    compilers = [identity(name, Path(name).stat().st_mtime) for name in {flags[0], gxx}]
    nvcc_flags = [os.environ.get(name) for name in FLAGS[1:]] if target == "cuda" else None
    commands = (compile_, link, nvcc_flags)
    digest.update(repr((commands, torch.__version__, sorted(compilers))).encode())
    where = f"sm_{arch.replace(',', '_')}" if target == "cuda" else "emulator"
    stem = f"{version.op}-{where}-{digest.hexdigest()[:20]}"
    purpose = "for the CPU" if version.is_host else "for the CPU emulator"
    if target == "cuda":
        purpose = f"for sm_{arch.replace(',', ', sm_')}"
    return Plan(compile_, link, stem, f"{label or version.path.name} {purpose}")


def own_files(version: VersionHeader) -> set[Path]:
    """A version file and all that it includes, in quotes, but for what every version may."""
    csrc = csrc_of(version)
    found: set[Path] = set()
    waiting = [version.path]
    while waiting:
        file = waiting.pop()
        found.add(file)
        for name in INCLUDE.findall(file.read_text(encoding="utf-8", errors="replace")):
            for folder in (file.parent, csrc):
                included = Path(os.path.normpath(folder / name))
                if included.parent != csrc and included not in found and included.is_file():
                    waiting.append(included)
    return found


def cache_dir() -> Path:
    """Where libraries are kept; ATTENTION_KERNELS_CACHE names another folder."""
    if named := os.environ.get("ATTENTION_KERNELS_CACHE"):
        return Path(named).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "attention_kernels"
    try:
        return base.expanduser().absolute()
    except RuntimeError:
        return _private_cache(base, "this user has no home folder")


def _writable(cache: Path) -> Path:
    """The folder, created where it is not there, or a private one where it cannot be written."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        return _private_cache(cache, error.strerror or str(error))


_private: dict[Path, Path] = {}
_private_lock = threading.Lock()


def _private_cache(cache: Path, reason: str) -> Path:
    with _private_lock:
        if cache not in _private:
            folder = _private[cache] = Path(tempfile.mkdtemp(prefix="attention_kernels-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            _tell(
                f"warning: {cache} cannot be written ({reason}): "
                "kernels are built for this run only"
            )
        return _private[cache]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _lock(path: Path, label: str) -> Iterator[bool]:
    """Hold the lock file; False where that took too long: it only saves work."""
    import fcntl

    try:
        file = path.open("w")
    except OSError:  # another user's, in a cache that is shared: build without it
        yield False
        return
    with file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        told = held = False
        while not held and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if not told:
                    _tell(f"waiting for another process that builds {label} ...")
                told = True
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield held


def build(
    version: VersionHeader, target: Target, arch: str = "", *, label: str = "", quiet: bool = False
) -> Path:
    """The shared library of a version, from the cache or built now.

    Unless it is quiet, a line on stderr names what is being built: `label`, else the file. Raises
    BuildError with the compiler's first error line and the path of its log.
    """
    return _build(plan(version, target, arch, label), quiet)


def build_many(
    wanted: Iterable[VersionHeader], target: Target, arch: str = ""
) -> dict[str, Path | BuildError]:
    """Build several versions at once, under one progress bar; by op, the library or the error."""
    from tqdm import tqdm

    results: dict[str, Path | BuildError] = {}
    plans: dict[str, Plan] = {}
    for version in wanted:
        try:
            plans[version.op] = plan(version, target, arch)
        except BuildError as error:
            results[version.op] = error
    cache = cache_dir()
    missing = sum(not os.path.exists(cache / f"{item.stem}.so") for item in plans.values())
    if missing:
        _writable(cache)  # here once, so that the threads below share what stands in for it
    with (
        tqdm(total=len(plans), desc="building kernels", unit="", disable=missing == 0) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):

        def run(item: tuple[str, Plan]) -> None:
            try:
                results[item[0]] = _build(item[1], quiet=True)
            except (BuildError, OSError) as error:
                results[item[0]] = BuildError(str(error))
            bar.update()

        list(pool.map(run, plans.items()))
    return results


def _build(item: Plan, quiet: bool) -> Path:
    cache, name = cache_dir(), f"{item.stem}.so"
    if os.path.exists(cache / name):  # False, not an error, below a folder that is closed to us
        return cache / name
    cache = _writable(cache)
    library, log = cache / name, cache / f"{item.stem}.log"
    with _lock(cache / f"{item.stem}.lock", item.label) as held:
        if library.exists():
            return library
        for left in cache.glob(f"{item.stem}.tmp-*") if held else ():  # by a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        if not quiet:
            _tell(f"building {item.label} ...")
        with tempfile.TemporaryDirectory(prefix=f"{item.stem}.tmp-", dir=cache) as folder:
            _run(item.compile, folder, log, "w")
            _run([item.link], folder, log, "a")
            os.replace(Path(folder) / "library.so", library)
    return library


def _run(commands: Iterable[Sequence[str]], folder: str, log: Path, mode: str) -> None:
    """Run the commands side by side; their output goes to the log."""
    commands = list(commands)
    with ThreadPoolExecutor(len(commands)) as pool:
        results = list(pool.map(lambda command: execute(command, folder), commands))
    with log.open(mode, encoding="utf-8") as file:
        for command, (_, output) in zip(commands, results, strict=True):
            file.write(f"$ {shlex.join(command)}\n{output}\n")
    for status, output in results:
        if status != 0:
            raise BuildError(f"{first_error(output) or f'exit status {status}'} (log: {log})")
