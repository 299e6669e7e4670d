"""Build version files into shared libraries, with a cache.

ninja runs the compilers in a temporary folder. What they make is moved into the cache atomically,
under a name with a digest of everything that went into it: compilers, commands, and the contents of
the sources and of the files that they include. A file with that name is reused, for the emulator
also by other copies of the sources. So dates are never compared, no library is ever overwritten,
and a killed build leaves nothing harmful behind. The lock of each file only keeps two processes
from doing the same work.

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
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import filelock
import platformdirs

from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError, Target
from attention_kernels.ladder.header import VersionHeader, csrc_of

LOCK_TIMEOUT_S = 300.0
DIGEST_BYTES = hashlib.sha256().digest_size  # at the end of each file in the cache
OUT = "@OUT@"  # in a recipe's commands: its file's name without the suffix
HIDDEN = ("-fPIC", "-fvisibility=hidden")  # the versions define the same names in one process
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
  command = ( $words ) > $out.log 2>&1
  description = $what
"""


class Recipe(NamedTuple):
    """How to make a file of the cache."""

    file: str
    """Its name, with a digest of everything that it is made from."""
    command: str
    """A command for the shell."""
    label: str
    """The name in messages."""
    needs: str = ""
    """Another file of the cache, which the command reads."""


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
    plans: dict[VersionHeader, tuple[Recipe, Recipe]] = {}
    for version in wanted:
        try:
            binding, library = recipes(version, target, arch, label)
        except BuildError as error:
            built[version.op] = error
            continue
        if found := _find(cache_dir() / library.file):
            built[version.op] = found
        else:
            plans[version] = binding, library
    steps = {recipe.file: recipe for plan in plans.values() for recipe in plan}

    def make(missing: Sequence[str], folder: Path) -> None:
        todo = {version: plan for version, plan in plans.items() if plan[1].file in missing}
        labels = [library.label for _, library in todo.values()]
        _tell(f"building {labels[0] if len(labels) == 1 else f'{len(labels)} kernels'} ...")
        for version in todo:
            compilers.link_unsafe(folder, version)
        told = _run_ninja([steps[file] for file in missing], folder, shows=len(labels) > 1)
        for version, (binding, library) in todo.items():
            now = recipes(version, target, arch, label)
            if not (folder / library.file).exists():
                failed = library if (folder / binding.file).exists() else binding
                log = folder.parent / f"{Path(library.file).stem}.log"
                built[version.op] = _error(failed, log, folder, told)
            elif now != (binding, library):
                built[version.op] = _changed(version.path.name)
                (folder / library.file).unlink()
            # A later build needs the binding even if this one failed.
            if now[0] != binding:
                (folder / binding.file).unlink(missing_ok=True)

    made = _made({file: recipe.label for file, recipe in steps.items()}, make)
    libraries = {version.op: made.get(plan[1].file) for version, plan in plans.items()}
    return built | {op: library for op, library in libraries.items() if library}


def object_file(csrc: Path, source: str, *flags: str) -> Path:
    """Return the object file of a source in csrc that is the same for every version.

    It is from the cache or newly compiled by g++. Raises BuildError.
    """
    command = [*compilers.binding_flags("emulator", csrc), *flags]

    def compile_to(output: Path) -> None:
        compilers.output_of([*command, "-c", str(csrc / source), "-o", str(output)])

    return kept(Path(source).stem, ".o", [csrc / source], csrc, command, compile_to)


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
    meanwhile; messages name the first. The last DIGEST_BYTES of the file returned are not its own.
    Raises BuildError.
    """

    def now() -> str:
        return digest_of(name, files, csrc, command, *more) + suffix

    def make_one(_: Sequence[str], folder: Path) -> None:
        make(folder / file)
        if now() != file:
            raise _changed(files[0].name)

    file = now()
    return _made({file: files[0].name}, make_one)[file]


def _changed(label: str) -> BuildError:
    return BuildError(f"{label}, or what it includes, changed while it was built")


def sources(version: VersionHeader) -> list[Path]:
    """Return the files that a version's library is built from, except the system's and torch's."""
    csrc = csrc_of(version)
    return [*map(Path, digests([version.path, csrc / "binding.cpp"], csrc, []))]


# The cache


def cache_dir() -> Path:
    """Return the cache folder; ATTENTION_KERNELS_CACHE overrides the default."""
    named = os.environ.get("ATTENTION_KERNELS_CACHE")
    return Path(named or platformdirs.user_cache_dir("attention_kernels")).absolute()


_ENTRY = re.compile(r".+-[0-9a-f]{16}(\..+)?")


def cache_entries() -> dict[Path, int]:
    """Return the files and folders in the cache, sorted, with their sizes in bytes.

    The user chooses the folder, so files that are not named like the cache's own are left out.
    """
    entries = sorted(path for path in cache_dir().glob("*") if _ENTRY.fullmatch(path.name))
    files = {entry: [entry, *entry.rglob("*")] for entry in entries}
    return {
        entry: sum(file.lstat().st_size for file in inside if file.is_file())
        for entry, inside in files.items()
    }


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


def _made(
    labels: Mapping[str, str], make: Callable[[Sequence[str], Path], None]
) -> dict[str, Path]:
    """Return files of the cache by name; make(the missing names, a folder) makes them there.

    labels: their names in messages. In the folder are links to those that are not missing.
    """
    cache, found = cache_dir(), dict[str, Path]()

    def missing() -> list[str]:
        lacking = [name for name in labels if name not in found]
        found.update({name: file for name in lacking if (file := _find(cache / name))})
        return [name for name in lacking if name not in found]

    with contextlib.ExitStack() as stack:
        if wanted := missing():
            cache = _writable(cache)
            for name in sorted(wanted, reverse=True):  # the same order in every process
                stack.callback(_lock(cache / f"{name}.lock", labels[name]).release)
        if wanted := missing():  # another process may have made them
            temporary = tempfile.TemporaryDirectory(prefix=f"{wanted[0]}.build-", dir=cache)
            folder = Path(stack.enter_context(temporary))
            for name, file in found.items():
                (folder / name).symlink_to(file)
            make(wanted, folder)
            made = [name for name in wanted if (folder / name).exists()]
            found |= {name: _keep(folder / name, cache) for name in made}
    return found


def _lock(file: Path, label: str) -> filelock.BaseFileLock:
    """Return a lock; it is not held if that is impossible, because it only saves work."""
    lock = filelock.FileLock(file)
    with contextlib.suppress(OSError, NotImplementedError):  # timed out, or unsupported
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            _tell(f"waiting for another process that builds {label} ...")
            lock.acquire(timeout=LOCK_TIMEOUT_S)
    return lock


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


def recipes(
    version: VersionHeader, target: Target, arch: str, label: str = ""
) -> tuple[Recipe, Recipe]:
    """Return how to make binding.cpp's object file, which many versions share, and the library.

    Arguments as for build(). Raises BuildError for a missing compiler or a bad setting.
    """
    import torch

    csrc, gxx, root = csrc_of(version), str(compilers.find_gxx()), compilers.torch_folder()
    flags = compilers.compile_flags(version, target, arch)
    shared = [*compilers.binding_flags(target, csrc), "-O1", "-isystem"]
    extra, hidden = compilers.extra_flags(), [*HIDDEN]
    folder_name: Callable[[Path], str] = str
    more = [torch.__version__, str(torch.version.git_version)]
    if target == "cuda":
        archs = [*map(compilers.code_name, arch.split(","))]
        where, purpose = "_".join(archs).replace("_sm_", "_"), ", ".join(archs)
        hidden, folder_name = [f"-Xcompiler={','.join(HIDDEN)}"], compilers.shell_safe
        # Also the folders, because a profiler opens the files that a library for a GPU names.
        more += [compilers.asked(gxx), str(csrc), str(version.path)]
        more += [os.environ.get(name, "") for name in compilers.FLAGS[1:]]
        flags += ["-O3", "-lineinfo"]
        cudart = compilers.cuda_runtime(flags[0])
        libraries = [str(cudart), f"-Wl,-rpath,{cudart.parent}"]
    else:
        where, purpose = "emulator", "the CPU" if version.is_host else "the CPU emulator"
        if "-march=native" in flags:
            more.append(compilers.native_macros(gxx))  # several machines may share the cache
        # Line tables (-g1) do not change the code; source_line() reads them.
        flags += ["-g1", "-x", "c++", *_optimization(version)]
        libraries = ["-pthread", "-ldl", EMULATOR_WRAPS]

    def compiled(flags: Sequence[str], file: Path) -> list[str]:
        source = f"{folder_name(file.parent)}/{file.name}"
        return [*flags, *hidden, *extra, "-c", source, "-o", f"{OUT}.o"]

    source, what = csrc / "binding.cpp", f"{label or version.path.name} for {purpose}"
    command = compiled([*shared, folder_name(root / "include")], source)
    stem = digest_of(f"binding-{target}", [source], csrc, command, *more)
    binding = Recipe(f"{stem}.o", shlex.join(command).replace(OUT, stem), source.name)
    # Of an inline function in both files the first is used. It has to be the binding's: a version
    # that looks for races would have the emulator report its own accesses as the kernel's.
    link = [gxx, "-shared", *extra, binding.file, f"{OUT}.o", "-o", f"{OUT}.so"]
    # libtorch.so contains only the names of torch's libraries, including those for CUDA: linking
    # those directly takes a third of a second.
    link += [f"-L{root}/lib", "-Wl,--no-as-needed", "-ltorch", *libraries]
    link += ["-fopenmp"] if "-fopenmp" in flags else []
    command = compiled(flags, version.path)
    stem = digest_of(f"{version.op}-{where}", [version.path], csrc, [*command, *link], *more)
    words = f"{shlex.join(command)} && {shlex.join(link)}".replace(OUT, stem)
    return binding, Recipe(f"{stem}.so", words, what, binding.file)


def _optimization(version: VersionHeader) -> Sequence[str]:
    if version.is_host:
        return ["-O3"]
    if "-Xcompiler=-fsanitize=thread" in version.flags:
        return RACES_OPTIMIZATION
    return [*EMULATOR_OPTIMIZATION, *EMULATOR_CHECKS]


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
    name: str, files: Iterable[Path], csrc: Path, command: Sequence[str], *more: object
) -> str:
    """Return the name with a digest of all that a command makes of files and what they include.

    In whichever folder csrc is, the digest is the same.
    """
    words = [word.replace(str(csrc), "csrc") for word in command]
    contents = digests(files, csrc, command)
    found = sorted((Path(path).name, digest) for path, digest in contents.items())
    return digest_name(name, compilers.asked(command[0]), words, found, *more)


def digest_name(name: str, *parts: object) -> str:
    """Return the name with a digest of the parts."""
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _run_ninja(steps: Sequence[Recipe], folder: Path, *, shows: bool) -> str:
    """Make files in a folder; show or return what ninja says."""
    statements = [RULES]
    for step in steps:
        command = step.command.replace("$", "$$")
        statements.append(f"build {step.file}: run {step.needs}\n  words = {command}\n")
        statements.append(f"  what = {step.label}\n")
    (folder / "build.ninja").write_text("".join(statements), "utf-8")
    done = subprocess.run(
        [compilers.NINJA, "-k", "0"],  # keep building the others after a failure
        cwd=folder,
        # A relative temporary folder, because nvcc passes its name to a shell.
        env={**os.environ, "LC_ALL": "C", "TMPDIR": ".", "NINJA_STATUS": "[%f/%t] "},
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__ if shows else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return (done.stdout or b"").decode(errors="replace")


def _error(failed: Recipe, log: Path, folder: Path, told: str) -> BuildError:
    """Return the error of the step that failed; keep its output in a log."""
    file = folder / f"{failed.file}.log"
    output = file.read_text("utf-8", "replace") if file.exists() else told
    log.write_text(f"$ {failed.command}\n{output}", "utf-8")
    return BuildError(f"{compilers.first_error(output) or 'ninja failed'} (log: {log})")
