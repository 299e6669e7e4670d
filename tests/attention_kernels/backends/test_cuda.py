"""The ladders of version files: results that few inputs show, their ops, refusals and builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from attention_kernels import (
    BackendSpec,
    UnavailableBackendError,
    UnsupportedError,
    get_backend,
    ladder,
    list_backends,
)
from attention_kernels.backends import cuda
from attention_kernels.inspection import launches
from attention_kernels.judge.suite import Case, future_leaks, run_case
from attention_kernels.ladder import compilers, header
from tests.attention_kernels.backends.common import (
    FP32,
    STRIDED_HALF,
    changed,
    dtype_of,
    for_each,
    fused,
    op_of,
    spec_of,
)
from tests.conftest import on_every_device, usable

PRECISIONS = {spec.name: set(spec.precisions.values()) for spec in list_backends()}
IEEE = [name for name in FP32 if PRECISIONS[name] == {"ieee-fp32"}]
NEGATIVE = Path(__file__).parents[1] / "negative"


# Right results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim", "parts"),
    [("90", 64, 3), ("80", 64, 3), ("86", 64, 2), ("89", 64, 2), ("120", 64, 2), ("89", 32, 3)],
)
def test_keys_are_split_for_the_blocks_that_fit(arch, head_dim, parts, recorder_of_25, monkeypatch):
    """1,024 keys are split in three for three blocks on a multiprocessor, in two for two."""
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", "132")
    version = get_backend("CUSTOM_CUDA_VERSION_25").version
    recorded = launches.record(version, recorder_of_25, [head_dim], case=(1, 1024, 12, 1))
    (grid,) = {one.grid for one in recorded if one.kernel.startswith("attention_kernel<")}
    assert grid == (12, 16, parts)


@pytest.fixture(scope="module")
def recorder_of_25():
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    version = get_backend("CUSTOM_CUDA_VERSION_25").version
    return launches.build_recorder(version)


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
    assert not future_leaks(spec, Case(300, 64), "cpu", 141)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("multiprocessors", "seqlen", "is_early"), [(132, 64, True), (132, 256, False), (8, 256, True)]
)
def test_attention_starts_early_where_its_blocks_spread_out(
    multiprocessors, seqlen, is_early, hasty, monkeypatch
):
    """Each block has a multiprocessor of its own, or they fill the GPU."""
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", str(multiprocessors))
    inputs = Case(seqlen, 64, num_heads=12).inputs("cpu")
    right = usable("CUSTOM_CUDA_VERSION_27", "cpu").attention(*inputs)
    assert torch.equal(hasty.attention(*inputs), right) != is_early


@pytest.fixture(scope="module")
def hasty():
    """Return version 27 with blocks that copy keys before they wait for them."""
    source = usable("CUSTOM_CUDA_VERSION_27", "cpu").version.path
    wait = "  ptx::wait_for_previous();\n"
    copy = "  copy_keys(n_begin);\n  __pipeline_commit();\n"
    late = f"{copy}  __pipeline_wait_prior(0);\n{wait}"
    return changed(source, (wait + copy, late))


def equal_scores(score: float, seqlen: int, dtype: torch.dtype, device: str):
    """Return q, k, v of one head with equal scores and an output of 0: V is 1, then -1."""
    q = torch.full((1, seqlen, 1, 64), score / 64, dtype=dtype, device=device)
    v = torch.ones_like(q)
    v[:, seqlen // 2 :] = -1
    return q, torch.ones_like(q), v


def check_equal_scores(spec: BackendSpec, device: str) -> None:
    # On 8 multiprocessors WMMA's last version splits the keys of 448 queries, but not those of 600.
    cases = {448: 2904.0, 600: 2904.0, 2048: 200.0}
    if device == "cpu":
        del cases[2048]
        if spec.family != "wmma_fa2":
            del cases[600]
    for seqlen, score in cases.items():
        q, k, v = equal_scores(score, seqlen, dtype_of(spec), device)
        o = spec.attention(q, k, v, softmax_scale=1.0, is_causal=False)
        assert o.abs().max() < 1e-6, (seqlen, score)


@on_every_device
@for_each(["CUSTOM_CUDA_VERSION_36", *STRIDED_HALF])
def test_a_maximum_that_does_not_change_rescales_by_one(name, device):
    check_equal_scores(usable(name, device), device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CUSTOM_CUDA_VERSION_36", STRIDED_HALF[0]])
def test_fused_arithmetic_is_right(name, tmp_path):
    spec = fused(name, tmp_path)
    if dtype_of(spec) == torch.float32:  # float16 would round the difference away
        inputs = Case(200, 64).inputs("cpu")
        assert not torch.equal(spec.attention(*inputs), get_backend(name).attention(*inputs))
    check_equal_scores(spec, "cpu")
    for scale in (1.0, 8.0):
        assert run_case(spec, Case(200, 64, scale, dtype=dtype_of(spec)), "cpu").passed, scale


# Part of torch


BAD = torch.zeros(1, 4, 2, 32)
FIRST, LAST = FP32[0], FP32[-1]


@pytest.mark.parametrize(
    ("name", "q", "k", "words"),
    [
        (FIRST, BAD[0], BAD, "q must be (batch, seqlen, num_heads, head_dim)"),
        (LAST, BAD, BAD[0], "k must be (batch, seqlen, num_heads, head_dim)"),
        (FIRST, BAD, BAD[:, :3], "k must have the shape of q"),
        (LAST, BAD.half(), BAD, "q must be float32"),
        (FIRST, BAD, BAD.double(), "k must be float32"),
        (LAST, BAD, BAD.mT.contiguous().mT, "k must have a last stride of 1"),
        (LAST, BAD, torch.zeros(257)[1:].view(1, 4, 2, 32), "k must begin at a multiple of 16 by"),
        (LAST, torch.zeros(1, 4, 2, 33)[..., :32], BAD, "q must begin at a multiple of 16 bytes"),
        (FIRST, torch.zeros(1, 4, 2, 33)[..., :32], BAD, "q must be contiguous"),
    ],
)
def test_the_op_checks_who_calls_it_directly(name, q, k, words):
    op = op_of(name, "cpu")
    with pytest.raises(RuntimeError) as caught:
        op(q, k, BAD, 1.0, True)
    assert str(caught.value).startswith(f"attention_kernels::{op.name().split('::')[1]}: ")
    assert words in str(caught.value)


def test_the_op_takes_an_empty_batch():
    empty = BAD[:0]
    assert op_of(FP32[0], "cpu")(empty, empty, empty, 1.0, True).shape == empty.shape


# Refusals


@pytest.mark.parametrize("name", [FP32[0], "CUSTOM_CUDA_VERSION_15"])
def test_too_much_shared_memory_is_refused(name, monkeypatch):
    spec = usable(name, "cpu")
    q, k, v = Case(5, 128).inputs("cpu")
    assert spec.refusals(q, k, v) == []
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(q, k, v)
    assert caught.value.reasons == spec.refusals(q, k, v)
    assert re.search(
        r"head_dim 128 on this device: .*bytes of dynamic shared memory are more than the 65536 of",
        caught.value.reasons[0],
    )


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1, 2**20, 1, 32), "seqlen may be at most 1048560, not 1048576"),
        ((2**16, 1, 2**15, 32), "batch * num_heads may be at most 2147483647, not 2147483648"),
        ((1, 1, 2**20, 32), "num_heads * head_dim may be at most 33554431, not 33554432"),
    ],
)
def test_a_size_beyond_the_grid_is_refused(shape, reason):
    name = "CUSTOM_CUDA_VERSION_15"  # strided: a copy of such a q would not fit in memory
    spec = usable(name, "cpu")
    q = torch.zeros(1, 1, 1, 32).expand(shape)
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(q, q, q)
    assert caught.value.reasons == spec.refusals(q, q, q) == [reason]
    with pytest.raises(RuntimeError, match=re.escape(reason.split(", not")[0])):
        op_of(name, "cpu")(q, q, q, 1.0, True)


def test_misaligned_inputs_are_refused():
    spec = usable("CUSTOM_CUDA_VERSION_15", "cpu")
    k = torch.zeros(257)[1:].view(1, 4, 2, 32)
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(BAD, k, BAD)
    assert caught.value.reasons == ["k must begin at a multiple of 16 bytes, and so must its rows"]
    assert spec.refusals(BAD, k, BAD) == caught.value.reasons
    k = torch.zeros(1, 4, 2, 33)[..., :32]  # some kernels get a copy, which is aligned
    assert spec.refusals(BAD, k, BAD) == caught.value.reasons
    assert get_backend(FP32[0]).refusals(BAD, k, BAD) == []
    get_backend(FP32[0]).attention(BAD, k, BAD)
    k = torch.zeros(256).as_strided((1, 4, 2, 32), (33, 64, 32, 1))  # a batch of one has no stride
    assert spec.refusals(BAD, k, BAD) == []
    spec.attention(BAD, k, BAD)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_without_compilers_the_reason_is_given_and_nothing_is_compiled(no_compiler, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    for name in ladder.versions():
        assert "needs a C++ compiler" in get_backend(name).unavailable_reason("cpu")
        assert get_backend(name).unavailable_reason("cuda") is not None


# CUSTOM_CUDA and CUSTOM_CUDA_IEEE


@pytest.fixture
def alias(monkeypatch) -> BackendSpec:
    monkeypatch.setattr(cuda, "_chosen_names", {})
    return usable("CUSTOM_CUDA_IEEE", "cpu")


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    # On sm_75 most versions, which are built one by one, have too little shared memory.
    [("75", 64), ("80", 32), pytest.param("75", 128, marks=pytest.mark.gpu)],
)
def test_the_alias_is_the_last_version_that_serves(alias, arch, head_dim, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    case = Case(33, head_dim)
    assert run_case(alias, case, "cpu").passed
    name = alias.chosen(torch.float32, head_dim, "cpu").name
    later = IEEE[IEEE.index(name) + 1 :]
    assert bool(later) == ((arch, head_dim) == ("75", 128))  # too little shared memory
    assert all(get_backend(other).refusals(*case.inputs("cpu")) for other in later)


def test_the_alias_is_another_version_for_short_sequences_and_wide_heads(alias):
    short, long = (alias.chosen(torch.float32, 64, "cpu", n).name for n in (256, 257))
    assert (short, long) == (FP32[14], IEEE[-1])
    assert alias.chosen(torch.float32, 128, "cpu", 257).name == short
    compiled = torch.compile(alias.attention, fullgraph=True, backend="eager")
    for seqlen, name in (
        (33, short),
        (34, short),
        (258, long),
    ):  # the second length makes it dynamic
        q = torch.randn(1, seqlen, 1, 32)
        assert torch.equal(alias.attention(q, q, q), get_backend(name).attention(q, q, q))
        assert torch.equal(compiled(q, q, q), alias.attention(q, q, q))


@pytest.fixture
def gpus(alias, monkeypatch) -> None:
    """Five GPUs of different compute capabilities, on which every version serves."""
    zeros, capabilities = torch.zeros, [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **(k | {"device": "cpu"})))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[d.index])
    monkeypatch.setattr(BackendSpec, "refusals", lambda *_: [])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "seqlen", "versions"),  # by GPU
    [
        ("float32", 64, 64, [15, 15, 15, 15, 15]),
        ("float32", 64, 256, [15, 15, 36, 15, 15]),
        ("float32", 64, None, [17, 25, 36, 25, 25]),
        ("float32", 64, 128, [15, 15, 36, 15, 15]),
        ("float32", 128, 128, [15, 15, 15, 15, 15]),
        ("float32", 128, 256, [15, 15, 34, 15, 15]),
        ("float32", 128, None, [15, 25, 34, 25, 25]),
        ("float16", 64, 257, ["W9", "W9", "H4", "W9", "W9"]),
        ("float16", 128, None, ["W9", "W9", "H8", "W9", "W9"]),
        ("float16", 64, 256, ["W9", "W9", "W9", "W9", "W9"]),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_the_alias_is_the_fastest_version_that_each_gpu_runs(dtype, head_dim, seqlen, versions):
    ladders = {"W": "WMMA_FLASH_ATTENTION_2", "H": "HOPPER", "V": "CUSTOM_CUDA"}
    alias, dtype = get_backend("CUSTOM_CUDA"), getattr(torch, dtype)
    names = [(f"V{x}" if isinstance(x, int) else x) for x in versions]
    names = [f"{ladders[name[0]]}_VERSION_{name[1:]}" for name in names]
    found = [alias.chosen(dtype, head_dim, f"cuda:{i}", seqlen).name for i in range(5)]
    assert found == names
    assert alias.chosen(dtype, head_dim, "cuda", seqlen).name == names[2]


def test_the_alias_never_falls_back_from_a_version_that_cannot_be_built(alias, monkeypatch):
    def fail(spec, *_):
        raise UnavailableBackendError(spec.name, "v99.cu:1: error")

    monkeypatch.setattr(BackendSpec, "refusals", fail)
    with pytest.raises(UnavailableBackendError, match=rf"{IEEE[-1]} .*error"):
        alias.chosen(torch.float32, 64, "cpu")


def test_the_alias_takes_what_its_versions_take(alias):
    q = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=r"CUSTOM_CUDA_IEEE .*dtype float16"):
        alias.chosen(q.dtype, 64, "cpu")
    assert alias.refusals(q, q, q) == ["dtype float16 (it takes float32)"]


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


WRITES_NOTHING = """
#include <cstring>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

// With a scale above 0 it is the scratch memory that nobody has written to.
int64_t scratch_floats(const Params& params) { return params.softmax_scale > 0 ? 64 : 0; }

cudaError_t launch(const Params& params, cudaStream_t) {
  if (params.scratch != nullptr) std::memcpy(params.o, params.scratch, 64 * sizeof(float));
  return cudaSuccess;
}

}  // namespace attention::ATTENTION_VERSION
"""


def test_output_and_scratch_that_nobody_wrote_are_nan(tmp_path):
    opening = (NEGATIVE / "v01_dropped_barrier.cu").read_text().split("#include")[0]
    (tmp_path / "v01_nothing.cu").write_text(opening + WRITES_NOTHING)
    spec = spec_of(header.parse_header(tmp_path / "v01_nothing.cu", "nothing_"))
    q = torch.zeros(1, 2, 1, 32)
    for softmax_scale in (1.0, -1.0):
        assert spec.attention(q, q, q, softmax_scale=softmax_scale).isnan().all(), softmax_scale


@pytest.mark.gpu
@pytest.mark.parametrize("name", [FP32[0], FP32[-1]])
def test_the_op_refuses_inputs_on_two_devices(name):
    op = op_of(name, "cuda")
    on_gpu = BAD.cuda()
    with pytest.raises(RuntimeError, match="k must be on a CUDA device"):
        op(on_gpu, BAD, on_gpu, 1.0, True)
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match="k must be on the device of q"):
            op(on_gpu, BAD.to("cuda:1"), on_gpu, 1.0, True)
