"""From a version file to a shared library: the parsed header, the compilers, the cache of builds.

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
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from attention_kernels.errors import AttentionError

CSRC = Path(__file__).resolve().parent / "csrc"
FIELDS = ("Change", "Why", "Cost", "Tile", "Layout", "Flags", "Expect")
LAYOUTS = ("contiguous", "strided")
HEAD_DIMS = (32, 64, 128)
# What a version takes, where that is not float32 with every one of HEAD_DIMS.
TAKES = re.compile(
    r"(float16|bfloat16|float32|float64)(?:, head_dim (\d+(?: \d+)*))?(, on the CPU)?"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*"(.+?)"', re.M)
# What the environment adds to every compilation, the last two of them nvcc's own.
FLAGS = ("ATTENTION_KERNELS_FLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
LOCK_TIMEOUT_S = 300.0
COMPILER_TIMEOUT_S = 600.0
Target = Literal["cuda", "emulator"]


class HeaderError(AttentionError, ValueError):
    """A version file's name or header is not what parse_header() reads."""


class BuildError(AttentionError, RuntimeError):
    """A version could not be built; the text ends with the path of the compiler's log."""


@dataclass(frozen=True)
class VersionHeader:
    """What a version file says of itself.

    name: the version's namespace, e.g. "v07"; op: its op in torch.ops.attention_kernels.
    layout: "contiguous", or "strided" where the kernel reads strided q, k and v.
    flags: compiler flags of this version on; the rest is prose, one line each.
    dtype, head_dims, is_host: from the line that may follow Layout, `Takes:  float16, head_dim 32
    64`, or `float32, on the CPU` for host code, which is neither emulated nor built for a GPU.
    """

    path: Path
    number: int
    name: str
    op: str
    title: str
    change: str
    why: str
    cost: str
    tile: str
    layout: str
    flags: tuple[str, ...]
    expect: str
    dtype: str = "float32"
    head_dims: tuple[int, ...] = HEAD_DIMS
    is_host: bool = False


def version_files(folder: Path) -> list[Path]:
    """The folder's version files, v<number>_<what>.cu, by number: the one list of versions."""
    found = [path for path in folder.glob("v*_*.cu") if re.match(r"v\d+_", path.name)]
    return sorted(found, key=lambda path: (version_number(path), path.name))


def version_number(path: Path) -> int:
    """The number in the name of a version file."""
    return int(path.name[1:].split("_")[0])


def versions(folder: Path = CSRC / "fp32", op_prefix: str = "") -> list[VersionHeader]:
    """The parsed headers of the folder's version files, by number; raises HeaderError."""
    return [parse_header(path, op_prefix) for path in version_files(folder)]


def parse_header(path: Path, op_prefix: str = "") -> VersionHeader:
    """Read the comment that opens a version file.

    Its first line is `// v07 - what changed`; the fields of FIELDS follow in order, each on one or
    more lines. Raises HeaderError naming the file and what is wrong with it.
    """

    def wrong(what: str) -> HeaderError:
        return HeaderError(f"{path.name}: {what}")

    named = re.fullmatch(r"(v\d+)_\w+\.cu", path.name)
    if not named:
        new = path.with_name(f"v01_{re.sub(r'[^A-Za-z0-9]+', '_', path.stem)}.cu")
        rename = shlex.join(["mv", str(path), str(new)])
        raise wrong(f"a version file is named v<number>_<what>.cu: {rename}")
    text = path.read_text(encoding="utf-8", errors="replace")
    comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
    first, *lines = [line[2:].strip() for line in comment] or [""]
    title = re.fullmatch(rf"{named[1]} - (\S.*)", first)
    if not title:
        raise wrong(f"the first line must be `// {named[1]} - <what changed>`")
    values: dict[str, str] = {}
    field = None
    for line in lines:
        if start := re.match(rf"({'|'.join(FIELDS)}|Takes):\s*(.*)", line):
            field = start[1]
            if field in values:
                raise wrong(f"the header has {field} twice")
            values[field] = start[2]
        elif field:
            values[field] = f"{values[field]} {line}".strip()
    if missing := [name for name in FIELDS if not values.get(name)]:
        raise wrong(f"the header lacks {', '.join(missing)}")
    order, takes = list(values), TAKES.fullmatch(values.pop("Takes", "float32"))
    if takes is None:
        raise wrong("Takes is like `float16, head_dim 32 64`")
    if order not in (list(FIELDS), [*FIELDS[:5], "Takes", *FIELDS[5:]]):
        raise wrong(f"the header's order is {', '.join(FIELDS)}")
    if values["Layout"] not in LAYOUTS:
        raise wrong(f"Layout is {' or '.join(LAYOUTS)}, not {values['Layout']!r}")
    flags = values.pop("Flags")
    try:
        split = () if flags == "(none)" else tuple(shlex.split(flags))
    except ValueError as error:
        raise wrong(f"Flags: {error}") from error
    prose = {name.lower(): value for name, value in values.items()}
    names = {"name": named[1], "op": op_prefix + named[1], "title": title[1]}
    return VersionHeader(
        path.absolute(),
        version_number(path),
        flags=split,
        dtype=takes[1],
        head_dims=tuple(map(int, takes[2].split())) if takes[2] else HEAD_DIMS,
        is_host=takes[3] is not None,
        **names,
        **prose,
    )


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
def _identity(compiler: str, _mtime: float) -> str:
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


def _cuda_runtime(nvcc: str) -> Path:
    """The toolkit's libcudart.so: the pip packages have it under its full name only."""
    root = _cuda_root(nvcc)
    folders = [root / "lib64", root / "lib", *root.glob("targets/*/lib")]
    for folder in [*folders, *root.parent.glob("cuda_runtime/lib")]:
        if found := sorted(folder.glob("libcudart.so*")):
            return found[-1]
    raise BuildError(f"{nvcc} has no libcudart.so in or below {root}")


@dataclass(frozen=True)
class Plan:
    """The commands of a build, to be run in an empty folder, and the file name of its result."""

    compile: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]
    stem: str
    label: str


def csrc_of(version: VersionHeader) -> Path:
    """The csrc that a version file lies in, else this package's."""
    return root if ((root := version.path.parent.parent) / "attention.h").exists() else CSRC


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
        cudart = _cuda_runtime(flags[0])
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
    compilers = [_identity(name, Path(name).stat().st_mtime) for name in {flags[0], gxx}]
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
