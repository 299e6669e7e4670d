from __future__ import annotations

from gpt2_infer.cli.backends import backends
from tests.gpt2_infer.cli.program import run


def test_a_family_or_a_backend_is_shown_in_detail(capsys):
    assert [row.family for row in backends(("hopper", "HOPPER_VERSION_1"))] == ["hopper"] * 10
    _, out, _ = run(capsys, "backends", "CUSTOM_CUDA_VERSION_18", "CUSTOM_CUDA", "pytorch")
    assert "takes float32 (tf32); head_dim 32, 64, 128; changes CUSTOM_CUDA_VERSION_12\n" in out
    assert "needs a CUDA device" in out or "PYTORCH_SDPA_CUDNN_ATTENTION (pytorch), on cuda" in out
