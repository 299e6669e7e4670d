"""Version files as backends: a ladder under development, and kernels that decode."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attention_kernels import (
    BackendSpec,
    KernelError,
    UnavailableBackendError,
    UnsupportedError,
    get_backend,
    ladder,
    list_backends,
)
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.ladder import build, compilers, header, op
from tests.attention_kernels.ladder.conftest import HEADER
from tests.conftest import usable

ROOT = Path(__file__).parents[3]
DECODER = ROOT / "examples" / "my_backend" / "src" / "my_backend" / "decode"


@pytest.mark.slow
def test_a_new_file_is_a_new_backend_and_a_broken_one_breaks_nothing_else(tmp_path, clean_registry):
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    file = header.version_files(header.CSRC / "fp32")[0]
    shutil.copy(file, tmp_path)
    (tmp_path / "v02_new.cu").write_text(file.read_text().replace("// v01 - ", "// v02 - "))
    (tmp_path / "v90_no_header.cu").write_text("int x;\n")
    (tmp_path / "v91_no_code.cu").write_text(HEADER.format(name="v91", title="a typo") + "a typo\n")
    (tmp_path / "v92_one.cu").write_text("")
    (tmp_path / "v92_two.cu").write_text("")
    text = HEADER.format(name="v93", title="no start").replace(
        "// Change", "// From: v94\n// Change"
    )
    (tmp_path / "v93_no_start.cu").write_text(text)

    def name(file: Path) -> str:
        return f"MINE_{header.version_number(file)}"

    ladder.register_ladder(tmp_path, family="mine", op_prefix="mine_", name=name)
    names = [f"MINE_{number}" for number in (1, 2, 90, 91, 92, 93)]
    assert [spec.name for spec in list_backends() if spec.family == "mine"] == names
    assert run_case(get_backend("MINE_2"), Case(33, 64), "cpu").passed
    q = torch.zeros(1, 1, 1, 32)
    complaints = {}
    for broken in names[2:]:
        spec = get_backend(broken)
        with pytest.raises(UnavailableBackendError) as caught:
            spec.attention(q, q, q)
        complaints[broken] = spec.unavailable_reason("cpu")
        assert str(caught.value).endswith(complaints[broken])
        assert str(caught.value).startswith(f"attention backend {broken} is not available here: ")
    assert complaints == {
        "MINE_90": "v90_no_header.cu does not include common.cuh",
        "MINE_91": complaints["MINE_91"],
        "MINE_92": "several files have the number 92: v92_one.cu, v92_two.cu",
        "MINE_93": "v93_no_start.cu: From names no version of this ladder: v94",
    }
    assert "v91_no_code.cu:13:1: error: " in complaints["MINE_91"]
    assert f"(log: {build.cache_dir() / 'mine_v91-emulator-'}" in complaints["MINE_91"]


@pytest.fixture(scope="module")
def decoder() -> BackendSpec:
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    return ladder.resolve(str(DECODER / "v01_warp_per_head.cu"))


def test_a_files_backend_has_its_name_and_two_of_one_name_are_refused(tmp_path):
    files = [tmp_path / folder / "v01_twice.cu" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        shutil.copy(DECODER / "v01_warp_per_head.cu", file)
    specs = [ladder.resolve(str(file)) for file in files]
    assert [spec.name for spec in specs] == ["V01_TWICE"] * 2
    assert [spec.version.label for spec in specs] == ["v01_twice"] * 2
    assert specs[0].version.op != specs[1].version.op
    again = ladder.resolve_all([str(files[0]), "NAIVE_PYTORCH", str(files[0])])
    assert [spec.name for spec in again] == ["V01_TWICE", "NAIVE_PYTORCH", "V01_TWICE"]
    with pytest.raises(header.HeaderError, match=r"b/v01_twice\.cu are both V01_TWICE: rename one"):
        ladder.resolve_all(map(str, files))


def decode_arguments() -> tuple[torch.Tensor, ...]:
    """q, caches that are views with gaps, and seqlens from 1 to max_seqlen."""
    torch.manual_seed(0)
    cache = torch.randn(3, 70, 2, 2, 32)
    seqlens = torch.tensor([1, 37, 70], dtype=torch.int32)
    return torch.randn(3, 1, 2, 32), cache[:, :, 0], cache[:, :, 1], seqlens


def test_the_first_use_of_a_kernel_by_many_threads_builds_it_once(decoder, monkeypatch):
    arguments = decode_arguments()
    expected = decoder.decode(*arguments, softmax_scale=0.2)
    spec, ready = ladder.resolve(str(decoder.version.path)), threading.Barrier(8)
    right, built = build.build, []

    def slow_build(*arguments, **options):
        built.append(arguments)
        time.sleep(0.05)
        return right(*arguments, **options)

    def use(_):
        ready.wait(timeout=60)
        return spec.decode(*arguments, softmax_scale=0.2)

    assert (spec.has_attention(), spec.has_decode("cpu")) == (False, True)
    monkeypatch.setattr(build, "build", slow_build)
    with ThreadPoolExecutor(8) as threads:
        assert all(torch.equal(o, expected) for o in threads.map(use, range(8)))
    assert len(built) == 1


@pytest.mark.slow
def test_a_decode_op_can_be_traced_and_compiled(decoder):
    arguments = decode_arguments()
    decoder.prepare("cpu")
    op = getattr(torch.ops.attention_kernels, decoder.version.op).default
    torch.library.opcheck(op, (*arguments, 0.2))
    decoder._kernels.clear()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, *others: decoder.decode(q * 2, *others) + 1, fullgraph=True, backend="aot_eager"
    )
    q, *others = arguments
    torch.testing.assert_close(compiled(q, *others), decoder.decode(q * 2, *others) + 1)


def test_a_decode_op_checks_its_arguments(decoder):
    q, k, v, seqlens = decode_arguments()
    decoder.prepare("cpu")
    op = getattr(torch.ops.attention_kernels, decoder.version.op).default
    for arguments, words in (
        ((q[:, :, :1], k, v, seqlens), "k_cache must have the shape of q"),
        ((q, k, v[:, :5], seqlens), "v_cache must have the shape of k_cache"),
        ((k, k, v, seqlens), "q must have one token per row"),
        ((q, k, v, seqlens[:2]), r"seqlens must be int32 \(batch\), contiguous"),
        ((q, k, v, seqlens.long()), r"seqlens must be int32 \(batch\), contiguous"),
    ):
        with pytest.raises(RuntimeError, match=words):
            op(*arguments, 1.0)
    misaligned = torch.zeros(k.numel() + 1)[1:].view(k.shape)
    with pytest.raises(UnsupportedError, match="k_cache must begin at a multiple of 16 bytes"):
        decoder.decode(q, misaligned, v, seqlens)


NOTHING = """
namespace attention::ATTENTION_VERSION {
int64_t scratch_floats(const Params&) { return 0; }
cudaError_t launch(const Params&, cudaStream_t) { return cudaSuccess; }
}  // namespace attention::ATTENTION_VERSION
"""


@pytest.mark.slow
def test_a_negative_scratch_size_is_an_error(tmp_path):
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    text = HEADER.format(name="v01", title="a negative scratch size") + NOTHING
    (tmp_path / "v01_less.cu").write_text(text.replace("return 0", "return -5"))
    q = torch.zeros(1, 1, 1, 32)
    with pytest.raises(KernelError, match=r"scratch_floats\(\) returned -5, less than 0"):
        ladder.resolve(str(tmp_path / "v01_less.cu")).attention(q, q, q)


@pytest.mark.slow
def test_a_file_that_changes_after_it_was_loaded_is_an_error(tmp_path):
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    file = tmp_path / "v01_mine.cu"
    text = HEADER.format(name="v01", title="it does nothing") + NOTHING
    file.write_text(text)
    ladder.resolve(str(file)).prepare("cpu")
    file.write_text(text + "// edited\n")
    with pytest.raises(UnavailableBackendError, match="has changed since this process loaded it"):
        ladder.resolve(str(file)).prepare("cpu")


def test_a_struct_kernel_is_not_a_backend(tmp_path):
    text = (DECODER / "v01_warp_per_head.cu").read_text()
    (tmp_path / "v01_step.cu").write_text(text.replace("Role:   decode", "Role:   struct"))
    with pytest.raises(header.HeaderError, match="its role is struct, so it is not a backend"):
        ladder.resolve(str(tmp_path / "v01_step.cu"))


def test_grouped_queries_copy_no_keys(monkeypatch):
    """An op gets the memory of k and v, with a stride of 0 between heads."""
    given = []
    call = op._Op.__call__

    def spy(self, q, k, v, *others):
        given.append((k, v))
        return call(self, q, k, v, *others)

    monkeypatch.setattr(op._Op, "__call__", spy)
    cache = torch.randn(2, 2, 2, 9, 32)  # heads before positions, as in transformers
    k, v = cache.transpose(2, 3)
    usable("DECODE_SPLIT_KV_VERSION_1", "cpu").decode(
        torch.randn(2, 1, 6, 32), k, v, torch.tensor([9, 4], dtype=torch.int32)
    )
    qkv = torch.randn(1, 9, 10, 32)  # one row of a fused projection
    usable("CUSTOM_CUDA_VERSION_25", "cpu").attention(*qkv.split((6, 2, 2), dim=2))
    memory = [cache.untyped_storage().data_ptr(), qkv.untyped_storage().data_ptr()]
    for (k, v), expected in zip(given, memory, strict=True):
        assert k.shape[2:] == v.shape[2:] == (3, 32)
        assert k.stride(2) == v.stride(2) == 0
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == expected


class EarlyParams(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("seen", ctypes.c_void_p), ("reads", ctypes.c_int))


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [None, "compute_80"])
def test_code_for_an_older_gpu_does_not_start_early(arch):
    if reason := compilers.missing_compiler("cuda"):
        pytest.skip(reason)
    version = header.parse_header(ROOT / "tests/attention_kernels/probe/v03_early.cu", "probe_")
    writer = op.load_op(version, "cuda", "the probe")
    older = dataclasses.replace(version, op=f"{version.op}_{arch}")
    reader = op.load_op(older, "cuda", "the probe", arch)
    value, seen = torch.zeros(2, dtype=torch.int32, device="cuda").split(1)
    for kernel, reads in ((writer, 0), (reader, 1)):
        params = EarlyParams(value.data_ptr(), seen.data_ptr(), reads)
        kernel(value, torch.frombuffer(bytearray(params), dtype=torch.uint8))
    assert seen.item() == 1
