from __future__ import annotations

import pytest

from tests.gpt2_infer.cli.program import run


@pytest.mark.slow
def test_accesses_shows_the_accesses_of_each_source_line(capsys):
    shape = ["--seqlen", "33", "--head-dim", "32", "--full"]
    status, out, _ = run(capsys, "accesses", "CUSTOM_CUDA_VERSION_1", *shape)
    assert status == 0
    title, _, _, *rows, _, legend = out.splitlines()
    assert title == "v01_naive_flash.cu, emulated: N=33 B=1 H=1 head_dim=32 full"
    assert legend.startswith("Line a>b: ")
    (conflict,) = [row for row in rows if "-way)" in row]
    assert "(32-way)" in conflict
    assert "s +=" in conflict
