"""The plugin of `make gpu-test`."""

from __future__ import annotations

import subprocess

import pytest

from gpt2_infer.bench import environment
from gpt2_infer.bench.record import read
from tests.conftest import ROOT

LAST_RUN = ROOT / "results" / "gpu_tests.json"


@pytest.mark.skipif(not LAST_RUN.exists(), reason=f"{LAST_RUN.name} is not there: make gpu-test")
def test_the_last_run_on_a_gpu_passed(tmp_path, monkeypatch):
    results = read(LAST_RUN)
    assert [row.contender for row in results.of("outcome")] == []
    assert results.study["failed"] == 0
    assert results.study["passed"] > 800
    assert results.provenance.gpu is not None
    assert results.provenance.dirty in (False, None)
    if results.provenance.dirty is None:  # without git; then its sources are those of the commit
        if environment._git("rev-parse", "--is-shallow-repository") != "false":
            pytest.skip("needs a checkout with its history")
        command = ["git", "archive", results.provenance.commit, "attention_kernels", "gpt2_infer"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", tmp_path], input=archive, check=True)
        monkeypatch.setattr(environment, "_ROOT", tmp_path)
        assert environment.source_digest() == results.provenance.source_digest
