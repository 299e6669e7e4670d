from __future__ import annotations

import json
from pathlib import Path

from attention_kernels import list_backends
from gpt2_infer.bench.record import read
from gpt2_infer.bench.study import Progress, load
from tests.gpt2_infer.bench.common import add, off_by_one
from tests.gpt2_infer.cli.program import ROOT, run

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


def test_the_same_command_resumes_after_ctrl_c(tmp_path, capsys, monkeypatch):
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    words = ["compare", *KERNEL, "--seqlens", "8", "16", "--backends", "NAIVE_PYTORCH"]
    words += ["--out", str(out)]
    add_cell = Progress.add

    def interrupted(*arguments):
        add_cell(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", interrupted)
        status, _, err = run(capsys, *words)
    assert status == 130
    assert f"rerun to resume from {partial}" in err
    done = json.loads(partial.read_text().splitlines()[1])[1][0]["samples"]
    assert run(capsys, *words)[0] == 0
    assert read(out).rows[0].samples == done
    assert read(out).provenance.resumed_from
    assert not partial.exists()


def test_every_study_names_existing_families_and_backends():
    specs = list_backends()
    names, families = {spec.name for spec in specs}, {spec.family for spec in specs}
    for name, study in load().items():
        named = {*getattr(study, "families", []), getattr(study, "family", "pytorch")}
        assert named <= families, name
        for backend in getattr(study, "backends", []):
            assert backend in names or Path(ROOT / backend).is_file(), name
