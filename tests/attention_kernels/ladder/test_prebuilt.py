from __future__ import annotations

import pytest
import torch

from attention_kernels import ladder
from attention_kernels.errors import UnavailableBackendError
from attention_kernels.ladder import compilers, header, op, prebuilt


def test_a_library_serves_until_its_sources_or_settings_change(first, csrc, tmp_path, monkeypatch):
    for name in compilers.FLAGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "CUDA_RUNTIME", "libc.so.6")
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    library = tmp_path / prebuilt.library_name(first)
    library.touch()
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(op, "_libraries", {})
    spec = ladder.backend("MINE", "mine", first)
    assert ladder.is_prebuilt(spec)
    spec.prepare("cuda")
    assert loaded == [library]
    assert prebuilt.find(first, "cpu") is None
    for file in (first.path, csrc / "common.cuh", csrc / "binding.cpp"):
        before = file.read_text()
        file.write_text(f"{before}// changed\n")
        assert prebuilt.find(first) is None
        file.write_text(before)
    for name in compilers.FLAGS:
        monkeypatch.setenv(name, "-DATTENTION_POISON")
        assert prebuilt.find(first) is None
        monkeypatch.delenv(name)
    for gpu, is_taken in (((7, 5), True), ((13, 0), True), ((11, 0), False), ((7, 0), False)):
        monkeypatch.setattr(compilers, "capabilities", lambda gpu=gpu: [gpu])
        assert (prebuilt.find(first) == library) == is_taken, gpu
    monkeypatch.setattr(compilers, "capabilities", lambda: [(7, 0), (9, 0)])
    there = csrc.rename(csrc.with_name("installed"))
    assert prebuilt.find(header.parse_header(there / "fp32/v01_first.cu")) == library
    monkeypatch.setattr(prebuilt, "CUDA_RUNTIME", "libcudart.so.0")
    other = ladder.backend("OTHER", "mine", header.parse_header(there / "fp32/v01_first.cu"))
    with pytest.raises(UnavailableBackendError, match="needs nvcc"):
        other.prepare("cuda")
