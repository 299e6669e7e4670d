"""The ladders of version files: results that few inputs show, their ops, refusals and builds."""

from __future__ import annotations

import re

import pytest
import torch

from attention_kernels import BackendSpec, get_backend, list_backends
from attention_kernels.backends import cuda
from attention_kernels.errors import UnavailableBackendError, UnsupportedError
from attention_kernels.judge.suite import Case, leaks, run_case, run_check
from attention_kernels.judge.worker import Runner
from tests.attention_kernels.backends import common
from tests.attention_kernels.backends.common import changed, dtype_of, for_each, fused
from tests.conftest import on_every_device, usable

PRECISIONS = {spec.name: set(spec.precisions.values()) for spec in list_backends()}
IEEE = [name for name in common.FP32 if PRECISIONS[name] == {"ieee-fp32"}]


# Right results


@on_every_device
@for_each([spec.name for spec in list_backends() if spec.dtypes == ("float16",)])
def test_tiles_that_no_row_sees_are_not_visited(name, device):
    """No block with a row before 128 sees a key from 192 on: 0 * NaN would show in its output."""
    spec = usable(name, device)
    for head_dim in spec.head_dims:
        q, k, v = Case(256, head_dim, num_heads=1, dtype=torch.float16).inputs(device)
        before = spec.attention(q, k, v)
        v[:, 192:] = torch.nan
        after = spec.attention(q, k, v)
        assert torch.equal(after[:, :128], before[:, :128])


@pytest.mark.parametrize("multiprocessors", ["1", "40"])
@pytest.mark.parametrize(
    "name",
    [pytest.param("CUSTOM_CUDA_VERSION_27", marks=pytest.mark.slow), "CUSTOM_CUDA_VERSION_36"],
)
def test_any_division_of_the_work_is_right(name, multiprocessors, monkeypatch):
    """One multiprocessor is full of large blocks; on forty, blocks or warps share a row's keys."""
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", multiprocessors)
    spec = usable(name, "cpu")
    smallest, largest = spec.head_dims[0], spec.head_dims[-1]
    for case in (Case(300, 64), Case(257, smallest, is_causal=False), Case(140, largest)):
        assert run_case(spec, case, "cpu").passed
    runner = Runner(spec, "cpu")
    assert not run_check(runner, leaks(runner, Case(300, 64), [141]))


@pytest.mark.slow
def test_attention_starts_early_where_its_blocks_spread_out(monkeypatch):
    """Blocks that copy keys before they wait for them are wrong where an early start is possible.

    That is where each block has a multiprocessor of its own, or where the blocks fill the GPU.
    """
    spec = usable("CUSTOM_CUDA_VERSION_27", "cpu")
    wait = "  ptx::wait_for_previous();\n"
    copy = "  copy_keys(n_begin);\n  __pipeline_commit();\n"
    late = f"{copy}  __pipeline_wait_prior(0);\n{wait}"
    hasty = changed(spec.version.path, (wait + copy, late))
    for multiprocessors, seqlen, is_early in ((132, 64, True), (132, 256, False), (8, 256, True)):
        monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", str(multiprocessors))
        inputs = Case(seqlen, 64, num_heads=12).inputs("cpu")
        assert torch.equal(hasty.attention(*inputs), spec.attention(*inputs)) != is_early


def check_equal_scores(spec: BackendSpec, device: str) -> None:
    """Check that equal scores and a V of 1, then -1, give an output of 0."""
    # On 8 multiprocessors WMMA's last version splits the keys of 448 queries, but not those of 600.
    cases = {448: 2904.0, 600: 2904.0, 2048: 200.0}
    if device == "cpu":
        del cases[2048]
        if spec.family != "wmma_fa2":
            del cases[600]
    for seqlen, score in cases.items():
        q = torch.full((1, seqlen, 1, 64), score / 64, dtype=dtype_of(spec), device=device)
        v = torch.ones_like(q)
        v[:, seqlen // 2 :] = -1
        o = spec.attention(q, torch.ones_like(q), v, softmax_scale=1.0, is_causal=False)
        assert o.abs().max() < 1e-6, (seqlen, score)


@on_every_device
@for_each(["CUSTOM_CUDA_VERSION_36", *common.STRIDED_HALF])
def test_a_maximum_that_does_not_change_rescales_by_one(name, device):
    check_equal_scores(usable(name, device), device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CUSTOM_CUDA_VERSION_36", common.STRIDED_HALF[0]])
def test_fused_arithmetic_is_right(name):
    spec = fused(name)
    if dtype_of(spec) == torch.float32:  # float16 would round the difference away
        inputs = Case(200, 64).inputs("cpu")
        assert not torch.equal(spec.attention(*inputs), get_backend(name).attention(*inputs))
    check_equal_scores(spec, "cpu")
    for scale in (1.0, 8.0):
        assert run_case(spec, Case(200, 64, scale, dtype=dtype_of(spec)), "cpu").passed, scale


# Part of torch


BAD = torch.zeros(1, 4, 2, 32)
ROW = torch.zeros(1, 1, 1, 32)
MISALIGNED = torch.zeros(257)[1:].view(1, 4, 2, 32)
GAPS = torch.zeros(1, 4, 2, 33)[..., :32]
FIRST, LAST = common.FP32[0], common.FP32[-1]


@pytest.mark.parametrize(
    ("name", "q", "k", "words"),
    [
        (FIRST, BAD[0], BAD, "q must be (batch, seqlen, num_heads, head_dim)"),
        (FIRST, BAD, BAD[:, :3], "k must have the shape of q"),
        (FIRST, BAD, BAD.double(), "k must be float32"),
        (LAST, BAD, BAD.mT.contiguous().mT, "k must have a last stride of 1"),
        (LAST, BAD, MISALIGNED, "k must begin at a multiple of 16 by"),
        (FIRST, GAPS, BAD, "q must be contiguous"),
        (LAST, ROW.expand(1, 2**20, 1, 32), None, "seqlen may be at most"),
    ],
)
def test_the_op_checks_who_calls_it_directly(name, q, k, words):
    op = common.op_of(usable(name, "cpu"))
    k, v = (q, q) if k is None else (k, BAD)
    with pytest.raises(RuntimeError, match=re.escape(words)):
        op(q, k, v, 1.0, True)


# Refusals


@pytest.mark.parametrize("name", [FIRST, "CUSTOM_CUDA_VERSION_15"])
def test_too_much_shared_memory_is_refused(name, monkeypatch):
    spec = usable(name, "cpu")
    q, k, v = Case(5, 128).inputs("cpu")
    assert spec.refusals(q, k, v) == []
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    with pytest.raises(UnsupportedError, match=r"head_dim 128 .* more than the 65536 of") as caught:
        spec.attention(q, k, v)
    assert caught.value.reasons == spec.refusals(q, k, v)


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        (ROW.expand(1, 2**20, 1, 32), None, "seqlen may be at most 1048560, not 1048576"),
        (ROW.expand(2**16, 1, 2**15, 32), None, "batch * num_heads may be at most 2147483647"),
        (ROW.expand(1, 1, 2**20, 32), None, "num_heads * head_dim may be at most 33554431"),
        (BAD, MISALIGNED, "k must begin at a multiple of 16 bytes, and so must its rows"),
        (BAD, GAPS, "k must begin at a multiple of 16 bytes, and so must its rows"),
    ],
)
def test_a_size_or_an_alignment_is_refused(q, k, reason):
    spec = usable("CUSTOM_CUDA_VERSION_15", "cpu")  # strided: a large q is not copied
    k = q if k is None else k
    with pytest.raises(UnsupportedError, match=re.escape(reason)) as caught:
        spec.attention(q, k, q)
    assert caught.value.reasons == spec.refusals(q, k, q)


def test_a_copy_is_aligned_and_a_batch_of_one_has_no_stride():
    for name, k in (
        (FIRST, GAPS),
        ("CUSTOM_CUDA_VERSION_15", torch.zeros(256).as_strided((1, 4, 2, 32), (33, 64, 32, 1))),
    ):
        spec = usable(name, "cpu")
        assert spec.refusals(BAD, k, BAD) == []
        spec.attention(BAD, k, BAD)


# CUSTOM_CUDA and CUSTOM_CUDA_IEEE


@pytest.fixture
def alias(monkeypatch) -> BackendSpec:
    monkeypatch.setattr(cuda, "_chosen_names", {})
    return usable("CUSTOM_CUDA_IEEE", "cpu")


def test_the_alias_is_another_version_for_short_sequences_and_wide_heads(alias):
    short, long = (alias.chosen(torch.float32, 64, "cpu", n).name for n in (256, 257))
    assert (short, long) == (common.FP32[14], IEEE[-1])
    assert alias.chosen(torch.float32, 128, "cpu", 257).name == short
    compiled = torch.compile(alias.attention, fullgraph=True, backend="eager")
    for seqlen, name in ((33, short), (34, short), (258, long)):  # 34 makes the length dynamic
        q = torch.randn(1, seqlen, 1, 32)
        assert torch.equal(alias.attention(q, q, q), get_backend(name).attention(q, q, q))
        assert torch.equal(compiled(q, q, q), alias.attention(q, q, q))


CHOICES = {  # by dtype, head_dim and seqlen, for each GPU
    (torch.float32, 64, 64): "V15 V15 V15 V15 V15",
    (torch.float32, 64, 1024): "V17 V25 V40 V25 V25",
    (torch.float32, 32, None): "V17 V25 V40 V25 V25",
    (torch.float32, 128, 128): "V15 V15 V15 V15 V15",
    (torch.float32, 128, 256): "V15 V15 V41 V15 V15",
    (torch.float32, 128, None): "V15 V25 V41 V25 V25",
    (torch.float16, 64, 257): "W9 W9 H4 W9 W9",
    (torch.float16, 128, None): "W9 W9 H10 W9 W9",
    (torch.float16, 64, 256): "W9 W9 W9 W9 W9",
}


def test_the_alias_is_the_fastest_version_that_each_gpu_runs(alias, monkeypatch):
    zeros, capabilities = torch.zeros, [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **(k | {"device": "cpu"})))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[d.index])
    monkeypatch.setattr(BackendSpec, "refusals", lambda *_: [])  # every version serves
    ladders = {"W": "WMMA_FLASH_ATTENTION_2", "H": "HOPPER", "V": "CUSTOM_CUDA"}
    for (dtype, head_dim, seqlen), versions in CHOICES.items():
        for i, version in enumerate(versions.split()):
            chosen = get_backend("CUSTOM_CUDA").chosen(dtype, head_dim, f"cuda:{i}", seqlen).name
            assert chosen == f"{ladders[version[0]]}_VERSION_{version[1:]}", (head_dim, seqlen)


def test_the_alias_skips_a_version_that_refuses_but_none_that_cannot_be_built(alias, monkeypatch):
    last, before = IEEE[-1], IEEE[-2]
    monkeypatch.setattr(BackendSpec, "refusals", lambda spec, *_: ["no"] * (spec.name == last))
    assert alias.chosen(torch.float32, 64, "cpu").name == before

    def fail(spec, *_):
        raise UnavailableBackendError(spec.name, "v99.cu:1: error")

    monkeypatch.setattr(BackendSpec, "refusals", fail)
    with pytest.raises(UnavailableBackendError, match=rf"{last} .*error"):
        alias.chosen(torch.float32, 32, "cpu")
    with pytest.raises(UnsupportedError, match=r"CUSTOM_CUDA_IEEE .*dtype float16"):
        alias.chosen(torch.float16, 64, "cpu")


# Negative controls


@pytest.mark.slow
@on_every_device
def test_a_sum_kept_in_the_tensor_cores_fails(device):
    """With O as the accumulator of all tiles, the bits that each instruction cuts off add up."""
    right = usable("CUSTOM_CUDA_VERSION_19", device)
    chained = changed(
        right.version.path,
        ("float rPV[kColumns / 8][4] = {};", "auto& rPV = rO;"),
        ("rO[first / 8 + d][i] += rPV[d][i];", ";"),
    )
    case = Case(512, 32, num_heads=1, is_causal=False, kind="offset")
    if device == "cuda":
        case = Case(4096, 64, num_heads=1)
    assert run_case(right, case, device).passed
    assert not run_case(chained, case, device).passed
