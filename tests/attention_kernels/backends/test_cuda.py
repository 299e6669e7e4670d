"""Every ladder of version files: the same suite on the GPU and, from that source, emulated."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
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
    registry,
)
from attention_kernels.backends import cuda
from attention_kernels.inspection import resources
from attention_kernels.inspection import sanitize as sanitizers
from attention_kernels.inspection.sanitize import sanitize
from attention_kernels.judge.conformance import Case, DecodeCase, cases, future_leaks, run_case
from attention_kernels.judge.reference import naive_attention, reference_attention
from attention_kernels.ladder import build, compilers, header, op
from attention_kernels.ladder.header import HeaderError
from tests.conftest import DEVICES, emulator_settings, usable

NAMES = [name for name, version in ladder.versions().items() if version.role == "attention"]
FP32 = [spec.name for spec in list_backends() if spec.family == "fp32"]
PRECISIONS = {spec.name: set(spec.precisions.values()) for spec in list_backends()}
STRIDED = [name for name in NAMES if not get_backend(name).needs_contiguous]
LAST_WMMA = next(spec.name for spec in list_backends()[::-1] if spec.family == "wmma_fa2")
STRIDED_HALF = ["FLASH_ATTENTION_1_TENSOR_CORE", LAST_WMMA]
ON_TENSOR_CORES = STRIDED_HALF + [name for name in FP32 if PRECISIONS[name] != {"ieee-fp32"}]
NEGATIVE = Path(__file__).parents[1] / "negative"
FOLDER = header.CSRC / "fp32"

on_every_device = pytest.mark.parametrize("device", DEVICES)
# One version of every ladder and the first of all. The others are slow: WMMA's last takes g++
# longer than all of these.
WMMA = "WMMA_FLASH_ATTENTION_2_VERSION_1"
QUICK = {FP32[0], FP32[-1], STRIDED_HALF[0], WMMA, "ABLATION_STEP_8"}


def for_each(names: list[str]) -> pytest.MarkDecorator:
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=slow) for name in names]
    )


for_every_version = for_each(NAMES)


def ready_op(name: str, device: str):
    usable(name, device)
    get_backend(name).prepare(device)
    return getattr(torch.ops.attention_kernels, ladder.versions()[name].op).default


def dtype_of(spec: BackendSpec) -> torch.dtype:
    """A version file takes one."""
    (name,) = spec.dtypes
    return getattr(torch, name)


def inputs_of(name: str, device: str, seqlen: int, head_dim: int = 64, **fields):
    """q, k, v that the backend takes, with its nearest head_dim."""
    spec = get_backend(name)
    head_dim = min(spec.head_dims, key=lambda known: abs(known - head_dim))
    return Case(seqlen, head_dim, dtype=dtype_of(spec), **fields).inputs(device)


def spec_of(version: header.VersionHeader) -> BackendSpec:
    """A backend of a version file that is in no ladder."""
    return ladder.backend(f"TEST_{version.op.upper()}", "test", version)


# Right results


def test_the_ladder_is_the_files():
    files = header.version_files(FOLDER)
    assert [f"CUSTOM_CUDA_VERSION_{header.version_number(file)}" for file in files] == FP32
    assert len(files) >= 12
    for name in FP32:
        spec = get_backend(name)
        assert spec.dtypes == ("float32",)
        assert spec.head_dims == (32, 64, 128)
        assert spec.emulated_on == ("cpu",)
    assert [name for name in STRIDED if name in FP32][:2] == [
        "CUSTOM_CUDA_VERSION_11",
        "CUSTOM_CUDA_VERSION_12",
    ]


def around_the_tile(spec: BackendSpec) -> list[Case]:
    """Cases at the edges of a version's own tile, and one of several tiles."""
    tile = re.match(r"kBlockM(?: x kBlockN)? = (\d+)(?: x (\d+))?", spec.version.tile)
    rows = int(tile[1])
    columns = int(tile[2] or rows)
    edges = {1, rows - 1, rows, rows + 1, columns + 1, 2 * max(rows, columns) + 5}
    lengths = [(n, spec.head_dims[at % len(spec.head_dims)]) for at, n in enumerate(sorted(edges))]
    shapes = [Case(n, d, is_causal=c) for n, d in lengths for c in (True, False)]
    shapes += [Case(rows + 1, d, batch=2, num_heads=3, seed=1) for d in spec.head_dims]
    shapes += [Case(130, spec.head_dims[-1], scale) for scale in (0.02, 8.0)]
    return [dataclasses.replace(case, dtype=dtype_of(spec)) for case in shapes]


@for_every_version
def test_emulated_it_is_right_around_its_tile(name):
    spec = usable(name, "cpu")
    failed = [str(case) for case in around_the_tile(spec) if not run_case(spec, case, "cpu").passed]
    assert not failed


@for_every_version
def test_emulated_it_takes_every_softmax_scale(name):
    """Zero and below, too: a version that masks before it scales multiplies -infinity by them."""
    spec = usable(name, "cpu")
    case = Case(9, spec.head_dims[0], num_heads=1, dtype=dtype_of(spec))
    suite = [dataclasses.replace(case, softmax_scale=scale) for scale in (2.5, 0.0, -1.0)]
    failed = [str(case) for case in suite if not run_case(spec, case, "cpu").passed]
    assert not failed


@pytest.mark.gpu
@for_every_version
def test_conformance(name):
    spec = usable(name, "cuda")
    dims = list(spec.head_dims)
    q = torch.zeros(1, 1, 1, dims[-1], device="cuda", dtype=dtype_of(spec))
    if reasons := spec.unsupported_reasons(q, q, q):  # a GPU whose shared memory is too small
        assert "head_dim 128" in reasons[0]
        dims.remove(128)
    suite = [*cases(tuple(dims), dtype_of(spec)), *around_the_tile(spec)]
    suite = [case for case in suite if case.head_dim in dims]
    failed = [str(case) for case in suite if not run_case(spec, case, "cuda").passed]
    assert not failed


@on_every_device
@for_every_version
def test_the_future_does_not_change_the_past(name, device):
    spec = usable(name, device)
    for head_dim in spec.head_dims[:2]:
        for cut in (41, 64):
            case = Case(100, head_dim, dtype=dtype_of(spec))
            assert not future_leaks(spec, case, device, cut)


@on_every_device
@for_every_version
def test_a_future_of_any_size_changes_nothing(name, device):
    """Not a bit, by a power of two that later keys choose or by an overflow of what is then 0."""
    spec = usable(name, device)
    q, k, v = inputs_of(name, device, 100, num_heads=1)
    before = spec.attention(q, k, v)
    for cut in (41, 64, 81):
        future = v.clone()
        future[:, cut:] = torch.finfo(v.dtype).max * v[:, cut:].sign()
        assert torch.equal(spec.attention(q, k, future)[:, :cut], before[:, :cut]), cut


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim", "parts"),
    [("90", 64, 3), ("80", 64, 3), ("86", 64, 2), ("89", 64, 2), ("120", 64, 2), ("89", 32, 3)],
)
def test_keys_are_split_for_the_blocks_that_fit(arch, head_dim, parts, recorder_of_25, monkeypatch):
    """1,024 keys in parts of a third for three blocks on a multiprocessor, of half for two."""
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", "132")
    version = get_backend("CUSTOM_CUDA_VERSION_25").version
    command = [str(recorder_of_25), "--case=1,1024,12,1", str(head_dim)]
    grids = {row[4]: row[5] for row in resources.recorded_rows(version, command)}
    (grid,) = [grid for name, grid in grids.items() if "::attention_kernel<" in name]
    assert grid == f"12,16,{parts}"


@pytest.fixture(scope="module")
def recorder_of_25(tmp_path_factory):
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    version = get_backend("CUSTOM_CUDA_VERSION_25").version
    return resources.launch_recorder(version, tmp_path_factory.mktemp("recorder"))


def v_of_every_size(v: torch.Tensor):
    """Yield variations of v that one power of two for a row, or for all of it, could not hold."""
    first, rows, middle = torch.arange(v.shape[3]), torch.arange(v.shape[1]), v.shape[1] // 3
    yield v * 1e-30
    yield v * 1e36
    yield torch.where(rows[:, None, None] % 2 == 0, v * 1e-19, v * 1e19)
    yield torch.where(rows[:, None, None] < 2 * middle, v * 1e-25, v * 1e16)
    yield torch.where(rows[:, None, None] < 2 * middle, v * 1e16, v * 1e-25)
    yield torch.where(first % 2 == 0, v * 2.0**40, v)
    for exponent in (20, 40, 60):
        one_row = torch.where(first == 0, torch.zeros_like(v), v)
        one_row[:, middle] = torch.where(first == 0, 2.0**exponent, 0.0)
        yield one_row


@on_every_device
@for_each([name for name in FP32 if PRECISIONS[name] != {"tf32"}])
def test_v_of_any_size_keeps_the_error_of_float32(name, device):
    """By column: the norm of a row would hide the columns that an outlier leaves alone."""
    spec = usable(name, device)
    q, k, v = Case(100, 32, num_heads=1).inputs("cpu")
    for is_causal in (True, False):
        for values in v_of_every_size(v):
            exact = reference_attention(q, k, values, None, is_causal)
            unit = reference_attention(q, k, values.abs(), None, is_causal).clamp_min(1e-300)
            o = spec.attention(*(x.to(device) for x in (q, k, values)), is_causal=is_causal).cpu()
            error = ((o - exact).abs() / unit).max()
            naive = ((naive_attention(q, k, values, None, is_causal) - exact).abs() / unit).max()
            assert error <= 4 * naive


@on_every_device
@for_each([name for name in NAMES if get_backend(name).family in ("fp32", "fa1")])
def test_a_future_that_is_not_finite_changes_nothing(name, device):
    """Tensor cores multiply all of a tile's V by P, and 0 * NaN is not 0: theirs is beyond it."""
    spec = usable(name, device)
    for head_dim, cut in ((32, 41), (64, 48), (128, 66)):
        q, k, v = inputs_of(name, device, 70, head_dim, num_heads=1)
        before = spec.attention(q, k, v)
        k, v = k.clone(), v.clone()
        k[:, cut:] = torch.nan
        first = cut if name not in ON_TENSOR_CORES else -(-cut // 16) * 16
        v[:, first:, :, ::2] = torch.nan
        v[:, first:, :, 1::2] = torch.inf
        assert torch.equal(spec.attention(q, k, v)[:, :cut], before[:, :cut]), cut


@on_every_device
@for_each([name for name in NAMES if "fp16" in PRECISIONS[name]])
def test_tiles_that_no_row_sees_are_not_visited(name, device):
    """0 * NaN would tell: no block with a row before 128 sees a key from 192 on."""
    spec = usable(name, device)
    for head_dim in spec.head_dims:
        q, k, v = Case(256, head_dim, num_heads=1, dtype=torch.float16).inputs(device)
        before = spec.attention(q, k, v)
        v[:, 192:] = torch.nan
        after = spec.attention(q, k, v)
        assert torch.equal(after[:, :128], before[:, :128])


@for_every_version
def test_neither_the_order_of_blocks_and_threads_nor_unwritten_memory_matters(name, monkeypatch):
    """A race or a read of what nobody wrote would show as a difference between these runs."""
    spec = usable(name, "cpu")
    inputs = [inputs_of(name, "cpu", 70, head_dim) for head_dim in spec.head_dims[::2]]
    expected = [spec.attention(*qkv) for qkv in inputs]
    for setting in emulator_settings(monkeypatch):
        for qkv, o in zip(inputs, expected, strict=True):
            assert torch.equal(spec.attention(*qkv), o), setting


@on_every_device
@for_each(STRIDED)
def test_strided_views_need_no_copy(name, device, monkeypatch):
    spec = usable(name, device)
    torch.manual_seed(0)
    d, like = spec.head_dims[0], {"device": device, "dtype": dtype_of(spec)}
    q = torch.randn(2, 3, 50, d, **like).transpose(1, 2)  # heads before positions
    one_key = torch.randn(2, 1, 3, d, **like).expand(2, 50, 3, d)  # whatever it is, O is the same
    one_head = torch.randn(4, 50, 1, 2 * d, **like)[::2, ..., :d].expand(2, 50, 3, d)
    v = torch.randn(4, 60, 3, 4 * d, **like)[1:3, 7:57, :, d : 2 * d]
    for k in (one_key, one_head):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "contiguous", None)
            o = spec.attention(q, k, v)
        expected = spec.attention(q.contiguous(), k.contiguous(), v.contiguous())
        assert torch.equal(o, expected)
        assert o.is_contiguous()


@pytest.mark.parametrize("multiprocessors", ["1", "40"])
def test_however_the_work_is_cut_it_is_right(multiprocessors, monkeypatch):
    """One multiprocessor is full of large blocks; forty get a part of the keys each."""
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", multiprocessors)
    spec = usable(FP32[-1], "cpu")
    for case in (Case(300, 64), Case(257, 32, is_causal=False), Case(140, 128)):
        assert run_case(spec, case, "cpu").passed
    assert not future_leaks(spec, Case(300, 64), "cpu", 141)


def equal_scores(score: float, seqlen: int, dtype: torch.dtype, device: str):
    """q, k, v of one head whose scores are all equal and whose output is 0: V is 1, then -1."""
    q = torch.full((1, seqlen, 1, 64), score / 64, dtype=dtype, device=device)
    v = torch.ones_like(q)
    v[:, seqlen // 2 :] = -1
    return q, torch.ones_like(q), v


def check_equal_scores(spec: BackendSpec, device: str) -> None:
    # WMMA's last version splits the keys of 448 queries and not those of 600, on 8 multiprocessors.
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
@for_each([FP32[-1], *STRIDED_HALF])
def test_a_maximum_that_does_not_change_rescales_by_one(name, device):
    check_equal_scores(usable(name, device), device)


# Multiplications and additions fused, as nvcc fuses them: where a product is rounded in one place
# and not in another, a difference that ought to be 0 is not.
FUSES = platform.machine() == "aarch64" or (
    platform.machine() == "x86_64"
    and re.search(r"^flags\b.*\bfma\b", Path("/proc/cpuinfo").read_text(), re.M) is not None
)
FUSED_FLAGS = "-Xcompiler=-fexpensive-optimizations,-ffp-contract=fast" + ",-mfma" * (
    platform.machine() == "x86_64"
)


def fused(name: str, folder: Path) -> BackendSpec:
    """A version as g++ builds it with multiplications and additions fused."""
    if not FUSES:
        pytest.skip("this processor has no fused multiply-add")
    file = usable(name, "cpu").version.path
    text, count = re.subn(r"(// Flags: ).*", rf"\1{FUSED_FLAGS}", file.read_text())
    assert count == 1
    (folder / file.name).write_text(text)
    return spec_of(header.parse_header(folder / file.name, "fused_"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [FP32[-1], STRIDED_HALF[0]])
def test_fused_arithmetic_is_right(name, tmp_path):
    spec = fused(name, tmp_path)
    check_equal_scores(spec, "cpu")
    for scale in (1.0, 8.0):
        assert run_case(spec, Case(200, 64, scale, dtype=dtype_of(spec)), "cpu").passed, scale


# Part of torch


# What registers the op is one file for all versions.
A_FEW = [FP32[0], FP32[-1], STRIDED_HALF[0]]


@on_every_device
@pytest.mark.parametrize("name", A_FEW)
def test_opcheck(name, device):
    op = ready_op(name, device)
    q, k, v = (x.contiguous() for x in inputs_of(name, device, 33, 32, batch=2))
    torch.library.opcheck(op, (q, k, v, 0.2, True))


@on_every_device
@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        *((name, "aot_eager") for name in A_FEW),
        pytest.param(FP32[-1], "inductor", marks=pytest.mark.slow),  # which runs what it compiles
    ],
)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* available but not enabled")
def test_torch_compile_fullgraph(name, compiler, device):
    """From a cold start: what tracing reaches first is built outside of it.

    Between matrix products, as in a model. Inductor calls those: what it has to compile, for half a
    minute and with no cache, would say nothing of the op.
    """
    if compiler == "inductor" and device == "cuda":
        pytest.importorskip("triton")
    spec = usable(name, device)

    def model(q, k, v):
        return spec.attention(q @ twice, k, v, softmax_scale=0.1) @ twice

    q, k, v = inputs_of(name, device, 33)
    q = q.contiguous()
    twice = 2 * torch.eye(q.shape[3], device=device, dtype=q.dtype)
    spec._kernels.clear()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    tolerance = 8 * torch.finfo(q.dtype).eps
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v), rtol=0, atol=tolerance)


BAD = torch.zeros(1, 4, 2, 32)


@pytest.mark.parametrize("name", [FP32[0], FP32[-1]])
@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        (BAD[0], BAD, "q must be (batch, seqlen, num_heads, head_dim)"),
        (BAD, BAD[0], "k must be (batch, seqlen, num_heads, head_dim)"),
        (BAD, BAD[:, :3], "k must have the shape of q"),
        (BAD.half(), BAD, "q must be float32"),
        (BAD, BAD.double(), "k must be float32"),
        (BAD, BAD.mT.contiguous().mT, "k must have a last stride of 1"),
        (BAD, torch.zeros(257)[1:].view(1, 4, 2, 32), "k must begin at a multiple of 16 bytes"),
    ],
)
def test_the_op_checks_who_calls_it_directly(name, q, k, words):
    op = ready_op(name, "cpu")
    with pytest.raises(RuntimeError) as caught:
        op(q, k, BAD, 1.0, True)
    assert str(caught.value).startswith(f"attention_kernels::{op.name().split('::')[1]}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [FP32[0], "ABLATION_STEP_8"])
def test_the_op_of_a_contiguous_kernel_refuses_views(name):
    op = ready_op(name, "cpu")
    q, k, v = inputs_of(name, "cpu", 5)
    with pytest.raises(RuntimeError, match="q must be contiguous"):
        op(q, k, v, 1.0, True)


@pytest.mark.parametrize("name", [FP32[-1], STRIDED_HALF[0]])
def test_the_op_of_a_strided_kernel_refuses_rows_that_are_not_aligned(name):
    op = ready_op(name, "cpu")
    good = torch.zeros(1, 4, 2, 32, dtype=dtype_of(get_backend(name)))
    q = good.new_zeros(1, 4, 2, 33)[..., :32]
    with pytest.raises(RuntimeError, match="q must begin at a multiple of 16 bytes"):
        op(q, good, good, 1.0, True)


def test_the_op_takes_an_empty_batch():
    assert ready_op(FP32[0], "cpu")(BAD[:0], BAD[:0], BAD[:0], 1.0, True).shape == (0, 4, 2, 32)


# Refusals


@pytest.mark.parametrize("name", [FP32[0], "CUSTOM_CUDA_VERSION_24"])
def test_too_much_shared_memory_is_a_reason(name, monkeypatch):
    spec = usable(name, "cpu")
    q, k, v = Case(5, 128).inputs("cpu")
    assert spec.unsupported_reasons(q, k, v) == []
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(q, k, v)
    assert caught.value.reasons == spec.unsupported_reasons(q, k, v)
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
def test_a_size_beyond_the_grid_is_a_reason(shape, reason):
    name = "CUSTOM_CUDA_VERSION_12"  # strided: a copy of such a q would not fit a machine
    spec = usable(name, "cpu")
    q = torch.zeros(1, 1, 1, 32).expand(shape)
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(q, q, q)
    assert caught.value.reasons == spec.unsupported_reasons(q, q, q) == [reason]
    with pytest.raises(RuntimeError, match=re.escape(reason.split(", not")[0])):
        ready_op(name, "cpu")(q, q, q, 1.0, True)


def test_misaligned_inputs_are_a_reason():
    spec = usable(FP32[-1], "cpu")
    k = torch.zeros(257)[1:].view(1, 4, 2, 32)
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(BAD, k, BAD)
    assert caught.value.reasons == ["k must begin at a multiple of 16 bytes, and so must its rows"]
    assert spec.unsupported_reasons(BAD, k, BAD) == caught.value.reasons
    k = torch.zeros(1, 4, 2, 33)[..., :32]  # a copy is aligned, and some kernels get one
    assert spec.unsupported_reasons(BAD, k, BAD) == caught.value.reasons
    assert get_backend(FP32[0]).unsupported_reasons(BAD, k, BAD) == []
    get_backend(FP32[0]).attention(BAD, k, BAD)
    k = torch.zeros(256).as_strided((1, 4, 2, 32), (33, 64, 32, 1))  # a batch of one has no stride
    assert spec.unsupported_reasons(BAD, k, BAD) == []
    spec.attention(BAD, k, BAD)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_without_compilers_the_reason_is_told_and_asking_compiles_nothing(no_compiler, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    for name in NAMES:
        assert "needs a C++ compiler" in get_backend(name).unavailable_reason("cpu")
        assert get_backend(name).unavailable_reason("cuda") is not None


def test_a_failed_build_is_the_reason_from_then_on(tmp_path, monkeypatch):
    opening = (NEGATIVE / "v01_dropped_barrier.cu").read_text().split("#include")[0]
    (tmp_path / "v01_typo.cu").write_text(opening + "a typo\n")
    spec = spec_of(header.parse_header(tmp_path / "v01_typo.cu", "typo_"))
    with pytest.raises(UnavailableBackendError, match=r"v01_typo\.cu:11:1: error: .*\(log: /"):
        spec.attention(BAD, BAD, BAD)
    assert "v01_typo.cu:11:1: error: " in spec.unavailable_reason("cpu")


def test_an_architecture_that_nvcc_has_not_is_left_out(monkeypatch):
    capabilities = [(9, 0), (6, 1), (9, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    for known, expected in (({"75", "90"}, "90"), ({"61", "90"}, "61,90"), (set(), "61,90")):
        monkeypatch.setattr(compilers, "nvcc_architectures", lambda known=known: known)
        assert ladder.architectures() == expected


def test_what_is_named_and_runs_there_is_built(monkeypatch):
    monkeypatch.setattr(op, "architectures", lambda: "90")
    built = []
    monkeypatch.setattr(
        build, "build_many", lambda *a: built.append(([v.op for v in a[0]], *a[1:]))
    )
    named = [get_backend(name) for name in (FP32[1], "FLASH_ATTENTION_1_CPU", "NAIVE_PYTORCH")]
    for device in ("cuda", "cpu"):
        ladder.build_all(device, named)
    on_cpu = ["v02", ladder.versions()["FLASH_ATTENTION_1_CPU"].op]
    assert built == [(["v02"], "cuda", "90"), (on_cpu, "emulator", "")]


# CUSTOM_CUDA


@pytest.fixture
def alias(monkeypatch) -> BackendSpec:
    monkeypatch.setattr(cuda, "_chosen_names", {})
    return usable("CUSTOM_CUDA", "cpu")


IEEE = [name for name in FP32 if PRECISIONS[name] == {"ieee-fp32"}]


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [("75", 64), ("80", 32), pytest.param("75", 128, marks=pytest.mark.slow)],
)
def test_the_alias_is_the_last_version_that_serves(alias, arch, head_dim, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    case = Case(33, head_dim)
    assert run_case(alias, case, "cpu").passed
    name = alias.chosen(torch.float32, head_dim, "cpu").name
    later = IEEE[IEEE.index(name) + 1 :]
    assert bool(later) == ((arch, head_dim) == ("75", 128))  # for want of shared memory
    assert all(get_backend(other).unsupported_reasons(*case.inputs("cpu")) for other in later)


def test_the_alias_is_another_version_for_short_sequences_and_wide_heads(alias):
    short, long = (alias.chosen(torch.float32, 64, "cpu", n).name for n in (256, 257))
    assert (short, long) == (cuda.SHORT_OR_WIDE, IEEE[-1])
    assert alias.chosen(torch.float32, 128, "cpu", 257).name == short
    compiled = torch.compile(alias.attention, fullgraph=True, backend="eager")
    for seqlen, name in ((33, short), (34, short), (258, long)):  # from the second on it varies
        q = torch.randn(1, seqlen, 1, 32)
        assert torch.equal(alias.attention(q, q, q), get_backend(name).attention(q, q, q))
        assert torch.equal(compiled(q, q, q), alias.attention(q, q, q))


def test_the_alias_passes_over_versions_that_the_gpu_is_too_old_for(alias, monkeypatch):
    monkeypatch.setattr(BackendSpec, "is_too_new", lambda spec, _: spec.name in IEEE[-2:])
    assert alias.chosen(torch.float32, 64, "cpu").name == IEEE[-3]


def test_each_gpu_has_the_version_that_serves_it(alias, clean_registry, monkeypatch):
    last = get_backend(IEEE[-1])
    registry._specs[last.name] = dataclasses.replace(last, min_compute_capability=(8, 0))
    zeros, capabilities = torch.zeros, {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **(k | {"device": "cpu"})))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[d.index])
    monkeypatch.setattr(BackendSpec, "unsupported_reasons", lambda *_: [])
    names = [alias.chosen(torch.float32, 64, f"cuda{i}").name for i in (":0", ":1", ":0", "")]
    assert names == [IEEE[-2], IEEE[-1], IEEE[-2], IEEE[-1]]


def test_the_alias_never_falls_back_from_a_version_that_cannot_be_built(alias, monkeypatch):
    def fail(spec, *_):
        raise UnavailableBackendError(spec.name, "v99.cu:1: error")

    monkeypatch.setattr(BackendSpec, "unsupported_reasons", fail)
    with pytest.raises(UnavailableBackendError, match=rf"{IEEE[-1]} .*error"):
        alias.chosen(torch.float32, 64, "cpu")


def test_the_alias_takes_what_its_versions_take(alias):
    q = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=r"CUSTOM_CUDA .*dtype float16"):
        alias.chosen(q.dtype, 64, "cpu")
    assert alias.unsupported_reasons(q, q, q) == ["dtype float16 (it takes float32)"]


# Negative controls: what the suite and the emulator are for


def repaired(file: Path, folder: Path) -> Path:
    """A copy of the file with its broken line replaced by the right one that it names."""
    broken = re.compile(r"[^\n]*\n[^\n]*// BROKEN\. The right line: ([^\n]*)")
    text, count = broken.subn(r"\1", file.read_text())
    assert count == 1
    (folder / file.name).write_text(text)
    return folder / file.name


@pytest.mark.parametrize(
    ("stem", "cases"),
    [
        (
            "v01_dropped_barrier",
            [Case(n, d, is_causal=c) for n, d in ((31, 32), (65, 64)) for c in (True, False)],
        ),
        ("v05_unscaled_join", [DecodeCase(32, lengths=(1, 64, 65, 130), max_seqlen=130)]),
    ],
)
def test_but_for_its_fault_a_negative_control_is_right(stem, cases, tmp_path):
    """That each control is caught is in test_conformance.py."""
    file = repaired(NEGATIVE / f"{stem}.cu", tmp_path)
    spec = spec_of(header.parse_header(file, "repaired_"))
    assert all(run_case(spec, case, "cpu").passed for case in cases)


@on_every_device
def test_a_sum_kept_in_the_tensor_cores_fails(device, tmp_path):
    """O as the accumulator of all tiles: what each instruction cuts off adds up."""
    right = usable("CUSTOM_CUDA_VERSION_19", device)
    text = right.version.path.read_text()
    for fresh, kept in (
        ("float rPV[kColumns / 8][4] = {};", "auto& rPV = rO;"),
        ("rO[first / 8 + d][i] += rPV[d][i];", ";"),
    ):
        assert text.count(fresh) == 1
        text = text.replace(fresh, kept)
    (tmp_path / "v19_chained.cu").write_text(text)
    chained = spec_of(header.parse_header(tmp_path / "v19_chained.cu", "chained_"))
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


@pytest.mark.slow
def test_a_dropped_barrier_shows_in_another_order_of_threads(monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", "")  # put back after the test
    spec = ladder.resolve(str(NEGATIVE / "v01_dropped_barrier.cu"))
    with pytest.raises(SystemExit, match="the order of its blocks or threads changes the output"):
        sanitizers._run(spec, "cpu")


CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
READ = "Invalid __global__ read of size 4 bytes"


@pytest.mark.parametrize(
    ("tool", "status", "out", "fault"),
    [
        ("memcheck", 0, CLEAN["memcheck"], None),
        ("racecheck", 0, CLEAN["racecheck"], None),
        ("memcheck", 77, f"========= {READ}\n========= ERROR SUMMARY: 1 error", READ),
        ("memcheck", 0, f"========= {READ}\n========= ERROR SUMMARY: 1 error", READ),
        ("memcheck", 1, f"{CLEAN['memcheck']}\nit crashed", "it crashed"),
        ("racecheck", 0, CLEAN["memcheck"], CLEAN["memcheck"]),  # it has seen no kernel
        ("racecheck", 0, "", "it ended with exit status 0"),
    ],
)
def test_compute_sanitizer_is_silent_or_read(tool, status, out, fault, monkeypatch):
    done = subprocess.CompletedProcess([], status, out, "")
    monkeypatch.setattr(sanitizers, "_worker", lambda *_: done)
    expected = [] if fault is None else [f"{tool}: {fault}"]
    assert sanitizers.compute_sanitizer(tool, FP32) == expected


@pytest.mark.slow
def test_the_sanitizer_passes_what_is_right_and_finds_what_is_not():
    """The first fault ends a run, so it is the last kernel's.

    Before it come one of all kinds of memory, and a decode kernel whose fault is another.
    compute-sanitizer runs every version on a GPU.
    """
    names = ("v05_unscaled_join", "v03_out_of_bounds_read")
    decodes, beyond = (str(NEGATIVE / f"{name}.cu") for name in names)
    (fault,) = sanitize(["FLASH_ATTENTION_1_TENSOR_CORE", decodes, beyond], "cpu")
    place = "v03_out_of_bounds_read.cu:4"  # K's or V's
    assert fault.startswith(f"AddressSanitizer: heap-buffer-overflow at {place}")


def test_what_cannot_be_sanitized_is_told(monkeypatch):
    with pytest.raises(UnsupportedError, match="only emulated kernels have a sanitizer"):
        sanitize(["NAIVE_PYTORCH"], "cpu")
    with pytest.raises(HeaderError, match=r"there is no file /none/v01_x\.cu"):
        sanitize(["/none/v01_x.cu"], "cpu")
    monkeypatch.setattr(compilers, "execute", lambda *_: (0, "libasan.so\n"))
    with pytest.raises(UnavailableBackendError, match="has no AddressSanitizer"):
        sanitize([FP32[0]], "cpu")


# On a GPU; what Triton's kernels share is in test_gpu.py


@pytest.mark.gpu
@pytest.mark.parametrize("name", [FP32[0], FP32[-1]])
def test_the_op_refuses_inputs_on_two_devices(name):
    op = ready_op(name, "cuda")
    on_gpu = BAD.cuda()
    with pytest.raises(RuntimeError, match="k must be on a CUDA device"):
        op(on_gpu, BAD, on_gpu, 1.0, True)
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match="k must be on the device of q"):
            op(on_gpu, BAD.to("cuda:1"), on_gpu, 1.0, True)
