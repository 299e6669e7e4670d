from __future__ import annotations

import json

from tests.gpt2_infer.cli.program import run


def test_backends_lists_every_backend(capsys):
    from attention_kernels import list_backends

    status, out, _ = run(capsys, "backends")
    assert status == 0
    status, machine, _ = run(capsys, "backends", "--json")
    assert status == 0
    rows = {row["name"]: row for row in json.loads(machine)}
    assert list(rows) == [spec.name for spec in list_backends()]
    assert all(name in out for name in rows)
    assert out.startswith("pytorch\n  NAIVE_PYTORCH ")
    assert "\n\nfp32\n" in out
    assert rows["NAIVE_PYTORCH"]["unavailable"]["cpu"] is None
    assert rows["PYTORCH_SDPA_EFFICIENT_ATTENTION"]["precisions"]["float32"] == "3xtf32"
    assert rows["CUSTOM_CUDA_VERSION_1"]["emulated_on"] == ["cpu"]
    starts = [rows[f"CUSTOM_CUDA_VERSION_{number}"]["predecessor"] for number in (1, 2, 18)]
    assert starts == [None, "CUSTOM_CUDA_VERSION_1", "CUSTOM_CUDA_VERSION_12"]
    assert "; changes CUSTOM_CUDA_VERSION_12\n" in out
    assert "; changes CUSTOM_CUDA_VERSION_1\n" not in out
    assert "cpu (emulated)" in out or rows["CUSTOM_CUDA_VERSION_1"]["unavailable"]["cpu"]
    assert "needs a CUDA device" in out or rows["NAIVE_PYTORCH"]["unavailable"]["cuda"] is None
