from __future__ import annotations

import functools
import json

import pytest

from attention_kernels.inspection import accesses
from gpt2_infer.cli import main


@pytest.mark.slow
def test_accesses_shows_the_accesses_of_each_source_line(capsys, monkeypatch):
    once = functools.cache(accesses.count_accesses)
    monkeypatch.setattr(accesses, "count_accesses", once)
    command = ["accesses", "CUSTOM_CUDA_VERSION_1", "--seqlen", "33", "--head-dim", "32", "--full"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    conflicts = [access for access in found if access["conflicts"]]
    assert [access["source"][:4] for access in conflicts] == ["s +="]
    assert main(command) == 0
    title, _, head, *rows, _, legend = capsys.readouterr().out.splitlines()
    assert any(row.split()[0].count(">") == 1 for row in rows)
    assert legend.startswith("Line a>b: ")
    assert title == "v01_naive_flash.cu, emulated: B=1 H=1 N=33 head_dim=32 full"
    assert head.split()[:4] == ["line", "access", "bytes", "requests"]
    assert len(rows) == len(found)
    assert sum("(32-way)" in row for row in rows) == 1
