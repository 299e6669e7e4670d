"""The decode ladder: what no row may depend on, and large batches."""

from __future__ import annotations

import pytest
import torch

from attention_kernels import ladder
from attention_kernels.judge.cases import EDGES
from attention_kernels.judge.suite import DecodeCase, run_case
from tests.attention_kernels.backends.common import for_each, fused
from tests.conftest import EXAMPLE, needs_compiler, on_every_device, usable

NAMES = [*ladder.versions("decode")]

for_every_version = for_each(NAMES)


def ragged(head_dim: int, **fields) -> DecodeCase:
    """Return a case with lengths around the edges of splits in one batch."""
    return DecodeCase(head_dim, lengths=EDGES, max_seqlen=max(EDGES), **fields)


@pytest.mark.slow
@needs_compiler
def test_rows_that_no_grid_holds_are_launched_later():
    spec = ladder.resolve(str(EXAMPLE / "decode" / "v01_warp_per_head.cu"))
    v = torch.randn(65537, 2, 1, 32)
    lengths = torch.randint(1, 3, (65537,), dtype=torch.int32)
    o = spec.decode(v[:, :1], torch.zeros_like(v), v, lengths)
    expected = torch.where(lengths[:, None, None] == 1, v[:, 0], v.mean(1))
    torch.testing.assert_close(o[:, 0], expected)


@on_every_device
@for_every_version
def test_a_row_depends_only_on_its_own_valid_keys(name, device):
    spec = usable(name, device)
    q, k, v, seqlens = ragged(64).inputs(device)
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
        q, *kv, seqlens = ragged(32).inputs(device)
        kv[which][0, 130, 0, 7] = torch.nan
        o = spec.decode(q, *kv, seqlens)
        columns = slice(None) if which == 0 else 7  # a key affects all columns, a value only one
        assert o[0, 0, 0, columns].isnan().all()
        assert o[1:].isfinite().all()
        assert o[0, 0, 1].isfinite().all()


@pytest.mark.slow
@for_each([NAMES[0], NAMES[-1]])  # the versions that decode by default
def test_fused_arithmetic_is_right(name):
    """A score that is rounded in one place but not in another would show, as with nvcc."""
    spec = fused(name)
    inputs = ragged(64).inputs("cpu")
    assert not torch.equal(spec.decode(*inputs), usable(name, "cpu").decode(*inputs))
    for fields in ({"scale": 1e4}, {"scale": 8.0}, {"scale": 19.3, "kind": "equal"}):
        assert run_case(spec, ragged(64, **fields), "cpu").passed, fields
