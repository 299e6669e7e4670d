from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from attention_kernels import get_backend
from attention_kernels.judge.suite import Failure, Report
from attention_kernels.ladder import compilers
from gpt2_infer.cli import main
from tests.gpt2_infer.bench.common import kernels


def test_a_page_may_show_results_alone_and_bad_input_is_refused(tmp_path, capsys):
    results, page = tmp_path / "r.json", tmp_path / "page.html"
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    kernels().write(results)
    without = kernels()
    for row in without.rows:
        row.extra.clear()
    without.write(lacking := tmp_path / "lacking.json")
    assert main(["report", str(results), "--out", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page}")
    assert "kernel-test, roofline" in page.read_text("utf-8")
    for words, reason in (
        ([], "nothing to report"),
        (["NAIVE_PYTORCH"], "no version file"),
        ([str(results), "--gpu", "v100"], "v100"),
        ([str(page.with_suffix(".json"))], "cannot be read"),
        ([str(fifo)], "Not a regular file"),
        ([str(results), "--out", str(tmp_path / "no" / "page.html")], "there is no folder"),
        (["CUSTOM_CUDA_VERSION_2", "--out", "/"], "/ is a folder"),
        (
            [str(lacking)],
            "not as studies of kind kernel are: KeyError: 'precision'",
        ),
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
