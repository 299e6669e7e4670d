"""Registers and spills as ptxas reports them, and the occupancy that follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attention_kernels import ladder
from attention_kernels.inspection import resources
from attention_kernels.inspection.resources import Compiled, Launch
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError
from tests.attention_kernels.backends.common import OLDER

VERSIONS = [version for version in ladder.versions().values() if not version.is_host]
# Of each ladder, and of its versions for one architecture only
LAST = {(one.path.parent, one.needs_exactly): one.builds()[-1] for one in VERSIONS}.values()


def needs_nvcc(test):
    missing = compilers.find_nvcc() is None
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="needs nvcc")(test))


def builds() -> Iterator[Any]:
    """Yield all builds with an architecture: later ones for the last of each ladder.

    All older ones and those for later architectures take nvcc a minute, so they wait for a GPU's
    machine, which has more cores.
    """
    older = {ladder.versions()[name].path for name in OLDER}
    for one in (build for version in VERSIONS for build in version.builds()):
        arch = next(a for a in resources.ARCHS if one.compiles_for(a))
        waits = one not in LAST and (one.path in older or arch != resources.ARCHS[0])
        if one in LAST:  # 120 has the least shared memory
            arch = "120" if one.compiles_for("120") else "90"
        yield pytest.param(one, arch, id=one.op, marks=[pytest.mark.gpu] * waits)


@needs_nvcc
@pytest.mark.parametrize(("build", "arch"), [*builds()])
def test_every_version_compiles_without_spills(build, arch):
    assert "__CUDA_ARCH__" not in build.path.read_text("utf-8")  # its code is the same for all
    rows = resources.resource_table([build], (arch,))
    assert {(row.arch, row.head_dim) for row in rows} == {(arch, d) for d in build.head_dims}
    for row in rows:
        # Scalars that live through the inner loops; an array would be hundreds of bytes.
        assert row.spill_stores <= 64 >= row.spill_loads
        assert row.registers * row.threads <= resources.REGISTERS_PER_SM
        assert row.blocks > 0 or row.head_dim > 64 or build not in LAST
    assert build.label in resources.format_table(rows)


@needs_nvcc
def test_an_unknown_architecture_is_the_compilers_error():
    with pytest.raises(BuildError, match="Unsupported gpu architecture 'compute_99'"):
        resources.compile_version(VERSIONS[0], "99")
    with pytest.raises(BuildError, match="no limits known for 99"):
        resources.resource_table([], ("99",))


def test_a_file_without_kernels_is_summarized(monkeypatch):
    monkeypatch.setattr(resources, "compile_version", lambda *_: ({}, b""))
    assert resources.compile_summary(VERSIONS[0], "90") == "no kernels"


def test_ptxas_is_read():
    output = (
        "ptxas info    : Compiling entry function '_Zone' for 'sm_90'\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 400 bytes smem\n"
        "ptxas info    : Compiling entry function '_Ztwo' for 'sm_90'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 255 registers\n"
    )
    expected = {"_Zone": Compiled(40, 16, 24, 400), "_Ztwo": Compiled(255, 0, 0, 0)}
    assert resources.parse_ptxas(output) == expected


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("90", 256, 32, 0, (8, "warps")),
        ("90", 32, 32, 0, (32, "blocks")),
        ("90", 128, 255, 0, (2, "registers")),
        ("90", 128, 33, 0, (12, "registers")),  # rounded up to 40 registers
        ("90", 32, 96, 0, (20, "registers")),  # 5 warps fit in each of four parts
        ("90", 128, 16, 100 * 1024, (2, "shared memory")),
        ("90", 128, 16, 228 * 1024, (0, "shared memory")),
        ("75", 1024, 64, 1 << 16, (1, "warps")),
        ("86", 128, 16, 49 * 1024, (2, "shared memory")),
        ("80", 128, 16, 82 * 1024, (1, "shared memory")),
    ],
)
def test_occupancy(arch, threads, registers, shared, expected):
    assert resources.resident_blocks(arch, threads, registers, shared) == expected


def test_shared_memory_of_both_kinds_limits_the_blocks(monkeypatch):
    launch = Launch(64, "kernel", "_Zone", (1, 1, 1), (80, 1, 1), 40 * 1024, b"")
    compiled = {"_Zone": Compiled(32, 16, 24, 40 * 1024)}
    monkeypatch.setattr(resources, "record", lambda *_: [launch])
    monkeypatch.setattr(resources, "compile_version", lambda *_: (compiled, b""))
    (row,) = resources.rows_of("v01", VERSIONS[0], "90", [64])
    assert (row.blocks, row.limited_by, row.spill_loads) == (2, "shared memory", 24)
    assert (row.warps, row.max_warps) == (6, 64)  # three in a block, the last not full


def test_kernels_that_start_early_are_listed():
    version = ladder.versions()["CUSTOM_CUDA_VERSION_17"]
    names = [launch.kernel.split("<")[0] for launch in resources.record(version, [64])]
    assert names == ["attention_kernel", "join_kernel"]
