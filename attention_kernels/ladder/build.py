"""Build version files into shared libraries, with a cache.

ninja runs the compilers in a temporary folder. The library is moved into the cache atomically,
under a name with a digest of everything that went into it: compilers, flags, and the contents of
the version file and of the files it includes. A library with that name is reused, for the emulator
also by other copies of the sources. So dates are never compared, no library is ever overwritten,
and a killed build leaves nothing harmful behind. The lock only keeps two processes from doing the
same work.

Code from the cache runs in this process, so, like ssh with its keys, nothing is loaded that another
user owns or could have written. The last bytes of each file are the SHA-256 of the rest, so that a
damaged file is rebuilt.

Environment: ATTENTION_KERNELS_CACHE names the cache folder; ATTENTION_KERNELS_FLAGS adds compiler
flags, e.g. -DATTENTION_POISON or, for the emulator, "-fsanitize=address -g".
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from attention_kernels.ladder.compilers import (
    FLAGS,
    BuildError,
    Target,
    binding_flags,
    code_name,
    compile_flags,
    cuda_runtime,
    extra_flags,
    find_gxx,
    find_ninja,
    first_error,
    identity,
    native_macros,
    output_of,
    shell_safe,
)
from attention_kernels.ladder.header import VersionHeader, csrc_of

LOCK_TIMEOUT_S = 300.0
DIGEST_BYTES = hashlib.sha256().digest_size  # at the end of each file in the cache
# Sanitizer checks whose failures csrc/emulator/faults.cpp handles.
EMULATOR_CHECKS = ("-fsanitize=alignment,bounds,object-size", "-fno-sanitize-recover=all")
# Compiling takes longer than most emulated launches. Inlining as at -O2: a bound is checked only
# where the compiler sees the array.
EMULATOR_OPTIMIZATION = ("-Og", "-finline-small-functions", "-finline-functions")
# Of a build that looks for races; the other build has all checks.
RACES_OPTIMIZATION = ("-Og", "-fsanitize=bounds", "-fno-sanitize-recover=all")
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.M)
EMULATOR_WRAPS = "-Wl,--wrap=exit,--wrap=_exit,--wrap=abort,--wrap=__assert_fail"
RULES = """\
rule run
  command = $words > $out.log 2>&1
  description = $what
"""


@dataclass(frozen=True)
class _Plan:
    """The plan for building one version."""

    version: VersionHeader
    target: Target
    arch: str
    label: str
    stem: str
    """The name of its files in the cache, with a digest of everything that it is built from."""
    binding: str
    """The name of binding.cpp's files in the cache, which many versions share."""


def build(version: VersionHeader, target: Target, arch: str = "", *, label: str = "") -> Path:
    """Return the shared library of a version, from the cache or newly built.

    arch: the compute capabilities to build for, e.g. "90" or "80,90"; "compute_80": PTX, which the
    driver compiles for any later one; empty for the emulator.
    label: the name of the version in the progress line on stderr, by default the file's. Raises
    BuildError with the compiler's first error line and the path of its log.
    """
    (outcome,) = build_many([version], target, arch, label=label).values()
    if isinstance(outcome, BuildError):
        raise outcome
    return outcome


def build_many(
    wanted: Iterable[VersionHeader], target: Target, arch: str = "", *, label: str = ""
) -> dict[str, Path | BuildError]:
    """Build versions that the cache lacks, with one ninja; return library or error by op.

    Arguments as for build(). Raises BuildError for an untrusted cache.
    """
    built: dict[str, Path | BuildError] = {}
    plans = []
    for version in wanted:
        try:
            plans.append(_plan(version, target, arch, label))
        except BuildError as error:
            built[version.op] = error
    cache = cache_dir()
    if missing := _missing(plans, cache, built):
        cache = _writable(cache)
        one = missing[0] if len(missing) == 1 else None
        name, label = (one.stem, one.label) if one else (target, f"{len(missing)} kernels")
        binding = cache / f"{missing[0].binding}.o"
        # binding.cpp takes longer than most versions.
        once: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if not _find(binding):
            once = _lock(binding.with_suffix(".lock"), "binding.cpp")
        with _lock(cache / f"{name}.lock", label) as held, once:
            for left in cache.glob(f"{name}.build-*") if held else ():  # of killed processes
                shutil.rmtree(left, ignore_errors=True)
            if missing := _missing(missing, cache, built):  # another process may have built it
                _tell(f"building {label} ...")
                with tempfile.TemporaryDirectory(prefix=f"{name}.build-", dir=cache) as folder:
                    built |= _run_ninja(missing, cache, Path(folder))
    return built


def _missing(
    plans: Iterable[_Plan], cache: Path, built: dict[str, Path | BuildError]
) -> list[_Plan]:
    """Add the libraries found in the cache to `built`; return the plans without one."""
    found = {plan: _find(cache / f"{plan.stem}.so") for plan in plans}
    built |= {plan.version.op: library for plan, library in found.items() if library}
    return [plan for plan, library in found.items() if not library]


def object_file(csrc: Path, source: str, *flags: str) -> Path:
    """Return the object file of a source in csrc that is the same for every version.

    It is from the cache or newly compiled by g++. Raises BuildError.
    """
    command = [*binding_flags("emulator", csrc), *flags]

    def compile_to(output: Path) -> None:
        output_of([*command, "-c", str(csrc / source), "-o", str(output)])

    def name() -> str:
        return digest_of(Path(source).stem, [csrc / source], csrc, command)

    return kept(name, ".o", compile_to, source)


def kept(name: Callable[[], str], suffix: str, make: Callable[[Path], None], label: str) -> Path:
    """Return a file of the cache, made by make(its path) if it is missing.

    name: digest_of() the sources, which must not change meanwhile. label: their name in messages.
    The last DIGEST_BYTES of the file are not its own. Raises BuildError.
    """
    stem, cache = name(), cache_dir()
    if found := _find(cache / f"{stem}{suffix}"):
        return found
    cache = _writable(cache)
    with _lock(cache / f"{stem}.lock", label):
        if found := _find(cache / f"{stem}{suffix}"):
            return found
        with tempfile.TemporaryDirectory(prefix=f"{stem}.build-", dir=cache) as folder:
            output = Path(folder) / f"{stem}{suffix}"
            make(output)
            if name() != stem:
                raise BuildError(f"{label}, or what it includes, changed while it was built")
            return _keep(output, cache)


def sources(version: VersionHeader) -> list[Path]:
    """Return the files that a version's library is built from, except the system's and torch's."""
    csrc = csrc_of(version)
    return [*map(Path, digests([version.path, csrc / "binding.cpp"], csrc, []))]


# The cache


def cache_dir() -> Path:
    """Return the cache folder; ATTENTION_KERNELS_CACHE overrides the default."""
    if named := os.environ.get("ATTENTION_KERNELS_CACHE"):
        return Path(named).absolute()
    # torch does not depend on platformdirs, which would do just this on Linux.
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "attention_kernels"
    return base.expanduser().absolute()


_ENTRY = re.compile(r".+-[0-9a-f]{16}(\..+)?")


def cache_entries() -> dict[Path, int]:
    """Return the files and folders in the cache, sorted, with their sizes in bytes.

    The user chooses the folder, so files that are not named like the cache's own are left out.
    """

    def size(entry: Path) -> int:
        files = entry.rglob("*") if entry.is_dir() else [entry]
        return sum(file.lstat().st_size for file in files if file.is_file())

    try:
        found = (entry for entry in cache_dir().iterdir() if _ENTRY.fullmatch(entry.name))
        return {entry: size(entry) for entry in sorted(found)}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def clear_cache() -> int:
    """Delete everything in the cache; return the number of bytes freed. Raises OSError."""
    entries = cache_entries()
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    return sum(entries.values())


def _writable(cache: Path) -> Path:
    """Return the folder, created if necessary, or a private one if it is not writable."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        return _private_cache(cache, error.strerror or str(error))


@functools.cache
def _private_cache(cache: Path, reason: str) -> Path:
    """Return a temporary folder for this process only; warn once."""
    folder = Path(tempfile.mkdtemp(prefix="attention_kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _tell(f"warning: {cache} cannot be written ({reason}): kernels are built for this run only")
    return folder


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _lock(file: Path, label: str) -> Iterator[bool]:
    """Hold a lock; yield False if it cannot be taken, because it only saves work."""
    lock = filelock.FileLock(file)
    with contextlib.suppress(OSError, NotImplementedError):  # timed out, or unsupported
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            _tell(f"waiting for another process that builds {label} ...")
            lock.acquire(timeout=LOCK_TIMEOUT_S)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _check_trusted(path: Path) -> None:
    """Raise BuildError if another user owns a path in the cache or may write to it."""
    status, other = path.stat(), "or name another folder with ATTENTION_KERNELS_CACHE"
    if status.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"{path} belongs to another user, whose kernels would run as yours: delete it, {other}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        close = shlex.join(["chmod", "go-w", str(path)])
        raise BuildError(
            f"other users may write to {path}, whose kernels run as yours: {close}, {other}"
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


# The build


def _plan(version: VersionHeader, target: Target, arch: str, label: str) -> _Plan:
    """Plan a build and name its files; raises BuildError for a missing compiler or bad setting."""
    flags, csrc, extra = compile_flags(version, target, arch), csrc_of(version), extra_flags()
    gxx = str(find_gxx())
    compilers = [identity(name) for name in sorted({flags[0], gxx})]
    torch = importlib.metadata.version("torch"), (_torch_folder() / "version.py").read_text("utf-8")
    common: list[object] = [gxx, compilers, extra, *torch]
    if target == "cuda":
        common += [os.environ.get(name) for name in FLAGS[1:]]
        archs = [*map(code_name, arch.split(","))]
        where, purpose = "_".join(archs).replace("_sm_", "_"), ", ".join(archs)
    else:
        where, purpose = "emulator", "the CPU" if version.is_host else "the CPU emulator"

    def named(name: str, file: Path, flags: Sequence[str], *more: object) -> str:
        if target == "emulator":
            return digest_of(name, [file], csrc, flags, extra, *more)
        # Also with the folders: a profiler opens the files that a library for a GPU names.
        return digest_name(name, flags, digests([file], csrc, extra), *more)

    source, shared = csrc / "binding.cpp", binding_flags(target, csrc)
    binding = named(f"binding-{target}", source, shared, common)
    # Several machines may share the cache.
    native = native_macros(gxx) if "-march=native" in flags else ""
    stem = named(f"{version.op}-{where}", version.path, flags, binding, native)
    label = f"{label or version.path.name} for {purpose}"
    return _Plan(version, target, arch, label, stem, binding)


def digests(files: Iterable[Path], csrc: Path, flags: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each of these files and of everything they include, even indirectly.

    Headers are looked for next to the file, in csrc and in the folders of -I in `flags`. Includes
    that a condition excludes count too, and so do files that a nearer one hides; at worst that
    causes a needless rebuild. Headers of the system, the toolkit and torch are not looked for.
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
        names = [*map(os.fsdecode, INCLUDE.findall(text))]
        wanted |= {os.path.normpath(f"{folder}/{name}") for folder in folders for name in names}
    return dict(sorted(found.items()))


def digest_of(
    name: str,
    files: Iterable[Path],
    csrc: Path,
    command: Sequence[str],
    extra: Sequence[str] = (),
    *more: object,
) -> str:
    """Return the name with a digest of all that a command makes of files and what they include.

    In whichever folder csrc is, the digest is the same. extra: flags of the user's.
    """
    words = [word.replace(str(csrc), "csrc") for word in command]
    contents = digests(files, csrc, extra)
    found = sorted((Path(path).name, digest) for path, digest in contents.items())
    return digest_name(name, identity(command[0]), words, found, extra, *more)


def digest_name(name: str, *parts: object) -> str:
    """Return the name with a digest of the parts."""
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _run_ninja(plans: Sequence[_Plan], cache: Path, folder: Path) -> dict[str, Path | BuildError]:
    """Build plans in an empty folder and move the results into the cache."""
    commands: dict[str, list[str]] = {}
    statements = [RULES]

    def add(output: str, what: str, command: list[str], *inputs: str) -> None:
        commands[output] = command
        words = shlex.join(command).replace("$", "$$")
        statements.append(f"build {output}: run {' '.join(inputs)}\n  words = {words}\n")
        statements.append(f"  what = {what}\n")

    for plan in plans:
        binding, compiled = f"{plan.binding}.o", f"{plan.stem}.o"
        kept = _find(cache / binding)
        if not kept and binding not in commands:
            add(binding, f"binding.cpp for {plan.target}", _compile_binding(plan, folder))
        add(compiled, plan.label, _compile_kernel(plan, folder))
        link, inputs = _link(plan, str(kept or binding)), [compiled, *([] if kept else [binding])]
        add(f"{plan.stem}.so", f"link {plan.label}", link, *inputs)
    (folder / "build.ninja").write_text("".join(statements), "utf-8")
    done = subprocess.run(
        [find_ninja(), "-k", "0"],  # keep building the others after a failure
        cwd=folder,
        # A relative temporary folder, because nvcc passes its name to a shell.
        env={**os.environ, "LC_ALL": "C", "TMPDIR": ".", "NINJA_STATUS": "[%f/%t] "},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if len(plans) == 1 else sys.__stderr__,
        stderr=subprocess.STDOUT,
        check=False,
    )
    told = (done.stdout or b"").decode(errors="replace")
    built: dict[str, Path | BuildError] = {}
    for plan in plans:
        op, file = plan.version.op, plan.version.path.name
        library, binding_object = folder / f"{plan.stem}.so", folder / f"{plan.binding}.o"
        now = _plan(plan.version, plan.target, plan.arch, "")
        if not library.exists():
            built[op] = _error(plan, folder, cache, commands, told)
        elif now.stem != plan.stem:
            built[op] = BuildError(f"{file}, or what it includes, changed while it was built")
        else:
            built[op] = _keep(library, cache)
        # A later build needs it even if this one failed; another version may have moved it.
        if binding_object.exists() and now.binding == plan.binding:
            _keep(binding_object, cache)
    return built


def _error(
    plan: _Plan, folder: Path, cache: Path, commands: dict[str, list[str]], told: str
) -> BuildError:
    """Return the error of the first step that failed; keep its log in the cache."""
    steps = (f"{plan.binding}.o", f"{plan.stem}.o", f"{plan.stem}.so")
    failed = next(step for step in steps if step in commands and not (folder / step).exists())
    output, log = told, cache / f"{plan.stem}.log"
    if (file := folder / f"{failed}.log").exists():
        output = file.read_text("utf-8", "replace")
    log.write_text(f"$ {shlex.join(commands[failed])}\n{output}", "utf-8")
    return BuildError(f"{first_error(output) or 'ninja failed'} (log: {log})")


def _torch_folder() -> Path:
    """Return torch's folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compile_kernel(plan: _Plan, folder: Path) -> list[str]:
    flags = compile_flags(plan.version, plan.target, plan.arch, folder)
    if plan.target == "emulator":
        # Hidden symbols, because the versions define the same names in one process. Line tables
        # (-g1) do not change the code; source_line() reads them.
        flags += ["-fPIC", "-fvisibility=hidden", "-g1", "-x", "c++"]
        if plan.version.is_host:
            flags += ["-O3"]
        elif "-fsanitize=thread" in flags:
            flags += RACES_OPTIMIZATION
        else:
            flags += [*EMULATOR_OPTIMIZATION, *EMULATOR_CHECKS]
        source = str(plan.version.path)
    else:
        flags += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-O3", "-lineinfo"]
        source = f"{shell_safe(plan.version.path.parent, folder)}/{plan.version.path.name}"
    return [*flags, *extra_flags(), "-c", source, "-o", f"{plan.stem}.o"]


def _compile_binding(plan: _Plan, folder: Path) -> list[str]:
    csrc = csrc_of(plan.version)
    flags = binding_flags(plan.target, csrc, folder)
    hidden = ["-fPIC", "-fvisibility=hidden"]
    flags += hidden if plan.target == "emulator" else [f"-Xcompiler={','.join(hidden)}"]
    headers = shell_safe(_torch_folder() / "include", folder)
    source = f"{shell_safe(csrc, folder)}/binding.cpp"
    flags += ["-O1", "-isystem", headers, *extra_flags()]
    return [*flags, "-c", source, "-o", f"{plan.binding}.o"]


def _link(plan: _Plan, binding: str) -> list[str]:
    libraries = _torch_folder() / "lib"
    flags = compile_flags(plan.version, plan.target, plan.arch)
    command = [str(find_gxx()), "-shared", *(flag for flag in flags if flag == "-fopenmp")]
    # Of an inline function in both files the first is used. It has to be the binding's: a version
    # that looks for races would have the emulator report its own accesses as the kernel's.
    command += [*extra_flags(), binding, f"{plan.stem}.o", "-o", f"{plan.stem}.so"]
    # libtorch.so contains only the names of torch's libraries, including those for CUDA: linking
    # those directly takes a third of a second.
    command += [f"-L{libraries}", "-Wl,--no-as-needed", "-ltorch"]
    if plan.target == "emulator":
        return [*command, "-pthread", "-ldl", EMULATOR_WRAPS]
    cudart = cuda_runtime(flags[0])
    return [*command, str(cudart), f"-Wl,-rpath,{cudart.parent}"]
