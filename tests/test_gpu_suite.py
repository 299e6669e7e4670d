"""The plugin of `make gpu-test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2_infer.bench.record import read

ROOT = Path(__file__).parents[1]
LAST_RUN = ROOT / "results" / "gpu_tests.json"


@pytest.mark.skipif(not LAST_RUN.exists(), reason=f"{LAST_RUN.name} is not there: make gpu-test")
def test_the_last_run_on_a_gpu_passed():
    results = read(LAST_RUN)
    assert [row.contender for row in results.of("outcome")] == []
    assert results.study["failed"] == 0
    assert results.study["passed"] > 800
    assert results.provenance.gpu is not None
    assert results.provenance.dirty is not True  # unknown on a machine without git
