from __future__ import annotations

import json
from pathlib import Path

from gpt2_infer.bench.record import read
from gpt2_infer.bench.study import Progress, load
from gpt2_infer.cli import main
from tests.gpt2_infer.bench.common import add, off_by_one

KERNEL = ["--task", "kernel", "--device", "cpu", "--seqlens", "8", "--heads", "1"]
KERNEL += ["--head-dims", "32", "--rounds", "2"]
VERSION = Path(__file__).parents[3] / "attention_kernels" / "csrc" / "fp32"


def test_kernels_are_compared_and_written(tmp_path, capsys, clean_registry):
    add("TEST_WRONG", off_by_one)
    out = tmp_path / "r.json"
    (version,) = VERSION.glob("v01_*.cu")
    backends = ["test-wrong", "NAIVE_PYTORCH", str(version), "custom-cuda"]
    status = main(
        ["compare", *KERNEL, "--out", str(out), "--name", "mine", "--backends", *backends]
    )
    assert status == 0
    results = read(out)
    assert results.task == "mine"
    statuses = [row.status for row in results.rows]
    assert sorted(statuses) == ["emulated", "emulated", "failed", "ok"]
    last = results.rows[-1]  # by the name of what the alias stands for
    assert last.contender.startswith("CUSTOM_CUDA_VERSION_")
    assert last.extra["source_digest"] != results.rows[2].extra["source_digest"]
    shown = capsys.readouterr().out
    assert "| `NAIVE_PYTORCH` | ieee-fp32" in " ".join(shown.split())
    assert "`TEST_WRONG`: failed: " in shown


def test_an_existing_file_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "r.json").write_text("mine")
    assert main(["compare", *KERNEL, "--out", str(tmp_path / "r.json")]) == 2
    assert "r.json exists: name another file, or delete it" in capsys.readouterr().err
    assert (tmp_path / "r.json").read_text() == "mine"


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
        assert main(words) == 130
    assert f"rerun to resume from {partial}" in capsys.readouterr().err
    done = json.loads(partial.read_text().splitlines()[1])[1][0]["samples"]
    assert main(words) == 0
    assert read(out).rows[0].samples == done
    assert read(out).provenance.resumed_from
    assert not partial.exists()


def test_every_study_names_existing_families_and_backends():
    from attention_kernels import list_backends

    families = {spec.family for spec in list_backends()}
    for name, study in load().items():
        named = {*getattr(study, "families", []), getattr(study, "family", "pytorch")}
        assert named <= families, name
        for backend in getattr(study, "backends", []):
            known = {spec.name for spec in list_backends()}
            assert backend in known or (Path(__file__).parents[3] / backend).is_file(), name
