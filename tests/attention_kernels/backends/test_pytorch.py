from __future__ import annotations

import contextlib

import pytest
import torch

from attention_kernels import UnsupportedError, get_backend, list_backends
from attention_kernels.judge.conformance import (
    LENGTHS,
    Case,
    DecodeCase,
    cases,
    future_leaks,
    run_case,
)
from tests.conftest import DEVICES

NAMES = [spec.name for spec in list_backends() if spec.family == "pytorch"]


def usable(name: str, device: str, dtype: torch.dtype):
    spec = get_backend(name)
    reason = spec.unavailable_reason(device)
    if reason:
        pytest.skip(reason)
    q = torch.randn(1, 8, 2, 64, device=device).to(dtype)
    reasons = spec.unsupported_reasons(q, q, q)
    if reasons:
        pytest.skip("; ".join(reasons))
    return spec


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.half, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])]
)
def test_conformance(name, dtype, device):
    spec = usable(name, device, dtype)
    suite = list(cases((32, 64, 128), dtype))
    if device == "cpu":  # of the six cases of a shape one, and without the longest in 16 bits
        is_slow = dtype != torch.float32
        suite = list(cases((32, 64, 128), dtype, lengths=LENGTHS[: -2 if is_slow else None]))[::5]
    failed = []
    for case in suite:
        if case.seqlen == 1 and name == "PYTORCH_SDPA_CUDNN_ATTENTION":
            with contextlib.suppress(UnsupportedError):  # as cuDNN 9 does
                run_case(spec, case, device)
        elif not run_case(spec, case, device).passed:
            failed.append(str(case))
    assert not failed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_future_does_not_change_the_past(name, dtype, device):
    spec = usable(name, device, dtype)
    assert not future_leaks(spec, Case(100, 64, dtype=dtype), device, cut=41)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("softmax_scale", [2.5, 0.0, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_every_softmax_scale(name, softmax_scale, is_causal, device):
    """At zero and below, a mask of -infinity that is scaled is NaN, or sees what it should hide."""
    spec = usable(name, device, torch.float32)
    case = Case(9, 32, is_causal=is_causal, softmax_scale=softmax_scale)
    assert run_case(spec, case, device).passed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_decode_equals_the_last_row_of_attention(name, dtype, device):
    spec = usable(name, device, dtype)
    if not spec.has_decode(device):
        pytest.skip("no decode kernel")
    assert run_case(spec, DecodeCase(64, dtype), device).passed


@pytest.mark.parametrize(
    "name", ["NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION"]
)
def test_output_reshapes_without_a_copy(name):
    q, k, v = Case(9, 32, batch=2).inputs("cpu")
    o = get_backend(name).attention(q, k, v)
    assert o.reshape(2, 9, -1).data_ptr() == o.data_ptr()


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("PYTORCH_SDPA_MATH", "_scaled_dot_product_attention_math"),
        ("PYTORCH_SDPA_FLASH_ATTENTION", "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_the_named_kernel_and_no_other_runs_on_the_cpu(name, kernel):
    q, k, v = Case(9, 32).inputs("cpu")
    with torch.profiler.profile() as profiler:
        get_backend(name).attention(q, k, v)
    ran = {event.key.removeprefix("aten::") for event in profiler.key_averages()}
    chosen = {op for op in ran if op.startswith("_scaled_dot_product")}
    assert chosen == {kernel}


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
    ran = [
        event.key
        for event in profiler.key_averages()
        if "attention" in event.key.lower()
        or "fmha" in event.key
        or "flash" in event.key
        or "sdpa" in event.key
    ]
    assert ran
    assert all(kernel in key.lower() for key in ran)


@pytest.mark.gpu
def test_torch_refuses_in_its_own_words():
    spec = get_backend("PYTORCH_SDPA_FLASH_ATTENTION")
    q, k, v = Case(16, 64).inputs("cuda")
    with pytest.raises(UnsupportedError, match="dtype"):
        spec.attention(q, k, v)
    q, k, v = Case(16, 520, dtype=torch.float16).inputs("cuda")
    assert any("last dimension" in reason for reason in spec.unsupported_reasons(q, k, v))


def test_flash_has_no_decode_kernel_on_cuda():
    assert get_backend("PYTORCH_SDPA_FLASH_ATTENTION").has_decode("cpu")
    assert not get_backend("PYTORCH_SDPA_FLASH_ATTENTION").has_decode("cuda")
