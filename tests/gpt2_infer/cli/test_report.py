from __future__ import annotations

import json

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from attention_kernels import get_backend
from attention_kernels.judge.suite import Failure, Report
from attention_kernels.ladder import compilers
from gpt2_infer.cli import main


def test_bad_input_is_refused(tmp_path, capsys):
    for words, reason in (
        ([], "nothing to report"),
        (["NAIVE_PYTORCH"], "no version file"),
        (["--family", "fa1", "--gpu", "v100"], "v100"),
        (["r.json"], "unknown attention backend 'r.json'"),
        (["--family", "fa1", "--out", str(tmp_path / "no" / "page.html")], "there is no folder"),
        (["--family", "fa1", "--out", "/"], "/ is a folder"),
    ):
        assert main(["report", *words]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.skipif(compilers.missing_compiler("emulator") is not None, reason="needs a compiler")
def test_a_wrong_kernel_has_its_verdict_on_the_page_and_the_exit_status_of_verify(
    monkeypatch, tmp_path, capsys
):
    name, page = "CUSTOM_CUDA_VERSION_2", tmp_path / "page.html"
    found = Report(get_backend(name), "cpu", 7, checks=35, failures=[Failure("seqlen 1", "bad")])
    monkeypatch.setattr("attention_kernels.judge.suite.verify", lambda *_, **__: found)
    command = ["report", name, "--seqlen", "1", "--gpu", "none", "--out", str(page)]
    assert main(command) == 1
    assert capsys.readouterr().out.startswith(f"{name}: FAILED: 1 of 35 checks\n")
    assert "<p>seqlen 1: bad</p>" in page.read_text("utf-8")
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == [name]
