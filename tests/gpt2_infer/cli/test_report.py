from __future__ import annotations

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from attention_kernels.judge.suite import Failure
from tests.conftest import needs_compiler
from tests.gpt2_infer.cli.program import run
from tests.gpt2_infer.cli.test_json import report_of


@needs_compiler
def test_a_wrong_kernel_has_its_verdict_on_the_page_and_the_exit_status_of_verify(
    monkeypatch, tmp_path, capsys
):
    name, page = "CUSTOM_CUDA_VERSION_2", tmp_path / "page.html"
    found = report_of(failures=[Failure("seqlen 1", "bad")])
    monkeypatch.setattr("attention_kernels.judge.suite.verify", found)
    command = ["report", name, "--seqlen", "1", "--gpu", "none", "--out", str(page)]
    status, out, _ = run(capsys, *command)
    assert (status, out.startswith(f"FAILED: {name}\n")) == (1, True)
    assert "<p>seqlen 1: bad</p>" in page.read_text("utf-8")
