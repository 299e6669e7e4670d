"""The WMMA ladder: one maximum for the rows of a warp, fragments, and the tiles of launches."""

from __future__ import annotations

import itertools

import pytest
import torch

from attention_kernels import BackendSpec, list_backends
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.judge.truth import truth
from attention_kernels.ladder import header
from tests.attention_kernels.backends.common import changed, for_each
from tests.conftest import on_every_device, usable

NAMES = [spec.name for spec in list_backends() if spec.family == "wmma_fa2"]
V02 = header.version_files(header.CSRC / "wmma_fa2")[1]
ASKS = 5  # the first version that asks where the elements of its fragments lie

for_every_version = for_each(NAMES)


def verdict(spec: BackendSpec, seqlen: int, head_dim: int, spread: float, is_causal: bool, device):
    """Judge a call where the scores of odd rows are about `spread` above those of even rows.

    q and k are whole numbers, so that plain fp16, and with it the budget, has a small error.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, seqlen, 2, head_dim)
    k = torch.ones(shape)
    k[..., 0] += torch.randint(0, 3, shape[:3], generator=generator)
    q = torch.ones(shape) + (torch.arange(seqlen) % 2 * 8)[None, :, None, None]
    v = torch.randn(shape, generator=generator)
    q, k, v = (x.half().to(device) for x in (q, k, v))
    scale = spread / (8 * head_dim)
    o = spec.attention(q, k, v, softmax_scale=scale, is_causal=is_causal)
    return truth(q, k, v, scale, is_causal).judge(o, "fp16")


@on_every_device
@for_every_version
@pytest.mark.parametrize("spread", [4, 8, 24, 512])
def test_rows_whose_scores_differ_by_hundreds(name, device, spread):
    spec = usable(name, device)
    for at, (seqlen, is_causal) in enumerate(itertools.product((16, 150), (True, False))):
        head_dim = spec.head_dims[(at + spread) % len(spec.head_dims)]
        found = verdict(spec, seqlen, head_dim, spread, is_causal, device)
        assert found.passed, (head_dim, seqlen, is_causal, found)


@pytest.mark.slow
def test_without_its_guard_one_maximum_for_the_warp_breaks():
    guard = ("constexpr bool kGuarded = true;", "constexpr bool kGuarded = false;")
    unguarded = changed(V02, guard)
    assert run_case(unguarded, Case(70, 64, dtype=torch.float16), "cpu").passed
    found = [verdict(unguarded, 150, 64, spread, False, "cpu") for spread in (20, 24, 512)]
    assert [one.passed for one in found] == [True, False, False]


@on_every_device
@for_every_version
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_no_later_token_changes_an_earlier_row(name, device, scale):
    """Nor does a later query, which it would with one maximum for 16 rows."""
    spec = usable(name, device)
    q, k, v = Case(70, 64, scale, dtype=torch.float16).inputs(device)
    before = spec.attention(q, k, v)
    for cut in (1, 7, 24, 41, 69):
        others = Case(70, 64, 2 * scale, dtype=torch.float16, seed=cut).inputs(device)
        mixed = [
            torch.cat([x[:, :cut], y[:, cut:]], 1) for x, y in zip((q, k, v), others, strict=True)
        ]
        assert torch.equal(spec.attention(*mixed)[:, :cut], before[:, :cut]), cut


@for_each(NAMES[ASKS - 1 :])
def test_no_layout_of_fragments_is_assumed(name, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    spec = usable(name, "cpu")
    # The last version splits the keys of the first length, but not those of the second, and has a
    # kernel for each head_dim. In the others, the layout does not depend on the head_dim.
    head_dims = spec.head_dims if name == NAMES[-1] else spec.head_dims[:1]
    for seqlen, head_dim in itertools.product((33, 300), head_dims):
        case = Case(seqlen, head_dim, 8.0, dtype=torch.float16)
        assert run_case(spec, case, "cpu").passed, case


@pytest.mark.slow
def test_the_tiles_of_the_last_version_where_blocks_do_not_fill_the_device(monkeypatch):
    """They depend on the shared memory: 64, 99 or 227 KB."""
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", "132")
    spec = usable(NAMES[-1], "cpu")
    for arch in ("75", "86", "90"):
        monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
        for seqlen, head_dim in itertools.product((127, 300), (32, 64, 128)):
            case = Case(seqlen, head_dim, 8.0, num_heads=1, dtype=torch.float16)
            assert run_case(spec, case, "cpu").passed, (arch, case)
