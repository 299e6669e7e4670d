from __future__ import annotations

from pathlib import Path

from attention_kernels import list_backends
from gpt2_infer.bench.record import read
from gpt2_infer.bench.study import load
from tests.conftest import ROOT
from tests.gpt2_infer.bench.common import add, off_by_one
from tests.gpt2_infer.cli.program import run

KERNEL = ["--task", "kernel", "--device", "cpu", "--seqlens", "8", "--heads", "1"]
KERNEL += ["--head-dims", "32", "--rounds", "2"]
VERSION = ROOT / "attention_kernels" / "csrc" / "fp32" / "v01_naive_flash.cu"


def test_kernels_are_compared_and_written_once(tmp_path, capsys, clean_registry):
    add("TEST_WRONG", off_by_one)
    words = ["compare", *KERNEL, "--out", str(tmp_path / "r.json"), "--name", "mine"]
    words += ["--backends", "test-wrong", "NAIVE_PYTORCH", str(VERSION), "custom-cuda"]
    status, shown, _ = run(capsys, *words)
    assert status == 0
    results = read(tmp_path / "r.json")
    assert results.task == "mine"
    assert sorted(row.status for row in results.rows) == ["emulated", "emulated", "failed", "ok"]
    last = results.rows[-1]  # by the name of what the alias stands for
    assert last.contender.startswith("CUSTOM_CUDA_VERSION_")
    assert last.extra["source_digest"] != results.rows[2].extra["source_digest"]
    assert "| `NAIVE_PYTORCH` | ieee-fp32" in " ".join(shown.split())
    assert "`TEST_WRONG`: failed: " in shown
    written = (tmp_path / "r.json").read_text()
    status, _, err = run(capsys, *words)
    assert status == 2
    assert "r.json exists: name another file, or delete it" in err
    assert (tmp_path / "r.json").read_text() == written


def test_every_study_names_existing_families_and_backends():
    specs = list_backends()
    names, families = {spec.name for spec in specs}, {spec.family for spec in specs}
    for name, study in load().items():
        named = {*getattr(study, "families", []), getattr(study, "family", "pytorch")}
        assert named <= families, name
        for backend in getattr(study, "backends", []):
            assert backend in names or Path(ROOT / backend).is_file(), name
