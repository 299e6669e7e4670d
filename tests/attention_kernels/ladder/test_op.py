"""Version files as backends: a ladder under development, and kernels that decode."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from attention_kernels import BackendSpec, ladder, list_backends
from attention_kernels.errors import KernelError, UnavailableBackendError, UnsupportedError
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.ladder import build, compilers, header, op
from tests.attention_kernels.backends.common import op_of
from tests.attention_kernels.ladder.conftest import HEADER
from tests.conftest import EXAMPLE, ROOT, needs_compiler

DECODER = EXAMPLE / "decode"

pytestmark = needs_compiler


@pytest.mark.slow
def test_a_new_file_is_a_new_backend_and_a_broken_one_breaks_nothing_else(tmp_path, clean_registry):
    file = header.version_files(header.CSRC / "fp32")[0]
    for name, text in {
        file.name: file.read_text(),
        "v02_new.cu": file.read_text().replace("// v01 - ", "// v02 - "),
        "v90_no_header.cu": "int x;\n",
        "v91_no_code.cu": HEADER.format(name="v91", title="a typo") + "a typo\n",
        "v92_one.cu": "",
        "v92_two.cu": "",
    }.items():
        (tmp_path / name).write_text(text)
    name = "MINE_{}".format
    ladder.register_ladder(
        tmp_path, family="mine", name=lambda file: name(header.version_number(file))
    )
    specs = {spec.name: spec for spec in list_backends() if spec.family == "mine"}
    assert [*specs] == [*map(name, (1, 2, 90, 91, 92))]
    ladder.build_all("cpu", specs.values())
    assert run_case(specs["MINE_2"], Case(33, 64), "cpu").passed
    q = torch.zeros(1, 1, 1, 32)
    for number, complaint in {
        90: "v90_no_header.cu is no version file, which includes common.cuh and defines launch(): "
        "say what to call, as in --entry",
        91: "v91_no_code.cu:13:1: error: ",
        92: "several files have the number 92: v92_one.cu, v92_two.cu",
    }.items():
        broken = specs[name(number)]
        with pytest.raises(UnavailableBackendError) as caught:
            broken.attention(q, q, q)
        reason = broken.unavailable_reason("cpu")
        assert complaint in reason
        assert str(caught.value).endswith(reason)
        if number == 91:
            assert "a typo" in Path(reason.removesuffix(")").split("(log: ")[1]).read_text()


def test_a_files_backend_has_its_name_and_two_of_one_name_are_refused(tmp_path):
    text = (DECODER / "v01_warp_per_head.cu").read_text()
    files = [tmp_path / folder / "v01_twice.cu" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(text)
    specs = [ladder.resolve(str(file)) for file in files]
    assert [spec.name for spec in specs] == ["V01_TWICE"] * 2
    assert specs[0].version.op != specs[1].version.op
    again = ladder.resolve_all([str(files[0]), "NAIVE_PYTORCH", str(files[0])])
    assert [spec.name for spec in again] == ["V01_TWICE", "NAIVE_PYTORCH", "V01_TWICE"]
    with pytest.raises(header.HeaderError, match=r"b/v01_twice\.cu are both V01_TWICE: rename one"):
        ladder.resolve_all(map(str, files))
    files[0].write_text(text.replace("Role:   decode", "Role:   struct"))
    with pytest.raises(header.HeaderError, match="its role is struct, so it is not a backend"):
        ladder.resolve(str(files[0]))


@pytest.fixture(scope="module")
def decoder() -> BackendSpec:
    return ladder.resolve(str(DECODER / "v01_warp_per_head.cu"))


def decode_arguments() -> tuple[torch.Tensor, ...]:
    """q, caches that are views with gaps, and seqlens from 1 to max_seqlen."""
    torch.manual_seed(0)
    cache = torch.randn(3, 70, 2, 2, 32)
    seqlens = torch.tensor([1, 37, 70], dtype=torch.int32)
    return torch.randn(3, 1, 2, 32), cache[:, :, 0], cache[:, :, 1], seqlens


def test_the_first_use_of_a_kernel_by_many_threads_builds_it_once(decoder, monkeypatch):
    arguments = decode_arguments()
    expected = decoder.decode(*arguments)
    spec, ready = ladder.resolve(str(decoder.version.path)), threading.Barrier(8)
    built = mock.Mock(wraps=build.build)
    monkeypatch.setattr(build, "build", built)

    def use(_):
        ready.wait(timeout=60)
        return spec.decode(*arguments)

    with ThreadPoolExecutor(8) as threads:
        assert all(torch.equal(o, expected) for o in threads.map(use, range(8)))
    assert built.call_count == 1


@pytest.mark.slow
def test_a_decode_op_can_be_traced_and_compiled(decoder):
    q, *others = decode_arguments()
    torch.library.opcheck(op_of(decoder), (q, *others, 0.2))
    decoder._kernels.clear()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: decoder.decode(q * 2, *others) + 1, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q), decoder.decode(q * 2, *others) + 1)


def test_a_decode_op_checks_its_arguments(decoder):
    q, k, v, seqlens = decode_arguments()
    for arguments, words in (
        ((q[:, :, :1], k, v, seqlens), "k_cache must have the shape of q"),
        ((q, k, v[:, :5], seqlens), "v_cache must have the shape of k_cache"),
        ((k, k, v, seqlens), "q must have one token per row"),
        ((q, k, v, seqlens.long()), r"seqlens must be int32 \(batch\), contiguous"),
    ):
        with pytest.raises(RuntimeError, match=words):
            op_of(decoder)(*arguments, 1.0)
    misaligned = torch.zeros(k.numel() + 1)[1:].view(k.shape)
    with pytest.raises(UnsupportedError, match="k_cache must begin at a multiple of 16 bytes"):
        decoder.decode(q, misaligned, v, seqlens)


WRITES_NOTHING = """
#include <cstring>

namespace attention::ATTENTION_VERSION {
// With a scale above 0 the output is the scratch memory, to which nobody has written.
int64_t scratch_floats(const Params& params) { return params.softmax_scale > 0 ? 64 : 0; }
cudaError_t launch(const Params& params, cudaStream_t) {
  if (params.scratch != nullptr) std::memcpy(params.o, params.scratch, 64 * sizeof(float));
  return cudaSuccess;
}
}  // namespace attention::ATTENTION_VERSION
"""


@pytest.mark.slow
def test_a_careless_file_does_no_harm(tmp_path):
    text = HEADER.format(name="v01", title="it writes nothing") + WRITES_NOTHING
    q = torch.zeros(1, 2, 1, 32)
    careless, less = tmp_path / "v01_careless.cu", tmp_path / "v01_less.cu"
    careless.write_text(text)
    for scale in (1.0, -1.0):
        o = ladder.resolve(str(careless)).attention(q, q, q, softmax_scale=scale)
        assert o.isnan().all(), scale
    careless.write_text(text + "// edited\n")
    with pytest.raises(UnavailableBackendError, match="has changed since this process loaded it"):
        ladder.resolve(str(careless)).prepare("cpu")
    less.write_text(text.replace("? 64 : 0", "? -5 : 0"))
    with pytest.raises(KernelError, match=r"scratch_floats\(\) returned -5, less than 0"):
        ladder.resolve(str(less)).attention(q, q, q)


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
