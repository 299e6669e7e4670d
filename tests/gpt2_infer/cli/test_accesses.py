from __future__ import annotations

import sys

import pytest

from tests.conftest import ROOT
from tests.gpt2_infer.cli.program import run


@pytest.mark.slow
def test_the_readme_shows_the_accesses_of_each_source_line(capsys, monkeypatch):
    readme = (ROOT / "README.md").read_text("utf-8")
    _, shown = readme.split("$ gpt2-infer accesses CUSTOM_CUDA_VERSION_1\n")
    title, *lines = shown.split("\n```")[0].splitlines()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, _ = run(capsys, "accesses", "CUSTOM_CUDA_VERSION_1")
    assert status == 0
    assert {title, *lines} - {"", "..."} <= {*out.splitlines()}
    assert any("(32-way)" in line and "s +=" in line for line in lines)
    assert out.splitlines()[-1].startswith("Line a>b: ")
    shape = ["--seqlen", "33", "--head-dim", "32", "--full"]
    _, out, _ = run(capsys, "accesses", "CUSTOM_CUDA_VERSION_1", *shape)
    assert out.startswith("v01_naive_flash.cu, emulated: N=33 B=1 H=1 head_dim=32 full\n")
