"""The decode ladder: what no row may depend on, large batches, and streams."""

from __future__ import annotations

import pytest
import torch

from attention_kernels import ladder
from attention_kernels.judge.cases import EDGES
from attention_kernels.judge.suite import DecodeCase, run_case
from attention_kernels.ladder import compilers
from tests.attention_kernels.backends.common import for_each, fused
from tests.conftest import on_every_device, usable

NAMES = [*ladder.versions("decode")]

for_every_version = for_each(NAMES)
for_every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)


def ragged(head_dim: int, dtype: torch.dtype, **fields) -> DecodeCase:
    """Return a case with lengths around the edges of splits in one batch."""
    return DecodeCase(head_dim, dtype, lengths=EDGES, max_seqlen=max(EDGES), **fields)


# launch() copies the first row of v, times the length, on the host: there is no kernel.
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


@on_every_device
@for_every_dtype
@for_every_version
def test_a_row_depends_only_on_its_own_valid_keys(name, dtype, device):
    spec = usable(name, device)
    q, k, v, seqlens = ragged(64, dtype).inputs(device)
    together = spec.decode(q, k, v, seqlens)
    for row, length in enumerate(EDGES):
        one = slice(row, row + 1)
        alone = spec.decode(q[one], k[one, :length], v[one, :length], seqlens[one])
        assert torch.equal(alone, together[one]), length
        k[row, length:] = torch.nan
        v[row, length:] = torch.nan
    assert torch.equal(spec.decode(q, k, v, seqlens), together)


@on_every_device
@for_every_version
def test_a_nan_within_a_row_is_not_lost(name, device):
    spec = usable(name, device)
    for which in (0, 1):
        q, *kv, seqlens = ragged(32, torch.float32).inputs(device)
        kv[which][0, 130, 0, 7] = torch.nan
        o = spec.decode(q, *kv, seqlens)
        columns = slice(None) if which == 0 else 7  # a key affects all columns, a value only one
        assert o[0, 0, 0, columns].isnan().all()
        assert o[1:].isfinite().all()
        assert o[0, 0, 1].isfinite().all()


@pytest.mark.slow
@for_each([NAMES[0], NAMES[-1]])  # the versions that decode by default
def test_fused_arithmetic_is_right(name, tmp_path):
    """A score that is rounded in one place but not in another would show, as with nvcc."""
    spec = fused(name, tmp_path)
    inputs = ragged(64, torch.float32).inputs("cpu")
    assert not torch.equal(spec.decode(*inputs), usable(name, "cpu").decode(*inputs))
    for fields in ({"scale": 1e4}, {"scale": 8.0}, {"scale": 19.3, "kind": "equal"}):
        assert run_case(spec, ragged(64, torch.float32, **fields), "cpu").passed, fields


# On a GPU


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
