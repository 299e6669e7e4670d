from __future__ import annotations

import re
import subprocess
import sys

import pytest

from attention_kernels import ladder, list_backends
from scripts import compare_backends, measure, update_readme
from scripts.plot_results import PLOTS


@pytest.mark.parametrize("name", measure.RUNS)
def test_every_run_is_a_command_that_its_script_takes(name, tmp_path):
    _, script, *arguments = measure.command(name, str(tmp_path / f"{name}.json"))
    assert (measure.SCRIPTS / script.removeprefix("scripts/")).is_file()
    if script == "scripts/compare_backends.py":
        parsed = compare_backends.parse(arguments)
        assert parsed.name == name
        assert {*parsed.families} <= {spec.family for spec in list_backends()}
        for backend in (*parsed.backends, parsed.baseline):
            ladder.resolve(backend)
    elif script == "scripts/profile_kernels.py":
        assert arguments[arguments.index("--family") + 1] in {s.family for s in list_backends()}


@pytest.mark.parametrize(
    "name", ["kernel-wmma", "kernel-fa1", "kernel-fa1-cpu", "kernel-ablation", "kernel-triton-full"]
)
def test_a_document_without_a_mask_is_measured_without_one(name, tmp_path):
    _, _, *arguments = measure.command(name, str(tmp_path / "r.json"))
    assert compare_backends.parse(arguments).full


def test_the_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(measure.subprocess, "Popen", None)
    monkeypatch.setattr("sys.argv", ["measure.py", "--list"])
    assert measure.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(measure.RUNS)


def test_what_is_there_is_not_measured_again(capsys, monkeypatch, tmp_path):
    done = []

    def start(words, **_):
        done.append(words)
        return type("Child", (), {"wait": lambda self: len(done) % 2})()

    monkeypatch.setattr(measure.subprocess, "Popen", start)
    (tmp_path / "x_build.json").write_text("")
    names = ["build", "kernel-fp32", "profile-fp32"]
    monkeypatch.setattr("sys.argv", ["measure.py", "--prefix", f"{tmp_path}/x_", *names])
    assert measure.main() == 1
    captured = capsys.readouterr()
    assert "x_build.json is there already" in captured.out
    assert captured.err == "failed: kernel-fp32\n"
    assert [words[-1] for words in done] == [f"{tmp_path}/x_{name}.json" for name in names[1:]]


def test_ctrl_c_waits_for_the_run_to_save_what_it_has(capsys, monkeypatch, tmp_path):
    waited = []

    class Child:
        def wait(self):
            waited.append(1)
            if len(waited) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(measure.subprocess, "Popen", lambda *_, **__: Child())
    monkeypatch.setattr("sys.argv", ["measure.py", "--prefix", f"{tmp_path}/x_", "kernel-fp32"])
    assert measure.main() == 130
    assert len(waited) == 2
    assert "interrupted at kernel-fp32" in capsys.readouterr().err


def test_every_table_of_the_documents_has_a_command_behind_it():
    text = "\n".join(document.read_text("utf-8") for document in update_readme.documents())
    tasks = re.findall(r"<!-- (?:table|plot) ([a-z0-9-]+)", text)
    plots = {plot for plots in PLOTS.values() for plot in plots}
    assert {*re.findall(r"<!-- plot [a-z0-9-]+ (\w+) -->", text)} <= plots
    for family, *others in (m.split() for m in re.findall(r"<!-- ladder ([a-z0-9 -]+) -->", text)):
        assert family in {spec.family for spec in list_backends()}
        tasks += others
    assert {*tasks} <= {*measure.RUNS, "case-study"}


@pytest.mark.parametrize("script", sorted(measure.SCRIPTS.glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_a_script_that_is_called_wrong_says_so_in_one_line(script):
    done = subprocess.run(
        [sys.executable, script, "--no-such-option"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{script.name}: error: ")
    assert done.stderr.count("\n") == 1
