from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attention_kernels import register
from attention_kernels.contract import Kernels
from attention_kernels.reference import naive_attention
from gpt2_infer.bench import compare, environment
from gpt2_infer.bench.results import SCHEMA_FILE, Results, read
from scripts import compare_backends

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compare_backends.py"


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--device", "cpu", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore it, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def test_the_same_command_goes_on_after_ctrl_c(tmp_path):
    out = tmp_path / "r.json"
    partial = tmp_path / "r.json.partial"
    words = ["--backends", "NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "--max-tokens", "64"]
    words += ["--rounds", "12", "--out", str(out)]
    child = start(*words)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # until something is kept
        if partial.exists() and any(series.samples for series in read(partial).series):
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert f"the same command goes on from {partial}" in err
    assert not out.exists()
    kept = {series.name: series.samples for series in read(partial).series}
    child = start(*words)
    text, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    assert not partial.exists()
    assert f"wrote {out}\n" in err
    results = read(out)
    for series in results.series:
        assert len(series.samples) == 12
        assert series.samples[: len(kept[series.name])] == kept[series.name]
        assert f"| `{series.name}` |" in text
    assert len({series.facts["token_digest"] for series in results.series[:2]}) == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--seqlens", "64"], "--seqlens is not for --task generation"),
        (["--task", "kernel", "--modes", "recompute"], "--modes is not for --task kernel"),
        (["--task", "kernel", "--full", "--random-weights"], "--random-weights is not for"),
        (["--rounds", "0"], "--rounds: must be 2 or more, not 0"),
        (["--rounds", "1"], "--rounds: must be 2 or more, not 1"),
        (["--batch-sizes", "-2"], "--batch-sizes: must be 1 or more, not -2"),
        (["--task", "nothing"], "invalid choice"),
        (["--name", "My Name"], "--name: must be of a-z, 0-9, _ and -, not 'My Name'"),
        (["--name", ""], "--name: must be of a-z, 0-9, _ and -, not ''"),
    ],
)
def test_no_option_is_ignored(words, complaint, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        compare_backends.parse([*words, "--out", str(tmp_path / "r.json")])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_what_cannot_be_written_is_told_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "README.md").write_text("# mine\n")
    finished = tmp_path / "r.json"
    Results("kernel", environment.provenance(), {}, []).write(finished)
    before = finished.read_text()
    for out, complaint in (
        (tmp_path, f"{tmp_path} exists and is no results file"),
        ("/dev/full", "/dev/full exists and is no results file"),
        (tmp_path / "README.md", "README.md exists and is no results file"),
        (finished, "r.json holds a finished run; name another file, or delete it"),
        (tmp_path / "new" / "r.json", f"there is no folder {tmp_path / 'new'}"),
        ("/proc/r.json", "/proc/r.json cannot be written: "),
    ):
        with pytest.raises(SystemExit):
            compare_backends.parse(["--out", str(out)])
        assert complaint in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "r.json"}
    assert finished.read_text() == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--backends", "NO_SUCH"], "unknown attention backend 'NO_SUCH'"),
        (["--backends", "FLASH_ATTENTION_1_BASELINE"], "takes float16: see --dtypes"),
        (["--families", "none"], "no backend is of the family none"),
        (["--families", "custom-cuda"], "nothing is measured on cpu of custom-cuda (its source"),
        (["--families", "numpy", "--dtypes", "float16"], "takes float32, float64, not float16"),
        (["--baseline", "FLASH_ATTENTION_1_BASELINE"], "takes float16: see --dtypes"),
        (["--task", "kernel", "--heads", "1000000000000"], " GiB, and cpu has "),
        (["--max-tokens", "16", "2000"], "2000 tokens in all"),
        (["--dtypes", "float64"], "not in float64"),
        (["--model", "/none"], "/none"),
    ],
)
def test_bad_input_is_one_line(words, complaint, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "r.json")
    monkeypatch.setattr("sys.argv", ["compare", "--device", "cpu", *words, "--out", out])
    assert compare_backends.main() == 2
    err = capsys.readouterr().err
    assert err.startswith("compare_backends: error: ")
    assert complaint in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_name_is_what_the_schema_takes():
    pattern = json.loads(SCHEMA_FILE.read_text())["properties"]["task"]["pattern"]
    for name in ("kernel-fp32", "a_1", "My Name", "A", "", "é", "x.json"):
        if re.fullmatch(pattern, name):
            assert compare_backends.task_name(name) == name
        else:
            with pytest.raises(argparse.ArgumentTypeError):
                compare_backends.task_name(name)


@pytest.mark.parametrize("task", ["kernel", "generation"])
@pytest.mark.parametrize("named", [True, False])
def test_the_baseline_may_be_a_version_file(task, named, tmp_path, monkeypatch):
    file = tmp_path / "v08_mine.cu"
    right = ROOT / "attention_kernels" / "csrc" / "fp32" / "v08_o_in_shared.cu"
    file.write_text(right.read_text())
    seen = []

    def kernels(specs, cells, **options):
        seen.append(options["baseline"])

    def texts(load, specs, cells, prompt, **options):
        assert load(torch.float32).dtype == torch.float32
        seen.append(options["baseline"])

    monkeypatch.setattr(compare, "compare_kernels", kernels)
    monkeypatch.setattr(compare, "compare_generation", texts)
    words = ["--task", task, "--device", "cpu", "--baseline", str(file)]
    words += ["--backends", "NAIVE_PYTORCH", *[str(file)] * named]
    compare_backends.run(compare_backends.parse([*words, "--out", str(tmp_path / "r.json")]))
    assert [spec.version.path for spec in seen] == [file]


@pytest.mark.parametrize("task", ["kernel", "generation"])
def test_a_baseline_of_one_dtype_leaves_the_ratio_of_the_others_blank(
    task, tmp_path, monkeypatch, capsys, clean_registry
):
    fields = {"family": "test", "summary": "A test's.", "precisions": {"float16": "fp16"}}
    register(name="TEST_HALF", **fields)(lambda: Kernels(naive_attention))
    out = tmp_path / "r.json"
    words = ["--task", task, "--device", "cpu", "--baseline", "TEST_HALF", "--rounds", "2"]
    words += ["--backends", "NAIVE_PYTORCH", "--dtypes", "float16", "float32"]
    words += ["--seqlens", "8"] if task == "kernel" else ["--max-tokens", "12"]
    monkeypatch.setattr("sys.argv", ["compare", *words, "--out", str(out)])
    assert compare_backends.main() == 0
    measured = {(s.name, s.labels["dtype"]) for s in read(out).series if s.samples}
    both = {("NAIVE_PYTORCH", "float16"), ("NAIVE_PYTORCH", "float32")}
    assert {("TEST_HALF", "float16"), *both} <= measured
    assert ("TEST_HALF", "float32") not in measured
    assert "`NAIVE_PYTORCH`" in capsys.readouterr().out


def test_two_version_files_of_one_name_are_told_apart(tmp_path, monkeypatch):
    """The version before a change and the one after it."""
    right = ROOT / "attention_kernels" / "csrc" / "fp32" / "v08_o_in_shared.cu"
    files = []
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "v08_same.cu")
        files[-1].write_text(right.read_text().replace("v08 - O", f"v08 - the {folder} O"))
    words = ["--task", "kernel", "--device", "cpu", "--backends", *map(str, files)]
    words += ["--seqlens", "8", "--heads", "1", "--head-dims", "32", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", ["compare", *words, "--out", str(tmp_path / "r.json")])
    assert compare_backends.main() == 0
    found = [s for s in read(tmp_path / "r.json").series if s.name.startswith("V08_SAME")]
    assert [series.labels["change"] for series in found] == [
        "the old O in shared memory",
        "the new O in shared memory",
    ]
    assert len({series.name for series in found}) == 2
