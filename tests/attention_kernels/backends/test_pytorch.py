"""PyTorch's kernels: the one that is named runs, and refuses in torch's own words."""

from __future__ import annotations

import re

import pytest
import torch

from attention_kernels import UnsupportedError, get_backend
from attention_kernels.judge.suite import Case


@pytest.mark.parametrize(
    ("name", "kernel"), [("MATH", "attention_math"), ("FLASH_ATTENTION", "flash_attention_for_cpu")]
)
def test_the_named_kernel_and_no_other_runs_on_the_cpu(name, kernel):
    q, k, v = Case(9, 32).inputs("cpu")
    with torch.profiler.profile() as profiler:
        get_backend(f"PYTORCH_SDPA_{name}").attention(q, k, v)
    ran = [event.key for event in profiler.key_averages() if "_scaled_dot_product" in event.key]
    assert ran == [f"aten::_scaled_dot_product_{kernel}"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kernel", "dtype"),
    [
        ("PYTORCH_SDPA_FLASH_ATTENTION", "flash", torch.float16),
        ("PYTORCH_SDPA_EFFICIENT_ATTENTION", "fmha", torch.float32),
        ("PYTORCH_SDPA_CUDNN_ATTENTION", "cudnn", torch.float16),
    ],
)
def test_the_named_kernel_and_no_other_runs_on_a_gpu(name, kernel, dtype):
    q, k, v = Case(128, 64, dtype=dtype).inputs("cuda")
    gpu = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=gpu, acc_events=True) as profiler:
        get_backend(name).attention(q, k, v)
        torch.cuda.synchronize()
    attends = re.compile("(?i:attention)|fmha|flash|sdpa")
    ran = [event.key for event in profiler.key_averages() if attends.search(event.key)]
    assert ran
    assert all(kernel in key.lower() for key in ran)


@pytest.mark.gpu
def test_torch_refuses_in_its_own_words():
    spec = get_backend("PYTORCH_SDPA_FLASH_ATTENTION")
    q, k, v = Case(16, 64).inputs("cuda")
    with pytest.raises(UnsupportedError, match="dtype"):
        spec.attention(q, k, v)
    q, k, v = Case(16, 520, dtype=torch.float16).inputs("cuda")
    assert any("last dimension" in reason for reason in spec.refusals(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_rows_off_multiples_of_16_bytes_are_refused_and_break_no_context(name):
    """PyTorch passes such addresses on; FlashAttention-2 reads 16 bytes at once and ends CUDA."""
    spec = get_backend(f"PYTORCH_SDPA_{name}")
    q, k, v = Case(128, 64, dtype=torch.float16, layout="contiguous").inputs("cuda")
    off = Case(128, 64, dtype=torch.float16, layout="contiguous, unaligned, contiguous")
    with pytest.raises(UnsupportedError, match="k must begin at a multiple of 16 bytes"):
        spec.attention(*off.inputs("cuda"))
    assert spec.attention(q, k, v).isfinite().all()
    torch.cuda.synchronize()
