"""Build version files into shared libraries, with a cache.

A file is made in a temporary folder and moved into the cache atomically, under a name with a digest
of everything that went into it: compilers, commands, and the contents of the sources and of the
files that they include. A file with that name is reused, for the emulator also by other copies of
the sources. So dates are never compared, no library is ever overwritten, and a killed build leaves
nothing harmful behind. The lock of each file only keeps two processes from doing the same work.

Code from the cache runs in this process, so, like ssh with its keys, nothing is loaded that another
user owns or could have written. The last bytes of each file are the SHA-256 of the rest, so that a
damaged file is rebuilt.

Environment: ATTENTION_KERNELS_CACHE names the cache folder; ATTENTION_KERNELS_FLAGS adds compiler
flags, e.g. -DATTENTION_POISON or, for the emulator, "-fsanitize=address -g".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import filelock
import platformdirs

from attention_kernels.ladder import compilers, entry, ptx
from attention_kernels.ladder.compilers import BuildError, Target
from attention_kernels.ladder.header import RACES, VersionHeader, csrc_of

DIGEST_BYTES = hashlib.sha256().digest_size  # at the end of each file in the cache
HIDDEN = ("-fPIC", "-fvisibility=hidden")  # the versions define the same names in one process
RUNTIME = ("emulator/runtime.cpp", "-O1", *HIDDEN)  # the emulator's source in csrc, and its flags
# Sanitizer checks whose failures csrc/emulator/faults.cpp handles.
EMULATOR_CHECKS = ("-fsanitize=alignment,bounds,object-size", "-fno-sanitize-recover=all")
# Compiling takes longer than most emulated launches. Inlining as at -O2: a bound is checked only
# where the compiler sees the array. A thread may be stopped anywhere; in a linker's stub it would
# have no source line.
EMULATOR_OPTIMIZATION = ("-Og", "-finline-small-functions", "-finline-functions", "-fno-plt")
# For a build that looks for races; the other build has all checks.
VOLATILES = "--param=tsan-distinguish-volatile=1"
RACES_OPTIMIZATION = (
    *(*EMULATOR_CHECKS[1:], "-Og", "-fsanitize=bounds", "-U__SANITIZE_THREAD__"),
    *("-DATTENTION_EMULATOR_RACES", VOLATILES),
)
# A kernel that may poll a volatile: only so does the emulator know that others must run.
VOLATILE = re.compile(r"(?<!asm )(?<!asm__ )\bvolatile\b")
_INCLUDE = rb"(?:#|%:)(?:\s|/\*.*?\*/)*(?:include(?:_next)?|import|embed)\b"
INCLUDE = re.compile(_INCLUDE + rb'\s*(?:["<]([^">\n]+)[">])?')  # no group without a name
# For inline PTX, which a file may have for some architectures only.
PTX_FLAGS = ("-include", "emulator/inline_ptx.h")
EMULATOR_WRAPS = "-Wl,--wrap=exit,--wrap=_exit,--wrap=abort,--wrap=__assert_fail"
_binding_lock = threading.Lock()


def build(version: VersionHeader, target: Target, arch: str = "", *, label: str = "") -> Path:
    """Return the shared library of a version, from the cache or newly built.

    arch: the compute capabilities to build for, e.g. "90" or "80,90"; "compute_80": PTX, which the
    driver compiles for any later one; empty for the emulator.
    label: the name of the version in the progress line on stderr, by default the file's. Raises
    BuildError for a missing compiler or a bad setting, or with the compiler's first error line and
    the path of its log.
    """
    import torch

    csrc, gxx, root = csrc_of(version), str(compilers.find_gxx()), compilers.torch_folder()
    flags = compilers.compile_flags(version, target, arch)
    extra, hidden = compilers.extra_flags(), [*HIDDEN]
    more = [torch.__version__, str(torch.version.git_version)]
    if target == "cuda":
        archs = [*map(compilers.code_name, arch.split(","))]
        where, purpose = "_".join(archs).replace("_sm_", "_"), ", ".join(archs)
        hidden = [f"-Xcompiler={','.join(HIDDEN)}"]
        # Also the folder, because a profiler opens the files that a library for a GPU names.
        more += [compilers.asked(gxx), str(csrc)]
        more += [os.environ.get(name, "") for name in compilers.FLAGS[1:]]
        flags += ["-O3", "-lineinfo"]
        cudart = compilers.cuda_runtime(flags[0])
        libraries = [str(cudart), f"-Wl,-rpath,{cudart.parent}"]
    else:
        where, purpose = "emulator", "the CPU" if version.is_host else "the CPU emulator"
        purpose += ", looking for races" * (RACES in version.flags)
        # Line tables (-g1) do not change the code; source_line() reads them.
        flags += ["-g1", *_optimization(version)]
        libraries = ["-pthread", "-ldl", EMULATOR_WRAPS]
    # libtorch.so contains only the names of torch's libraries, including those for CUDA: linking
    # those directly takes a third of a second.
    libraries += [f"-L{root}/lib", "-Wl,--no-as-needed", "-ltorch", *extra]
    libraries += ["-fopenmp"] if "-fopenmp" in flags else []
    shared = ["-O1", *hidden, *extra, "-isystem", str(root / "include")]
    command = [*flags, *hidden, *extra]
    sources = [version.path, csrc / "binding.cpp", csrc / RUNTIME[0]]

    def make(library: Path) -> None:
        entry.check(version, digests([version.path], csrc, []))
        _tell(f"building {label or version.path.name} for {purpose} ...")
        with _binding_lock:  # other threads need the same ones
            objects = [object_file(target, csrc, "binding.cpp", *shared, more=more)]
            if target == "emulator":
                objects.append(object_file(target, csrc, *RUNTIME, *extra))
        kernel = library.with_suffix(".o")
        if target == "emulator":
            source = source_flags(version, command, library.parent)
        else:
            source = [str(entry.written(version, library.parent))]
        _compile([*command, "-c", *source], kernel)
        # Of an inline function in several files the first is used. It must not be the version's:
        # one that looks for races would have the emulator report its own accesses as the kernel's.
        _compile([gxx, "-shared", *map(str, objects), kernel.name, *libraries], library)

    everything = [*command, str(version.path), *shared, *libraries]
    # Several machines may share the cache.
    native = [compilers.native_macros(gxx)] if "-march=native" in flags else []
    return kept(f"{version.op}-{where}", ".so", sources, csrc, everything, make, *more, *native)


def source_flags(version: VersionHeader, command: Sequence[str], folder: Path) -> list[str]:
    """Return the flags that name the source of an emulated version to g++.

    That is its translation, made in the folder, if the version contains what ptx.py translates,
    apart from csrc's own headers. command: the compiler and its flags. Raises BuildError.
    """
    source = entry.written(version, folder)
    csrc = csrc_of(version)
    ours = [csrc, csrc / "emulator"]
    texts = (Path(name) for name in digests([version.path], csrc, command))
    if not version.entry and (
        version.is_host
        or not any(ptx.is_foreign(one.read_bytes()) for one in texts if one.parent not in ours)
    ):
        return ["-x", "c++", str(source)]
    file = folder / f"{source.stem}.ii"
    compilers.output_of([*command, *PTX_FLAGS, "-E", "-x", "c++", str(source), "-o", str(file)])
    text = file.read_text("utf-8", "surrogateescape")
    file.write_text(ptx.translate(text, csrc / "emulator"), "utf-8", "surrogateescape")
    return ["-x", "c++-cpp-output", str(file)]


def _optimization(version: VersionHeader) -> Sequence[str]:
    if version.is_host:
        return ["-O3"]
    if RACES in version.flags:
        return RACES_OPTIMIZATION
    polls = VOLATILE.search(version.source) and "address" not in " ".join(compilers.extra_flags())
    more = ["-fsanitize=thread", VOLATILES] if polls else []
    return [*EMULATOR_OPTIMIZATION, *EMULATOR_CHECKS, *more]


def object_file(target: Target, csrc: Path, source: str, *flags: str, more: object = ()) -> Path:
    """Return the object file of a source in csrc that is the same for every version.

    It is from the cache or newly compiled. more: of its digest. Raises BuildError.
    """
    command = [*compilers.binding_flags(target, csrc), *flags]

    def make(output: Path) -> None:
        _compile([*command, "-c", str(csrc / source)], output)

    name = f"{Path(source).stem}-{target}"
    return kept(name, ".o", [csrc / source], csrc, command, make, more)


def _compile(command: Sequence[str], output: Path) -> None:
    """Run a compiler in the folder of its output; after an error keep all that it said in a log."""
    done = compilers.execute([*command, "-o", output.name], str(output.parent))
    if done.status != 0:
        log = cache_dir() / f"{output.stem}.log"
        log.write_text(f"$ {shlex.join(command)}\n{done.output}", "utf-8")
        raise BuildError(f"{compilers.first_error(done.output) or done.how} (log: {log})")


def kept(
    name: str,
    suffix: str,
    files: Sequence[Path],
    csrc: Path,
    command: Sequence[str],
    make: Callable[[Path], None],
    *more: object,
) -> Path:
    """Return a file of the cache, made by make(its path) if it is missing.

    name, files, csrc, command, more: those of digest_of(). The sources in `files` must not change
    meanwhile; messages name the first. The file ends with a digest of DIGEST_BYTES. Raises
    BuildError.
    """

    def now() -> str:
        return digest_of(name, files, csrc, command, *more) + suffix

    cache, file = cache_dir(), now()
    if found := _find(cache / file):
        return found
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            _lock(cache / f"{file}.lock", files[0].name),
            tempfile.TemporaryDirectory(prefix=f"{file}.build-", dir=cache) as folder,
        ):
            if found := _find(cache / file):  # another process has made it
                return found
            make(Path(folder) / file)
            if now() != file:
                raise BuildError(
                    f"{files[0].name}, or what it includes, changed while it was built"
                )
            return _keep(Path(folder) / file, cache)
    except OSError as error:
        raise BuildError(
            f"{cache} cannot be written ({error.strerror}): name another folder with "
            "ATTENTION_KERNELS_CACHE"
        ) from error


def sources(version: VersionHeader) -> list[Path]:
    """Return the files that a version's library is built from, except the system's and torch's."""
    csrc = csrc_of(version)
    files = [version.path, csrc / "binding.cpp", csrc / RUNTIME[0]]
    return [*map(Path, digests(files, csrc, []))]


# The cache


def cache_dir() -> Path:
    """Return the cache folder; ATTENTION_KERNELS_CACHE overrides the default."""
    named = os.environ.get("ATTENTION_KERNELS_CACHE")
    return Path(named or platformdirs.user_cache_dir("attention_kernels")).absolute()


def _tell(line: str) -> None:
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # whole lines, also from threads


@contextlib.contextmanager
def _lock(file: Path, label: str) -> Iterator[None]:
    """Hold a lock, or none if that is impossible, because it only saves work."""
    lock = filelock.FileLock(file)
    with contextlib.suppress(OSError, NotImplementedError):  # some file systems have no locks
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            _tell(f"waiting for another process that builds {label} ...")
            # Not for ever: a kernel's process can hold it, too.
            lock.acquire(timeout=compilers.COMPILER_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def _check_trusted(path: Path) -> None:
    """Raise BuildError if another user owns a path in the cache or may write to it."""
    status = path.stat()
    is_ours = status.st_uid in (os.geteuid(), 0)
    if not is_ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} {'may be written by' if is_ours else 'belongs to'} other users, whose kernels "
            "would run as yours: delete it, or name another folder with ATTENTION_KERNELS_CACHE"
        )


def _find(file: Path) -> Path | None:
    """Return a file in the cache if it exists and is intact, else None.

    Raises BuildError if another user could have written it.
    """
    try:
        _check_trusted(file.parent)
        _check_trusted(file)
        contents = file.read_bytes()
    except OSError:  # usually a missing file; otherwise the build will report what is wrong
        return None
    is_intact = hashlib.sha256(contents[:-DIGEST_BYTES]).digest() == contents[-DIGEST_BYTES:]
    return file if is_intact else None


def _keep(output: Path, cache: Path) -> Path:
    """Append a built file's SHA-256 to it and move it into the cache."""
    with output.open("ab") as file:
        file.write(hashlib.sha256(output.read_bytes()).digest())
    output.chmod(0o755)  # regardless of the umask
    return output.replace(cache / output.name)


# Digests


def digests(files: Iterable[Path], csrc: Path, flags: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each of these files and of everything they include, even indirectly.

    Headers are looked for next to the file, in csrc and in the folders of -I in `flags`. Includes
    that a condition excludes count too, and so do files that a nearer one hides; at worst that
    causes a needless rebuild. Headers of the system, the toolkit and torch are not looked for.
    Raises BuildError for an include that does not name its file.
    """
    pairs = zip(flags, [*flags[1:], ""], strict=False)
    searched = [flag[2:] or following for flag, following in pairs if flag.startswith("-I")]
    found: dict[str, str] = {}
    wanted = {*map(str, files)}
    while wanted:
        file = wanted.pop()
        if file in found or not os.path.isfile(file):
            continue
        text = Path(file).read_bytes()
        found[file] = hashlib.sha256(text).hexdigest()
        folders = [os.path.dirname(file), str(csrc), f"{csrc}/emulator", *searched]
        names = [*map(os.fsdecode, INCLUDE.findall(re.sub(rb"\\\r?\n", b"", text)))]
        if "" in names:
            raise BuildError(f"{file}: each #include must name its file, not a macro")
        paths = (os.path.join(folder, name) for folder in folders for name in names)
        wanted |= {*map(os.path.normpath, paths)}
    return dict(sorted(found.items()))


def digest_of(
    name: str, files: Iterable[Path], csrc: Path, command: Sequence[str], *more: object
) -> str:
    """Return the name with a digest of a command, its compiler, and the files with their includes.

    The digest does not depend on the folder that csrc is in.
    """
    words = [word.replace(str(csrc), "csrc") for word in command]
    files = [*files, csrc / "adapter.cuh"] if "-DATTENTION_ENTRY" in command else files
    if "-DATTENTION_EMULATOR" in command:
        files = [*files, csrc / "emulator" / "inline_ptx.h", ptx.FILE, Path(ptx.__file__)]
    found = sorted((Path(path).name, sha) for path, sha in digests(files, csrc, command).items())
    return digest_name(name, compilers.asked(command[0]), words, found, *more)


def digest_name(name: str, *parts: object) -> str:
    """Return the name with a digest of the parts."""
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
