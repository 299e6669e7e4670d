"""The cache of built libraries: what is reused, and what is rebuilt."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import shutil
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import filelock
import pytest

from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def test_a_second_build_is_a_hit(first, calls, capsys):
    library = build.build(first, "emulator", label="CUSTOM")
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert len(calls()) == 3
    assert capsys.readouterr().err == "building CUSTOM for the CPU emulator ...\n"
    assert build.build(first, "emulator") == library
    assert not calls()
    assert not capsys.readouterr().err
    assert not [path for path in library.parent.iterdir() if path.is_dir()]


def library(version, target: str = "emulator", arch: str = "") -> str:
    """Return the name of a library in the cache, which is built if no file has that name."""
    return build.recipes(version, target, arch)[1].file


def test_a_changed_file_causes_a_rebuild(csrc, first, calls):
    """Contents decide, not dates: neither an old date nor the original one."""
    before = library(first)
    for name in ("attention.h", "common.cuh", "binding.cpp", "emulator/cuda_emulator.h"):
        text = (csrc / name).read_text()
        (csrc / name).write_text(text + "// more\n")
        os.utime(csrc / name, (1, 1))
        assert library(first) != before
        (csrc / name).write_text(text)
        assert library(first) == before


def test_changed_flags_cause_a_rebuild(first, calls, monkeypatch):
    libraries = {library(first)}
    for old, new in (("-DTHIS", "-DTHAT"), ("contiguous", "strided")):
        first.path.write_text(first.path.read_text().replace(old, new))
        libraries.add(library(header.parse_header(first.path)))
    monkeypatch.setattr(build, "EMULATOR_CHECKS", ["-fsanitize=bounds"])
    libraries.add(library(header.parse_header(first.path)))
    monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", "-DATTENTION_POISON -O1")
    libraries.add(build.build(header.parse_header(first.path), "emulator").name)
    assert len(libraries) == 5
    compile_binding, compile_kernel, link = sorted(calls(), key=lambda call: "-shared" in call)
    assert "-DTHAT" in compile_binding + compile_kernel
    assert all("-DATTENTION_POISON -O1" in call for call in (compile_binding, compile_kernel, link))


def replace_compiler() -> None:
    """Replace the compiler by another version, and ask for that as a new process would."""
    compiler = Path(os.environ["CXX"])
    compiler.write_text(compiler.read_text().replace("noting", "watching"))
    compilers.asked.cache_clear()


def test_another_compiler_or_torch_causes_a_rebuild(first, calls, monkeypatch):
    libraries = {library(first)}
    monkeypatch.setattr("torch.__version__", "9.9.9")
    libraries.add(library(first))
    replace_compiler()
    assert len({*libraries, library(first)}) == 3


def test_an_object_file_of_a_source_that_changes_is_not_kept(csrc, calls):
    compiler = Path(os.environ["CXX"])
    text = compiler.read_text()
    change = f"echo // more >> {csrc}/attention.h; until "
    compiler.write_text(text.replace("until ", change))
    with pytest.raises(BuildError, match=r"binding\.cpp, or what it includes, changed while"):
        build.object_file(csrc, "binding.cpp")
    compiler.write_text(text)
    assert build.object_file(csrc, "binding.cpp").exists()


def test_a_copy_of_the_sources_has_the_same_library(csrc, first, calls, tmp_path, monkeypatch):
    name = library(first)
    copy = shutil.copytree(csrc, tmp_path / "copy")
    monkeypatch.setattr(header, "CSRC", copy)
    assert library(header.versions(copy / "fp32")[0]) == name


@pytest.mark.parametrize("folder", ["fp32", ".", "fp32/a b"])
def test_a_changed_include_causes_a_rebuild(folder, csrc, first, calls):
    """Includes count at any depth and with any file name, but not in a comment."""
    text = first.path.read_text() + f'#include "{folder}/tiles.cuh"\n// #include "no/such.h"\n'
    first.path.write_text(text)
    (csrc / folder / "parts").mkdir(parents=True)
    (csrc / folder / "tiles.cuh").write_text('#include "parts/sizes.h"\n')
    sizes = csrc / folder / "parts" / "sizes.h"
    libraries = set()
    for number in ("1", "2"):
        sizes.write_text(f"constexpr int kSize = {number};\n")
        libraries.add(library(first))
    (csrc / folder / "other.cuh").write_text("// nobody includes it\n")
    libraries.add(library(first))
    assert len(libraries) == 2
    assert {first.path, sizes.resolve(), csrc / "binding.cpp"} <= {*build.sources(first)}


def test_a_damaged_library_is_replaced_and_never_overwritten(first, calls):
    """A process that has mapped it would die of a bus error or run parts of both."""
    library = build.build(first, "emulator")
    data = library.read_bytes()
    for damaged in (data[: len(data) // 2], data + b"more", b""):
        inode = library.stat().st_ino
        library.write_bytes(damaged)
        calls()
        assert build.build(first, "emulator") == library
        assert len(calls()) == 2
        assert library.stat().st_ino != inode
        build.build(first, "emulator")
        assert not calls()


def test_binding_is_compiled_once_and_again_if_it_is_damaged(csrc, first, calls):
    build.build(first, "emulator")
    (binding,) = build.cache_dir().glob("binding-*.o")
    binding.write_bytes(binding.read_bytes()[:100])
    calls()
    build.build(header.versions(csrc / "fp32")[1], "emulator")
    assert len(calls()) == 3


def test_an_object_file_is_compiled_once_and_again_if_it_is_damaged(csrc, calls):
    compiled = []
    for _ in range(3):
        file = build.object_file(csrc, "binding.cpp", "-O1")
        compiled.append(len(calls()))
        if len(compiled) == 2:
            file.write_bytes(file.read_bytes()[:-1])
    assert compiled == [1, 0, 1]


def test_files_that_another_user_could_have_written_are_refused(first, calls, monkeypatch):
    library = build.build(first, "emulator")

    def refusal() -> str:
        with pytest.raises(
            BuildError, match=r"name another folder with ATTENTION_KERNELS_CACHE$"
        ) as e:
            build.build(first, "emulator")
        return str(e.value)

    for path in (library.parent, library):
        mode = path.stat().st_mode
        for others in (0o020, 0o002):
            path.chmod(mode | others)
            assert f"chmod go-w {path}, or name" in refusal()
        path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if library.stat().st_uid == 0:  # root's files are trusted
        os.chown(library.parent, 54321, -1)
    assert f"{library.parent} belongs to another user" in refusal()


def test_built_files_are_trusted_whatever_the_umask(first, calls):
    umask = os.umask(0)
    try:
        library = build.build(first, "emulator")
    finally:
        os.umask(umask)
    assert build.build(first, "emulator") == library


def test_a_file_that_changes_while_it_is_compiled_is_not_kept(first, calls):
    compiler = Path(os.environ["CXX"])
    text = compiler.read_text()
    compiler.write_text(text.replace("until ", f"echo // more >> {first.path}; until "))
    with pytest.raises(BuildError, match=r"v01_first\.cu, or what it includes, changed while"):
        build.build(first, "emulator")
    assert not [path for path in build.cache_entries() if path.suffix == ".so"]
    compiler.write_text(text)
    assert build.build(first, "emulator").exists()


def test_the_folders_of_include_flags_are_searched(first, calls, tmp_path, monkeypatch):
    first.path.write_text(first.path.read_text() + "#include <sizes.h>\n")
    sizes = tmp_path / "more" / "sizes.h"
    sizes.parent.mkdir()
    libraries = set()
    for flag in (f"-I{sizes.parent}", f"-I {sizes.parent}"):
        monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", flag)
        for number in ("1", "2"):
            sizes.write_text(f"constexpr int kSize = {number};\n")
            libraries.add(library(first))
    assert len(libraries) == 4


def test_the_cache_is_listed_and_emptied(first, calls):
    assert not build.cache_entries()
    build.build(first, "emulator")
    entries = build.cache_entries()
    assert len([path for path in entries if path.suffix == ".so"]) == 1
    assert all(size == path.stat().st_size for path, size in entries.items())
    assert build.clear_cache() == sum(entries.values()) > 1000
    assert not build.cache_entries()


def build_elsewhere(version, file: Path, gate: Path) -> None:
    """Build in this process; the path and standard error are written to a file."""
    os.environ["GATE"] = str(gate)
    with file.open("w", buffering=1) as sys.stderr:
        print(build.build(version, "emulator"), file=sys.stderr)


def start_build(*arguments: object) -> BaseProcess:
    """Run build_elsewhere() in a process that has imported everything."""
    process = multiprocessing.get_context("fork").Process(target=build_elsewhere, args=arguments)
    process.start()
    return process


def wait_for(calls) -> list[str]:
    """Wait until a compiler runs; return its calls so far."""
    deadline = time.monotonic() + 120
    while not (begun := calls()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return begun


class Opening(io.StringIO):
    """Standard error that lets the compilers go on once something is written to it."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def write(self, text: str) -> int:
        self.gate.touch()
        return super().write(text)


@forks
@pytest.mark.parametrize("wanted", ["v01", "v02", "v01 v02"])
def test_two_processes_build_once(wanted, csrc, first, calls, tmp_path, monkeypatch):
    """Or the binding alone, if they build different versions."""
    gate, versions = tmp_path / "gate", header.versions(csrc / "fp32")
    builder = start_build(first, tmp_path / "told", gate)
    begun = wait_for(calls)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", told := Opening(gate))
        built = build.build_many([v for v in versions if v.op in wanted], "emulator")
    builder.join(timeout=240)
    assert len(begun + calls()) == (5 if "v02" in wanted else 3)
    building = "building {} for the CPU emulator ...\n"
    line, library = (tmp_path / "told").read_text().splitlines()
    assert f"{line}\n" == building.format("v01_first.cu")
    assert library == str(built.get("v01", library))
    what = "v01_first.cu for the CPU emulator" if "v01" in wanted else "binding.cpp"
    second = building.format("v02_second.cu") if "v02" in wanted else ""
    assert told.getvalue() == f"waiting for another process that builds {what} ...\n{second}"


@forks
def test_a_killed_build_leaves_nothing_in_the_way(first, calls, tmp_path):
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    builder = start_build(first, tmp_path / "told", gate)
    try:
        wait_for(calls)
        assert list(cache.glob("*.build-*"))
        builder.kill()
        builder.join()  # its compilers keep running
        assert build.build(first, "emulator").exists()
    finally:
        gate.touch()  # lets them end


def test_a_lock_that_is_never_released_only_costs_time(first, calls, monkeypatch, capsys):
    library = build.build(first, "emulator")
    lock = Path(f"{library}.lock")
    for path in build.cache_entries():
        if path != lock:
            path.unlink()
    monkeypatch.setattr(build, "LOCK_TIMEOUT_S", 0.3)
    with filelock.FileLock(lock):
        assert build.build(first, "emulator").exists()
    assert "waiting for another process" in capsys.readouterr().err


def test_a_cache_that_cannot_be_created_gives_one_warning(
    first, calls, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    library = build.build(first, "emulator")
    assert build.build(first, "emulator") == library
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert len(calls()) == 3
    assert capsys.readouterr().err.count("file/cache cannot be written (Not a directory)") == 1


def test_a_read_only_cache_is_read(csrc, first, calls, monkeypatch, capsys):
    library = build.build(first, "emulator")

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    capsys.readouterr()
    assert build.build(first, "emulator") == library
    assert not capsys.readouterr().err
    second = build.build(header.versions(csrc / "fp32")[1], "emulator")
    assert second.parent != library.parent
    assert "cannot be written (Read-only file system)" in capsys.readouterr().err


def test_the_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTENTION_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "attention_kernels"


def test_a_failed_build_says_why_and_where_the_log_is(first, calls):
    text = first.path.read_text()
    first.path.write_text(text + "a typo\n")
    with pytest.raises(BuildError) as caught:
        build.build(first, "emulator")
    message = str(caught.value)
    assert "v01_first.cu:13:1: error: 'a' does not name a type (log: " in message
    log = Path(message.removesuffix(")").split("(log: ")[1])
    assert log.read_text().startswith("$ ")
    assert "a typo" in log.read_text()
    first.path.write_text(text)
    calls()
    assert build.build(first, "emulator").exists()
    assert len(calls()) == 2  # binding.cpp was kept


def test_one_failed_version_does_not_stop_the_others(csrc, first, calls, capfd):
    first.path.write_text(first.path.read_text() + "a typo\n")
    results = build.build_many(header.versions(csrc / "fp32"), "emulator")
    assert "error: 'a' does not name a type" in str(results["v01"])
    assert isinstance(results["v02"], Path)
    assert "v02_second.cu for the CPU emulator" in capfd.readouterr().err


def test_whatever_else_nvcc_depends_on_causes_a_rebuild(first, calls, monkeypatch):
    """It depends on flags from the environment, and on its host compiler."""
    monkeypatch.setenv("CUDACXX", os.environ["CXX"])
    monkeypatch.setattr(compilers, "cuda_runtime", Path)

    def stems() -> list[str]:
        return [library(first, "cuda", "90"), library(first)]

    found = [stems()]
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "-DMORE")
        found.append(stems())
    assert len({cuda for cuda, _ in found}) == 3
    assert len({emulator for _, emulator in found}) == 1
    replace_compiler()
    assert stems()[0] not in {cuda for cuda, _ in found}
