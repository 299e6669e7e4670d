"""Strangers' kernels on a GPU beside the emulator: their outputs, verdicts and accesses."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import pytest
import torch

from attention_kernels import ladder
from attention_kernels.inspection.accesses import count_accesses
from attention_kernels.judge import suite
from attention_kernels.ladder import entry, header
from tests.attention_kernels.conftest import profiled
from tests.attention_kernels.ladder.test_entry import ENTRIES
from tests.attention_kernels.ladder.test_ptx import STRANGERS, VERSIONS

pytestmark = pytest.mark.gpu
# These divide approximately, which the emulator does not.
APPROXIMATE = "generated", "producer_bulk", "varlen.entry"


def path_of(name: str, folder: Path) -> str:
    """The path of a stranger's file, or of an adapter of it."""
    file = STRANGERS / f"{name}.cu"
    return str(entry.adapter(file, ENTRIES[name], folder)) if name in ENTRIES else str(file)


@pytest.mark.parametrize("name", [*VERSIONS, *ENTRIES])
def test_the_emulator_gives_the_bits_of_a_gpu(name, tmp_path):
    """They are compared where all weights are 1: CUDA's exp() is not the host's."""
    spec = ladder.resolve(path_of(name, tmp_path))
    is_causal = "!causal" not in spec.version.only
    for dtype, seqlen in ((dtype, seqlen) for dtype in spec.dtypes for seqlen in (65, 257)):
        g = torch.Generator().manual_seed(seqlen)
        shape = 1, seqlen, 2, spec.head_dims[-1]
        q, k, v = (torch.randn(shape, generator=g).to(getattr(torch, dtype)) for _ in range(3))
        for is_flat in (True, False):
            inputs = q * (not is_flat), k, v
            here = spec.attention(*inputs, is_causal=is_causal)
            on_gpu = [x.cuda() for x in inputs]
            there = [spec.attention(*on_gpu, is_causal=is_causal).cpu() for _ in range(2)]
            assert torch.equal(*there)
            if is_flat and name not in APPROXIMATE:
                assert torch.equal(here, there[0])
            limit = 1e-6 if dtype == "float32" else 2e-3 if dtype == "float16" else 2e-2
            assert (here.double() - there[0].double()).abs().max() < limit


@pytest.mark.parametrize("name", [*VERSIONS, *ENTRIES])
def test_the_judge_passes_it_on_a_gpu(name, tmp_path):
    report = suite.verify(path_of(name, tmp_path), "cuda", quick=True, seed=1)
    assert (report.passed, report.failures) == (True, [])
    assert report.checks > 50


LAUNCH = """
import torch
from attention_kernels import ladder
spec = ladder.resolve({file!r})
shape, dtype = (1, 128, 2, spec.head_dims[0]), getattr(torch, spec.dtypes[0])
spec.attention(*(torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(3)))
torch.cuda.synchronize()
"""
# What accesses counts, by memory and kind, and the sum of these counters.
SASS = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
COUNTERS = {
    ("global", "load"): [
        f"smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{x}.sum" for x in ("ld", "ldgsts")
    ],
    ("global", "store"): ["smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st.sum"],
    ("global", "TMA load"): ["l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld.sum"],
    ("shared", "load"): [f"{SASS}ld.sum", f"{SASS}ldsm.sum"],
    ("shared", "store"): [f"{SASS}st.sum", f"{SASS}ldgsts.sum"],
    ("shared", "wgmma"): ["smsp__sass_l1tex_pipe_lsu_wavefronts_mem_shared.sum"],
}


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("flash_mma", ()),
        ("wgmma_tma", ()),
        # Its rows of 64 bytes begin in lines of memory of their own; cp.async stores each line by
        # itself.
        ("generated", [("shared", "store")]),
        # nvcc joins loads of C++ in it.
        ("producer_bulk", [("shared", "load")]),
    ],
)
def test_the_accesses_of_asm_are_those_that_a_profiler_counts(name, left_out):
    file = STRANGERS / f"{name}.cu"
    version = header.of_file(file)
    sums = collections.Counter[tuple[str, str]]()
    for access in count_accesses(version, head_dim=version.head_dims[0], num_heads=2):
        sums[access.memory, access.kind] += access.wavefronts + access.sectors
    wanted = {what: COUNTERS[what] for what in sums if what in COUNTERS and what not in left_out}
    counted = collections.Counter[str]()
    metrics = f"--metrics {','.join(itertools.chain(*wanted.values()))}"
    for row in profiled(metrics, LAUNCH.format(file=str(file))):
        counted[row["Metric Name"]] += int(row["Metric Value"].replace(",", ""))
    found = {what: sum(counted[x] for x in counters) for what, counters in wanted.items()}
    assert found == {what: sums[what] for what in found}
    assert len(found) >= 3
