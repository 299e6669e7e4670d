"""How compilers are found, and the flags that they get."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from attention_kernels.inspection import resources
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with no compiler; its PATH is tmp_path / "bin"."""
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    return tmp_path


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_where_compilers_are_looked_for(bare, first, monkeypatch):
    with pytest.raises(BuildError, match=r"install g\+\+, or name one with CXX"):
        build.build(first, "emulator")
    clang = program(bare / "bin" / "clang++")
    assert compilers.find_gxx() == clang
    gxx = program(bare / "bin" / "g++")
    assert compilers.find_gxx() == gxx
    with pytest.raises(BuildError, match="needs nvcc: install the CUDA toolkit or the extra"):
        build.build(first, "cuda", "90")
    packages = SimpleNamespace(submodule_search_locations=[str(bare / "nvidia")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: packages)
    for folder in ("nvidia/cuda_nvcc/bin", "nvidia/cu13/bin", "bin"):
        nvcc = program(bare / folder / "nvcc")
        assert compilers.find_nvcc() == nvcc
    nvcc = program(bare / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert compilers.find_nvcc() == nvcc
    named = program(bare / "special")
    monkeypatch.setenv("CUDACXX", named)
    monkeypatch.setenv("CXX", named)
    assert compilers.find_nvcc() == compilers.find_gxx() == named


@pytest.mark.parametrize("name", ["CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"])
def test_a_named_compiler_is_never_replaced_by_another(name, bare, monkeypatch):
    program(bare / "bin" / "g++")
    program(bare / "bin" / "nvcc")
    monkeypatch.setenv(name, str(bare / "gone"))
    reason = compilers.missing_compiler("cuda")
    assert reason.startswith(f"{name} asks for {bare}/gone")
    assert reason.endswith(", which is not an executable here")
    assert (compilers.missing_compiler("emulator") is None) == (name != "CXX")


def test_flags_from_the_header_and_the_environment(first, monkeypatch):
    """nvcc's flags mean nothing to g++, except those that it passes on."""
    first.path.write_text(first.source.replace("-DTHIS", "-Xcompiler=-fopenmp,-mavx2"))
    flags = {*compilers.compile_flags(header.parse_header(first.path), "emulator", "")}
    assert {"-fopenmp", "-mavx2"} <= flags
    assert "--use_fast_math" not in flags
    monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", "-DTHIS='")
    with pytest.raises(BuildError, match=r"^ATTENTION_KERNELS_FLAGS: No closing quotation$"):
        build.build(first, "emulator")


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_no_shell_reads_the_path_of_a_version_file(tmp_path, csrc, monkeypatch):
    """nvcc passes paths to a shell, which would run commands in $() and in backticks."""
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path / "cache $(touch pwned)"))
    monkeypatch.chdir(tmp_path)
    harmless = shutil.copytree(csrc, tmp_path / "mine (1); & all")
    version, other = map(header.parse_header, header.version_files(harmless / "fp32"))
    version.path.write_text(version.source + "__global__ void mine(float* o) { *o = 1.0f; }\n")
    for each in (version, other):
        assert build.build(each, "cuda", "90").exists()
    assert len([*build.cache_dir().glob("binding-cuda-*.o")]) == 1
    assert resources.compile_summary(version, "90").endswith("no spills")
    for name in ("$(touch pwned)", "`touch pwned`", "it's", 'a"b', "a,b"):
        version = header.parse_header(shutil.copytree(csrc, tmp_path / name) / "fp32/v01_first.cu")
        with pytest.raises(BuildError, match=r"nvcc cannot use .*: the path has one of"):
            build.build(version, "cuda", "90")
    assert not [*tmp_path.rglob("pwned")]
