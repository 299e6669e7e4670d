from __future__ import annotations

import json
import shutil

import pytest

from attention_kernels.ladder import compilers, header, register_ladder
from tests.gpt2_infer.cli.program import run


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_a_ladder_and_a_version_file_are_shown(capsys, tmp_path, clean_registry):
    def rows_of(*words: str) -> list[dict]:
        shape = ["--arch", "90", "--head-dim", "64", "--json"]
        return json.loads(run(capsys, "kernels", *words, *shape)[1])

    for file in ("fp32/v01_naive_flash.cu", "fp32/v02_padded_k.cu", "fa1/v07_cpu.cu"):
        shutil.copy(header.CSRC / file, tmp_path)
    register_ladder(tmp_path, family="mine", op_prefix="mine_", name=lambda file: file.stem.upper())
    rows = rows_of("--family", "mine")
    assert [row["version"] for row in rows] == ["mine_v01", "mine_v02"]  # v07 is host code
    assert all(row["blocks"] > 0 == row["spill_stores"] for row in rows)
    file = tmp_path / "mine; (1).cu"  # nvcc passes its arguments to a shell
    shutil.copy(tmp_path / "v01_naive_flash.cu", file)
    (own,) = rows_of(str(file))
    assert (own["version"], own["registers"]) == ("mine; (1)", rows[0]["registers"])
