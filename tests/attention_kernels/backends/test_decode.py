"""The decode ladder: on the GPU and, from the same source, emulated."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention_kernels import UnsupportedError, get_backend, ladder
from attention_kernels.judge.cases import EDGES
from attention_kernels.judge.conformance import DecodeCase, run_case
from attention_kernels.ladder import compilers, header
from tests.attention_kernels.backends.test_cuda import fused
from tests.conftest import DEVICES, emulator_settings, usable

NAMES = [*ladder.versions("decode")]

for_every_version = pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
for_every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
on_every_device = pytest.mark.parametrize("device", DEVICES)


def ragged(head_dim: int, dtype: torch.dtype, **fields) -> DecodeCase:
    """Lengths around the edges of splits, in one batch."""
    return DecodeCase(head_dim, dtype, lengths=EDGES, max_seqlen=max(EDGES), **fields)


def test_the_ladder_is_the_files():
    files = header.version_files(header.CSRC / "decode")
    numbers = [header.version_number(file) for file in files]
    assert [f"DECODE_SPLIT_KV_VERSION_{number}" for number in numbers] == NAMES
    for name in NAMES:
        spec = get_backend(name)
        assert dict(spec.precisions) == {
            "float32": "ieee-fp32",
            "float16": "fp16",
            "bfloat16": "bf16",
        }
        assert (spec.has_attention(), spec.has_decode("cuda")) == (False, True)


@on_every_device
@for_every_dtype
@for_every_version
def test_it_is_right(name, dtype, device):
    spec = usable(name, device)
    cases = [ragged(head_dim, dtype, num_heads=1) for head_dim in spec.head_dims]
    cases += [ragged(64, dtype, scale=8.0), ragged(32, dtype, scale=19.3, kind="equal")]
    cases += [ragged(64, dtype, kind="offset", layout="gaps"), ragged(32, dtype, softmax_scale=0.3)]
    long = {"lengths": (1025, 2100), "max_seqlen": 2100, "num_heads": 1}
    cases += [DecodeCase(head_dim, dtype, **long) for head_dim in spec.head_dims]
    if dtype == torch.float32:
        cases.append(ragged(32, dtype, scale=1e4))
    failed = [str(case) for case in cases if not run_case(spec, case, device).passed]
    assert not failed


# Row i of o becomes row i of v, and lengths tell nothing: the host does it, as a kernel would.
COPY = """\
// v01 - a copy
//
// Change: of v.
// Why:    fast.
// Cost:   none.
// Tile:   none
// Layout: strided
// Role:   decode
// Flags:  (none)
// Expect: nothing.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {
int64_t scratch_floats(const DecodeParams& params) { return params.batch; }
cudaError_t launch(const DecodeParams& params, cudaStream_t) {
  if (params.batch > 65535) return cudaErrorInvalidConfiguration;
  for (int row = 0; row < params.batch; ++row) {
    for (int d = 0; d < params.head_dim; ++d) {
      static_cast<float*>(params.o)[row * params.o_strides.batch + d] =
          params.seqlens[row] *
          static_cast<const float*>(params.v_cache)[row * params.v_strides.batch + d];
    }
  }
  return cudaSuccess;
}
}  // namespace attention::ATTENTION_VERSION
"""


@pytest.mark.slow
def test_rows_that_no_grid_holds_are_launched_later(tmp_path):
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    (tmp_path / "v01_copy.cu").write_text(COPY)
    spec = ladder.resolve(str(tmp_path / "v01_copy.cu"))
    v = torch.randn(65537, 2, 1, 32)
    lengths = torch.randint(1, 3, (65537,), dtype=torch.int32)
    o = spec.decode(v[:, :1], v, v, lengths)
    assert torch.equal(o, v[:, :1] * lengths[:, None, None, None])


@pytest.mark.gpu
@for_every_version
def test_a_batch_larger_than_a_grid(name):
    v = torch.randn(65537, 1, 1, 32, device="cuda")
    lengths = torch.ones(65537, dtype=torch.int32, device="cuda")
    assert torch.equal(usable(name, "cuda").decode(v, v, v, lengths), v)


@pytest.mark.gpu
@for_every_dtype
@for_every_version
def test_long_rows_are_right(name, dtype):
    spec = usable(name, "cuda")
    lengths = (1024, 5000, 16384, 1)
    for head_dim in spec.head_dims:
        case = DecodeCase(head_dim, dtype, lengths=lengths, max_seqlen=max(lengths), num_heads=3)
        assert run_case(spec, case, "cuda").passed


@on_every_device
@for_every_dtype
@for_every_version
def test_neither_the_batch_nor_max_seqlen_changes_a_bit(name, dtype, device):
    spec = usable(name, device)
    q, k, v, seqlens = ragged(64, dtype).inputs(device)
    together = spec.decode(q, k, v, seqlens)
    for row, length in enumerate(EDGES):
        one = slice(row, row + 1)
        alone = spec.decode(q[one], k[one, :length], v[one, :length], seqlens[one])
        assert torch.equal(alone, together[one]), length


@on_every_device
@for_every_dtype
@for_every_version
def test_what_lies_past_a_row_is_not_read(name, dtype, device):
    spec = usable(name, device)
    q, k, v, seqlens = ragged(32, dtype).inputs(device)
    before = spec.decode(q, k, v, seqlens)
    for row, length in enumerate(EDGES):
        k[row, length:] = torch.nan
        v[row, length:] = torch.nan
    assert torch.equal(spec.decode(q, k, v, seqlens), before)


@on_every_device
@for_every_version
def test_a_nan_within_a_row_is_not_lost(name, device):
    spec = usable(name, device)
    for which in (0, 1):
        q, *kv, seqlens = ragged(32, torch.float32).inputs(device)
        kv[which][0, 130, 0, 7] = torch.nan
        o = spec.decode(q, *kv, seqlens)
        columns = slice(None) if which == 0 else 7  # a key counts for all, a value for its column
        assert o[0, 0, 0, columns].isnan().all()
        assert o[1:].isfinite().all()
        assert o[0, 0, 1].isfinite().all()


@for_every_version
def test_neither_the_order_of_blocks_and_threads_nor_unwritten_memory_matters(name, monkeypatch):
    spec = usable(name, "cpu")
    inputs = ragged(64, torch.bfloat16).inputs("cpu")
    expected = spec.decode(*inputs)
    for setting in emulator_settings(monkeypatch):
        assert torch.equal(spec.decode(*inputs), expected), setting


@pytest.mark.slow
@for_every_version
def test_fused_arithmetic_is_right(name, tmp_path):
    """As nvcc fuses it: a score that is rounded in one place and not in another would show."""
    spec = fused(name, tmp_path)
    for fields in ({"scale": 1e4}, {"scale": 8.0}, {"scale": 19.3, "kind": "equal"}):
        assert run_case(spec, ragged(64, torch.float32, **fields), "cpu").passed, fields


@for_every_version
def test_a_head_dim_without_a_kernel_is_refused(name):
    spec = usable(name, "cpu")
    inputs = DecodeCase(80).inputs("cpu")
    with pytest.raises(UnsupportedError, match=r"head_dim 80 \(it takes 32, 64, 128\)"):
        spec.decode(*inputs)


# On a GPU


@pytest.mark.gpu
@for_every_dtype
@for_every_version
def test_a_graph_replays_with_other_lengths(name, dtype):
    spec = usable(name, "cuda")
    case = ragged(64, dtype, num_heads=12)
    inputs = case.inputs("cuda")
    spec.decode(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = spec.decode(*inputs)
    for seed, lengths in enumerate((EDGES[::-1], (1,) * len(EDGES), (257,) * len(EDGES), EDGES)):
        other = dataclasses.replace(case, lengths=lengths, seed=seed).inputs("cuda")
        for x, y in zip(inputs, other, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(o, spec.decode(*other))


@pytest.mark.gpu
@for_every_dtype
@for_every_version
def test_many_runs_are_bit_identical(name, dtype):
    spec = usable(name, "cuda")
    inputs = DecodeCase(64, dtype, lengths=(1023, 700) * 4, max_seqlen=1024, num_heads=12).inputs(
        "cuda"
    )
    expected = spec.decode(*inputs)
    assert all(torch.equal(spec.decode(*inputs), expected) for _ in range(1000))


@pytest.mark.gpu
@for_every_version
def test_streams_do_not_disturb_each_other(name):
    spec = usable(name, "cuda")
    sides = []
    for seed in range(2):
        inputs = ragged(64, torch.float32, seed=seed, num_heads=12).inputs("cuda")
        sides.append((torch.cuda.Stream(), inputs, spec.decode(*inputs)))
    torch.cuda.synchronize()
    found = []
    for _ in range(200):
        for stream, inputs, expected in sides:
            with torch.cuda.stream(stream):
                found.append((spec.decode(*inputs) == expected).all())
    torch.cuda.synchronize()
    assert all(found)
