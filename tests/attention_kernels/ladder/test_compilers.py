"""How compilers are found, and the flags that they get."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

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


def test_without_compilers_the_reason_says_what_to_do(bare, first):
    assert "install g++, or name one with CXX" in compilers.missing_compiler("emulator")
    with pytest.raises(BuildError, match="needs a C"):
        build.build(first, "emulator")
    program(bare / "bin" / "g++")
    assert compilers.missing_compiler("emulator") is None
    assert "needs nvcc: install the CUDA toolkit or the extra" in compilers.missing_compiler("cuda")
    with pytest.raises(BuildError, match="needs nvcc"):
        build.build(first, "cuda", "90")


def test_where_compilers_are_looked_for(bare, monkeypatch):
    class Spec:
        submodule_search_locations = (str(bare / "nvidia"),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: Spec)
    old = program(bare / "nvidia" / "cuda_nvcc" / "bin" / "nvcc")
    assert compilers.find_nvcc() == old
    pip = program(bare / "nvidia" / "cu13" / "bin" / "nvcc")
    assert compilers.find_nvcc() == pip
    on_path = program(bare / "bin" / "nvcc")
    assert compilers.find_nvcc() == on_path
    home = program(bare / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert compilers.find_nvcc() == home
    named = program(bare / "special-nvcc")
    monkeypatch.setenv("CUDACXX", named)
    assert compilers.find_nvcc() == named
    clang = program(bare / "bin" / "clang++")
    assert compilers.find_gxx() == clang
    gxx = program(bare / "bin" / "g++")
    assert compilers.find_gxx() == gxx
    monkeypatch.setenv("CXX", named)
    assert compilers.find_gxx() == named


@pytest.mark.parametrize("name", ["CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"])
def test_a_named_compiler_is_never_replaced_by_another(name, bare, monkeypatch):
    program(bare / "bin" / "g++")
    program(bare / "bin" / "nvcc")
    assert compilers.missing_compiler("cuda") is None
    monkeypatch.setenv(name, str(bare / "gone"))
    reason = compilers.missing_compiler("cuda")
    assert reason.startswith(f"{name} asks for {bare}/gone")
    assert reason.endswith(", which is not an executable here")
    assert (compilers.missing_compiler("emulator") is None) == (name != "CXX")


def test_an_unbalanced_quote_is_reported_in_one_sentence(first, monkeypatch):
    monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", "-DTHIS='")
    with pytest.raises(BuildError, match=r"^ATTENTION_KERNELS_FLAGS: No closing quotation$"):
        build.build(first, "emulator")


def test_host_flags_reach_the_host_compiler(first):
    file = first.path
    file.write_text(file.read_text().replace("-DTHIS", "-Xcompiler=-fopenmp,-mavx2"))
    flags = compilers.compile_flags(header.parse_header(file), "emulator", "")
    assert {"-fopenmp", "-mavx2"} <= {*flags}
    assert "--use_fast_math" not in flags


def test_nvcc_gets_the_versions_flags_and_every_architecture(first, fake_nvcc):
    flags = {*compilers.compile_flags(first, "cuda", "80,90")}
    assert {"-DTHIS", "--use_fast_math", "-DATTENTION_CONTIGUOUS"} <= flags
    assert {f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90")} <= flags
    portable = compilers.compile_flags(first, "cuda", "compute_80")
    assert "-gencode=arch=compute_80,code=compute_80" in portable


@pytest.fixture
def fake_nvcc(bare, monkeypatch):
    monkeypatch.setenv("CUDACXX", program(bare / "nvcc"))
    program(bare / "bin" / "g++")


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_no_shell_reads_the_path_of_a_version_file(tmp_path, csrc, monkeypatch):
    """nvcc passes paths to a shell, which would run commands in $() and in backticks."""
    folder = tmp_path / "$(touch pwned) `touch pwned` it's"
    folder.mkdir()
    shutil.copytree(csrc, folder / "csrc")
    file = folder / "csrc" / "fp32" / "v01_first.cu"
    (file.parent / "mine.cuh").write_text("__global__ void mine(float* o) { *o = 1.0f; }\n")
    file.write_text(file.read_text() + '#include "mine.cuh"\n')
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(folder / "cache"))
    monkeypatch.chdir(tmp_path)
    version = header.parse_header(file)
    assert build.build(version, "cuda", "90").exists()
    assert resources.compile_summary(version, "90").endswith("no spills")
    assert not [*tmp_path.rglob("pwned")]
    (file.parent / "mine.cuh").write_text("error\n")
    with pytest.raises(BuildError, match=r"mine\.cuh"):
        build.build(version, "cuda", "90")


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("a.cu(3): error: no\n1 error detected", "a.cu(3): error: no"),
        ("note\nnvcc fatal   : Unsupported gpu architecture", "nvcc fatal   : Unsupported gpu"),
        ("ld: a.o: in f:\nundefined reference to `g'\ncollect2: error", "undefined reference"),
        ("killed\n", "killed"),
    ],
)
def test_the_first_error_line(output, line):
    assert compilers.first_error(output).startswith(line)
    assert compilers.first_error("") is None
