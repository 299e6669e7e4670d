from __future__ import annotations

import json

from gpt2_infer.cli.backends import backends
from tests.gpt2_infer.cli.program import run


def test_the_list_fits_a_screen_and_json_has_everything(capsys):
    from attention_kernels import list_backends

    status, out, _ = run(capsys, "backends")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 160
    assert out.startswith("pytorch   NAIVE_PYTORCH ")
    (ladder,) = (line.split() for line in lines if line.startswith("fp32"))
    assert ladder[1:4] == ["CUSTOM_CUDA_VERSION_1", "to", "36"]
    assert ladder[-2:] == ["36", "versions"]
    status, machine, _ = run(capsys, "backends", "--json")
    assert status == 0
    rows = {row["name"]: row for row in json.loads(machine)}
    assert list(rows) == [spec.name for spec in list_backends()]
    assert rows["NAIVE_PYTORCH"]["unavailable"]["cpu"] is None
    assert rows["PYTORCH_SDPA_EFFICIENT_ATTENTION"]["precisions"]["float32"] == "3xtf32"
    assert rows["CUSTOM_CUDA_VERSION_1"]["emulated_on"] == ["cpu"]
    starts = [rows[f"CUSTOM_CUDA_VERSION_{number}"]["predecessor"] for number in (1, 2, 18)]
    assert starts == [None, "CUSTOM_CUDA_VERSION_1", "CUSTOM_CUDA_VERSION_12"]


def test_a_family_or_a_backend_is_shown_in_detail(capsys):
    assert [row.family for row in backends(("hopper", "HOPPER_VERSION_1"))] == ["hopper"] * 9
    _, out, _ = run(capsys, "backends", "CUSTOM_CUDA_VERSION_18", "CUSTOM_CUDA", "pytorch")
    assert "takes float32 (tf32); head_dim 32, 64, 128; changes CUSTOM_CUDA_VERSION_12\n" in out
    assert "\n  float16: on compute capability 9.0, HOPPER_VERSION_" in out
    assert "needs a CUDA device" in out or "PYTORCH_SDPA_CUDNN_ATTENTION (pytorch), on cuda" in out
    status, _, err = run(capsys, "backends", "CUSTOM_CUDA_VERSION_99")
    assert status == 2
    assert "CUSTOM_CUDA_VERSION_99" in err
