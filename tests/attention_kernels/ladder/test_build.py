"""The cache of built libraries: what is reused, and what is rebuilt."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError


def test_a_library_is_built_once_and_replaced_if_it_is_damaged(csrc, first, calls, capsys):
    """It is never overwritten: a process that has mapped it would run parts of both."""
    library = build.build(first, "emulator", label="CUSTOM")
    assert len(calls()) == 4
    assert capsys.readouterr().err == "building CUSTOM for the CPU emulator ...\n"
    data = library.read_bytes()
    for damaged in (data, data[: len(data) // 2], data + b"more", b""):
        inode = library.stat().st_ino
        library.write_bytes(damaged)
        assert build.build(first, "emulator") == library
        assert len(calls()) == (0 if damaged == data else 2)  # not the shared objects
        assert (library.stat().st_ino == inode) == (damaged == data)
    (binding,) = build.cache_dir().glob("binding-*.o")
    binding.write_bytes(binding.read_bytes()[:100])
    build.build(header.parse_header(csrc / "fp32/v02_second.cu"), "emulator")
    assert len(calls()) == 3
    assert not [path for path in library.parent.iterdir() if path.is_dir()]


@pytest.fixture
def name_of(calls, monkeypatch):
    """name_of(version, target): the name of its library, which is not built."""
    monkeypatch.setattr(build, "_find", lambda file: file)
    monkeypatch.setattr(compilers, "cuda_runtime", Path)
    monkeypatch.setenv("CUDACXX", os.environ["CXX"])
    return lambda version, target="emulator": build.build(version, target, "90").name


def test_every_included_file_is_part_of_the_name(csrc, first, name_of, tmp_path, monkeypatch):
    """Contents decide, not dates, at any depth and with any file name."""
    parts, flagged = csrc / "a b" / "parts", tmp_path / "more"
    for folder in (parts, flagged):
        folder.mkdir(parents=True)
    (csrc / "a b" / "tiles.cuh").write_text('#include "parts/sizes.h"\n')
    text = first.path.read_text() + '#include "a b/tiles.cuh"\n// #include "no/such.h"\n'
    first.path.write_text(text + "#include <flagged.h>\n")
    (parts / "sizes.h").touch()
    (flagged / "flagged.h").touch()
    (csrc / "other.cuh").touch()
    counts = {}
    for flag in (f"-I{flagged}", f"-I {flagged}"):
        monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", flag)
        for file in (*csrc.rglob("*.[ch]*"), flagged / "flagged.h"):
            before, contents = name_of(first), file.read_text()
            file.write_text(contents + "// more\n")
            os.utime(file, (1, 1))
            counts[file.name] = name_of(first) != before
            file.write_text(contents)
            assert name_of(first) == before
    assert [name for name in sorted(counts) if not counts[name]] == ["other.cuh", "v02_second.cu"]
    assert {*counts} >= {"attention.h", "common.cuh", "binding.cpp", "sizes.h", "flagged.h"}
    assert {first.path, parts / "sizes.h", csrc / "binding.cpp"} <= {*build.sources(first)}
    copy = shutil.copytree(csrc, tmp_path / "copy")
    assert name_of(header.parse_header(copy / "fp32/v01_first.cu")) == name_of(first)


def test_flags_compilers_and_torch_are_part_of_the_name(first, name_of, monkeypatch):
    """nvcc also depends on flags from the environment."""
    version, names = first, []

    def note() -> None:
        names.append((name_of(version), name_of(version, "cuda")))

    note()
    for old, new in (("-DTHIS", "-DTHAT"), ("contiguous", "strided")):
        first.path.write_text(first.path.read_text().replace(old, new))
        version = header.parse_header(first.path)
        note()
    monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", "-DATTENTION_POISON -O1")
    note()
    monkeypatch.setattr("torch.__version__", "9.9.9")
    note()
    monkeypatch.setenv("VERSION", "2")
    compilers.asked.cache_clear()
    note()
    assert len({*names}) == len({cpu for cpu, _ in names}) == len({gpu for _, gpu in names}) == 6
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "-DMORE")
        note()
    assert len({cpu for cpu, _ in names}) == 6
    assert len({gpu for _, gpu in names}) == 8


@pytest.mark.parametrize("changed", ["fp32/v01_first.cu", "attention.h"])
def test_a_library_whose_source_changes_meanwhile_is_not_kept(
    changed, csrc, first, calls, monkeypatch
):
    monkeypatch.setenv("FIRST", f"echo // more >> {csrc / changed}")
    with pytest.raises(BuildError, match=r"\.c.*, or what it includes, changed while"):
        build.build(first, "emulator")
    assert not [*build.cache_dir().glob("*.so")]
    monkeypatch.delenv("FIRST")
    assert build.build(first, "emulator").exists()


def test_files_that_another_user_could_have_written_are_refused(first, calls, monkeypatch):
    umask = os.umask(0)
    try:
        library = build.build(first, "emulator")
    finally:
        os.umask(umask)
    assert build.build(first, "emulator") == library

    def refusal() -> str:
        with pytest.raises(BuildError) as caught:
            build.build(first, "emulator")
        return str(caught.value)

    for path in (library.parent, library):
        mode = stat.S_IMODE(path.stat().st_mode)
        for others in (0o020, 0o002):
            path.chmod(mode | others)
            assert f"{path} may be written by other users, " in refusal()
        path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if library.stat().st_uid == 0:  # root's files are trusted
        os.chown(library.parent, 54321, -1)
    assert f"{library.parent} belongs to other users" in refusal()


def test_a_read_only_cache_is_read(csrc, first, calls, monkeypatch):
    library = build.build(first, "emulator")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryDirectory", read_only)
    assert build.build(first, "emulator") == library
    sentence = rf"{library.parent} cannot be written \(Read-only file system\): name another folder"
    with pytest.raises(BuildError, match=sentence):
        build.build(header.parse_header(csrc / "fp32/v02_second.cu"), "emulator")


def test_many_builds_at_once_compile_once(first, calls, capsys):
    """Each opens the lock's file, as another process does."""
    with ThreadPoolExecutor(4) as pool:
        libraries = {*pool.map(build.build, [first] * 4, ["emulator"] * 4)}
    assert len(libraries) == 1
    assert len(calls()) == 4
    assert "waiting for another process that builds v01_first.cu ..." in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_killed_build_leaves_nothing_in_the_way(first, calls, monkeypatch):
    monkeypatch.setenv("FIRST", "kill -9 $PPID")
    context = multiprocessing.get_context("fork")
    builder = context.Process(target=build.build, args=(first, "emulator"))
    builder.start()
    builder.join(timeout=240)
    assert builder.exitcode == -signal.SIGKILL
    assert [*build.cache_dir().glob("*.build-*")]
    monkeypatch.delenv("FIRST")
    assert build.build(first, "emulator").exists()


@pytest.mark.parametrize(
    "include",
    ["#include SIZES", "#inc\\\nlude SIZES", "%:include SIZES", "/**/ #/**/ import SIZES"],
)
def test_an_include_must_name_its_file(include, first, name_of):
    """Otherwise a change of that file would not be seen."""
    first.path.write_text(f"{first.path.read_text()}{include}\n")
    with pytest.raises(BuildError, match=r"first.cu: each #include must name its file"):
        name_of(first)
