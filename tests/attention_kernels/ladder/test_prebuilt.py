from __future__ import annotations

import pytest
import torch

from attention_kernels import ladder
from attention_kernels.errors import UnavailableBackendError
from attention_kernels.ladder import build, compilers, header, op, prebuilt


@pytest.fixture
def library(first, tmp_path, monkeypatch):
    """The path where the wheel would have the library of `first`; the file is empty."""
    for name in compilers.FLAGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "CUDA_RUNTIME", "libc.so.6")
    path = tmp_path / prebuilt.library_name(first)
    path.touch()
    return path


def test_a_library_is_found_until_what_it_was_built_from_changes(library, first, csrc):
    assert (prebuilt.find(first), prebuilt.find(first, "cpu")) == (library, None)
    for file in (first.path, csrc / "common.cuh", csrc / "binding.cpp"):
        before = file.read_text()
        file.write_text(f"{before}// changed\n")
        assert prebuilt.find(first) is None
        file.write_text(before)
    assert prebuilt.find(first) == library
    first.path.write_text(first.source.replace("-DTHIS", "-DTHAT"))
    assert prebuilt.find(header.parse_header(first.path)) is None


def test_the_same_sources_in_another_folder_have_the_same_library(library, first, csrc):
    there = csrc.rename(csrc.with_name("installed"))
    assert prebuilt.find(header.versions(there / "fp32")[0]) == library


@pytest.mark.parametrize("name", compilers.FLAGS)
def test_flags_of_the_user_need_a_build(name, library, first, monkeypatch):
    monkeypatch.setenv(name, "-DATTENTION_POISON")
    assert prebuilt.find(first) is None


def test_torch_with_another_cuda_runtime_needs_a_build(library, first, monkeypatch):
    monkeypatch.setattr(prebuilt, "CUDA_RUNTIME", "libcudart.so.0")
    assert prebuilt.find(first) is None


@pytest.mark.parametrize(
    ("gpus", "is_taken"),
    [
        ([], True),
        ([(7, 5)], True),
        ([(10, 3)], True),
        ([(12, 1)], True),
        ([(13, 0)], True),  # from PTX
        ([(7, 0)], False),
        ([(11, 0)], False),
        ([(7, 0), (9, 0)], True),
    ],
)
def test_a_gpu_that_no_library_has_code_for_needs_a_build(
    gpus, is_taken, library, first, monkeypatch
):
    monkeypatch.setattr(compilers, "capabilities", lambda: gpus)
    assert bool(prebuilt.find(first)) == is_taken


def test_a_prebuilt_kernel_needs_no_compiler_unless_an_architecture_is_named(
    library, first, monkeypatch
):
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(op, "_libraries", {})
    spec = ladder.backend("MINE", "mine", first)
    assert (ladder.is_prebuilt(spec), spec.probe("cuda")) == (True, None)
    spec.prepare("cuda")
    assert loaded == [library]
    with pytest.raises(build.BuildError, match="needs nvcc"):
        op.load_op(first, "cuda", "mine", "compute_80")
    library.unlink()
    other = ladder.backend("MINE", "mine", first)
    assert not ladder.is_prebuilt(other)
    assert "needs nvcc" in other.probe("cuda")
    with pytest.raises(UnavailableBackendError, match="needs nvcc"):
        other.prepare("cuda")
