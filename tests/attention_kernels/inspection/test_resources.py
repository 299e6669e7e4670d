"""Registers and spills as ptxas reports them, and the occupancy that follows."""

from __future__ import annotations

import re

import pytest

from attention_kernels import ladder
from attention_kernels.inspection import resources
from attention_kernels.inspection.launches import Launch
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError

VERSIONS = [version for version in ladder.versions().values() if not version.is_host]
LAST = {version.path.parent: version.builds()[-1] for version in VERSIONS}.values()


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.op)
def test_every_version_compiles_without_spills(version):
    """Compile for the first architecture that a version supports: its code is the same for all.

    Every dtype is compiled, but a ladder's last version in the first one only: the test below
    compiles it in the last one.
    """
    assert "__CUDA_ARCH__" not in version.path.read_text("utf-8")
    builds = version.builds()
    for one in builds[:1] if builds[-1] in LAST else builds:
        arch = next(a for a in resources.ARCHS if one.compiles_for(a))
        for kernel in resources.compile_version(one, arch).values():
            # Scalars that live through the inner loops; an array would be hundreds of bytes.
            assert kernel.spill_stores <= 64 >= kernel.spill_loads


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("version", LAST, ids=lambda version: version.op)
def test_the_last_version_of_a_ladder_on_later_architectures(version):
    # nvcc takes as long for WMMA's as for all the others, so compile it only for the architecture
    # with the least shared memory.
    architectures = ("120",) if version.op.startswith("wmma") else ("90", "120")
    rows = resources.resource_table([version], architectures)
    assert {(row.arch, row.head_dim) for row in rows} == {
        (arch, head_dim) for arch in architectures for head_dim in version.head_dims
    }
    for row in rows:
        assert row.spill_stores <= 64 >= row.spill_loads
        assert row.registers * row.threads <= resources.REGISTERS_PER_SM
        if row.head_dim <= 64:
            assert row.blocks > 0
    assert version.label in resources.format_table(rows)


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_an_unknown_architecture_is_the_compilers_error():
    with pytest.raises(BuildError, match="Unsupported gpu architecture 'compute_99'"):
        build.build(header.versions()[0], "cuda", "99")
    with pytest.raises(BuildError, match="no limits known for 99"):
        resources.resource_table([], ("99",))


def test_ptxas_is_read():
    output = (
        "ptxas info    : Compiling entry function '_Zone' for 'sm_90'\n"
        "ptxas info    : Function properties for _Zone\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 400 bytes smem\n"
        "ptxas info    : Compiling entry function '_Ztwo' for 'sm_90'\n"
        "ptxas info    : Function properties for _Ztwo\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 255 registers\n"
    )
    one, two = resources.parse_ptxas(output).values()
    assert (one.registers, one.spill_stores, one.spill_loads, one.static_smem) == (40, 16, 24, 400)
    assert (two.registers, two.static_smem) == (255, 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("90", 256, 32, 0, (8, "warps")),
        ("90", 32, 32, 0, (32, "blocks")),
        ("90", 256, 128, 0, (2, "registers")),
        ("90", 128, 255, 0, (2, "registers")),
        ("90", 128, 16, 100 * 1024, (2, "shared memory")),
        ("90", 128, 16, 228 * 1024, (0, "shared memory")),
        ("75", 1024, 64, 64 * 1024, (1, "warps")),
        ("86", 128, 16, 49 * 1024, (2, "shared memory")),
        ("86", 128, 16, 50 * 1024, (1, "shared memory")),
        ("80", 128, 16, 81 * 1024, (2, "shared memory")),
        ("80", 128, 16, 82 * 1024, (1, "shared memory")),
        ("89", 32, 32, 0, (24, "blocks")),
        ("90", 128, 33, 0, (12, "registers")),  # rounded up to 40 registers
        ("90", 32, 96, 0, (20, "registers")),  # 5 warps fit in each of four parts
        ("120", 256, 32, 0, (6, "warps")),
        ("120", 128, 16, 100 * 1024, (0, "shared memory")),
    ],
)
def test_occupancy(arch, threads, registers, shared, expected):
    assert resources.resident_blocks(arch, threads, registers, shared) == expected


def test_every_number_is_in_the_right_column():
    launch = Launch(64, "kernel<64>", "_Zone", (1, 1, 1), (80, 1, 1), 1024, b"")
    compiled = {"_Zone": resources.Compiled(40, 16, 24, 400)}
    head, line = resources.format_table(
        [resources._row("v01", "90", "float16", launch, compiled)]
    ).splitlines()
    assert dict(zip(re.split("  +", head), re.split("  +", line), strict=True)) == {
        "version": "v01",
        "arch": "sm_90",
        "dtype": "float16",
        "head_dim": "64",
        "kernel": "kernel<64>",
        "threads": "80",  # three warps, the last not full
        "registers": "40",
        "spills st/ld": "16/24",
        "static smem": "400",
        "dynamic smem": "1024",
        "blocks/SM": "16",
        "warps/SM": "48/64",
        "occupancy": "75%",
        "limited by": "registers",
    }


def test_shared_memory_of_both_kinds_limits_the_blocks():
    launch = Launch(64, "kernel", "_Zone", (1, 1, 1), (128, 1, 1), 40 * 1024, b"")
    compiled = {"_Zone": resources.Compiled(32, 0, 0, 40 * 1024)}
    row = resources._row("v01", "90", "float16", launch, compiled)
    assert (row.blocks, row.limited_by) == (2, "shared memory")
    with pytest.raises(BuildError, match="v01 launches kernel, which ptxas did not compile"):
        resources._row("v01", "90", "float16", launch, {})


def test_kernels_that_start_early_are_listed():
    version = next(one for one in header.versions() if one.name == "v17")
    launches = resources.launches_of(version, [64])
    assert [launch.kernel.split("<")[0] for launch in launches] == [
        "attention_kernel",
        "join_kernel",
    ]
