from __future__ import annotations

import json
import shutil

import pytest

from attention_kernels.ladder import compilers, header, register_ladder
from gpt2_infer.cli import main


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_one_ladder_is_shown(capsys, tmp_path, clean_registry):
    for file in ("fp32/v01_naive_flash.cu", "fp32/v02_padded_k.cu", "fa1/v07_cpu.cu"):
        shutil.copy(header.CSRC / file, tmp_path)
    register_ladder(tmp_path, family="mine", op_prefix="mine_", name=lambda file: file.stem.upper())
    only = ["--arch", "90", "--head-dim", "64"]
    assert main(["kernels", *only, "--json", "--family", "mine"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["version"] for row in rows] == ["mine_v01", "mine_v02"]  # v07 is host code
    assert all(row["blocks"] > 0 == row["spill_stores"] for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_kernels_takes_backends_and_version_files(capsys, tmp_path):
    file = tmp_path / "mine; (1).cu"  # nvcc passes its arguments to a shell
    shutil.copy(header.CSRC / "fp32" / "v01_naive_flash.cu", file)
    only = ["--arch", "sm_90", "--head-dim", "64"]
    assert main(["kernels", str(file), "custom-cuda-version-1", *only, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row.pop("version") for row in rows] == ["mine; (1)", "v01"]
    assert rows[0] == rows[1]
