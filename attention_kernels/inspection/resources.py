"""Record what a version launches, and report what each kernel uses of a multiprocessor.

csrc/recorders/launches.cpp calls the version's launch(), compiled for the host. Registers, spills
and static shared memory come from ptxas. No GPU is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from tqdm.contrib.concurrent import thread_map

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.table import table
from attention_kernels.ladder import build, compilers, entry
from attention_kernels.ladder.compilers import FLAGS, BuildError
from attention_kernels.ladder.header import VersionHeader, csrc_of

MAX_SEQLEN = 65535 * 16
"""The longest sequence that csrc/binding.cpp accepts."""
_INT_MAX = 2**31 - 1
_SEQLENS = 6  # the terabyte at which csrc/recorders/launches.cpp puts the rows' lengths
HOPPER_PARAMETERS = 0x210
"""Offset of a kernel's parameters in constant bank 0, from compute capability 9.0 on."""
_MAP_ALIGNMENT = 128  # of a tensor map, in cuda.h of CUDA 13
WARP = 32
ARCHS = ("75", "80", "90", "120")
REGISTERS_PER_SM = 65536
# Registers are allocated to a warp, and bytes of shared memory to a block, in these units.
REGISTER_UNIT = 256
SHARED_UNIT = 128
Triple: TypeAlias = tuple[int, int, int]

# ---- Launches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    head_dim: int
    kernel: str
    """Name with template arguments: "attention_kernel<64>"."""
    symbol: str
    """Mangled name."""
    grid: Triple
    block: Triple
    dynamic_smem: int
    """Bytes of dynamic shared memory."""
    parameters: bytes = dataclasses.field(compare=False)
    """The kernel's parameters as nvcc lays them out. Launches that differ only here are equal."""
    words: tuple[tuple[int, int], ...] = ()
    """Values that the kernel loads and on which its work depends: see Blocks.words."""
    cluster: Triple = (1, 1, 1)
    """Blocks of a cluster."""

    @property
    def threads(self) -> int:
        """Threads per block."""
        return math.prod(self.block)


def case_faults(
    version: VersionHeader,
    *,
    seqlens: Iterable[int],
    head_dim: int,
    batch: int,
    num_heads: int,
    may_decode: bool = False,
) -> list[str]:
    """Return every reason why a version cannot be launched as an attention kernel of a shape.

    may_decode: it may also be attention of one query per row; seqlens are those of the cache.
    """
    faults = ["it is host code, not a GPU kernel"] * version.is_host
    if version.role != "attention" and not (may_decode and version.role == "decode"):
        faults.append("it is not an attention kernel")
    if head_dim not in version.head_dims:
        faults.append(f"head_dim {head_dim} (it takes {', '.join(map(str, version.head_dims))})")
    sizes = [("batch", batch), ("num_heads", num_heads), *(("seqlen", n) for n in seqlens)]
    faults += [f"{name} {size} (1 or more)" for name, size in sizes if size < 1]
    limits = (
        ("seqlen", max(seqlens), MAX_SEQLEN),
        ("batch * num_heads", batch * num_heads, _INT_MAX),
        ("num_heads * head_dim", num_heads * head_dim, _INT_MAX // 64),
    )
    faults += [f"{name} {size} ({most} or less)" for name, size, most in limits if size > most]
    return faults


def recorder(version: VersionHeader) -> Path:
    """Build the program that lists a version's launches. Raises BuildError."""
    csrc = csrc_of(version)
    command = [*compilers.compile_flags(version, "emulator", ""), "-O0"]
    source = csrc / "recorders" / "launches.cpp"

    def link(program: Path) -> None:
        first = [*command, "-include", str(source)]
        code = build.source_flags(version, first, program.parent)
        objects = [*code, "-x", "none", str(build.object_file("emulator", csrc, *build.RUNTIME))]
        options = ["-rdynamic", "-o", str(program), "-pthread", "-ldl"]
        options += compilers.torch_libraries(version)
        compilers.output_of([*first, *objects, *options])

    files = [version.path, source, csrc / build.RUNTIME[0]]
    return build.kept(f"launches-{version.op}", "", files, csrc, command, link)


def record(
    version: VersionHeader,
    head_dims: Iterable[int] = (),
    *,
    case: Sequence[int] = (1, 1024, 1, 1),
    multiprocessors: int | None = None,
) -> list[Launch]:
    """Return a version's launches for each head_dim.

    case: batch, seqlen, num_heads and is_causal; for a decode kernel, all rows fill a cache of that
    length. multiprocessors: those of the GPU, on which a launch() may depend. Raises
    UnsupportedError for a version that launches nothing, BuildError if it does not compile or its
    launch() fails.
    """
    run = [str(recorder(version)), f"--case={','.join(map(str, case))}", *map(str, head_dims)]
    if multiprocessors:
        run = ["env", f"ATTENTION_EMULATOR_MULTIPROCESSORS={multiprocessors}", *run]
    words = ((_SEQLENS, case[1]),) if version.role == "decode" else ()
    lines = compilers.output_of(run).splitlines()
    if not lines:
        raise UnsupportedError(version.path.name, ["its launch() launches no kernel"])
    found = []
    for line in lines:
        dim, _, smem, symbol, signature, *axes, parameters = line.split("\t")
        if symbol == "?":
            reason = (
                "a kernel that it launches is static, or in an unnamed namespace: it has no name"
            )
            raise UnsupportedError(version.path.name, [reason])
        name = re.search(r"(\w+(<[^(]*>)?)\(", signature)
        kernel, given = name[1] if name else signature, bytes.fromhex(parameters)
        if "CUtensorMap" in symbol:
            given = bytes(-HOPPER_PARAMETERS % _MAP_ALIGNMENT) + given
        grid, block = ((int(x), int(y), int(z)) for x, y, z in (text.split(",") for text in axes))
        found.append(Launch(int(dim), kernel, symbol, grid, block, int(smem), given, words))
    return found


# ---- Machine code --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """ptxas's report on a kernel; sizes in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    static_smem: int


def compile_version(
    version: VersionHeader, arch: str, *more: str
) -> tuple[dict[str, Compiled], bytes]:
    """Compile a version; return ptxas's report by mangled name and the machine code, a cubin.

    more: flags for nvcc besides the version's own. Raises BuildError if nvcc is missing or the
    version does not compile.
    """
    flags = [*compilers.compile_flags(version, "cuda", arch), *more]

    def compile_to(output: Path) -> None:
        """Write ptxas's report, a zero byte and the machine code."""
        with tempfile.TemporaryDirectory() as folder:
            source = str(entry.written(version, Path(folder)))
            options = ["-O3", "-cubin", "-Xptxas=-v", source, "-o", "kernel.cubin"]
            report = compilers.output_of([*flags, *options], folder)
            code = Path(folder, "kernel.cubin").read_bytes()
        output.write_bytes(report.encode() + b"\0" + code)

    others: list[object] = [version.path] if more else []  # a line table names the file
    others += [compilers.asked(str(compilers.find_gxx())), *map(os.environ.get, FLAGS)]
    name, csrc = f"{version.op}-sm_{arch}", csrc_of(version)
    kept = build.kept(name, ".cubin", [version.path], csrc, flags, compile_to, *others)
    report, _, code = kept.read_bytes()[: -build.DIGEST_BYTES].partition(b"\0")
    return parse_ptxas(report.decode()), code


def compile_summary(version: VersionHeader, arch: str) -> str:
    """Compile a version and summarize ptxas's report on its kernels in a phrase.

    Raises BuildError if nvcc is missing or the version does not compile.
    """
    kernels = [k for build in version.builds() for k in compile_version(build, arch)[0].values()]
    if not kernels:
        return "no kernels"
    registers = sorted({kernel.registers for kernel in kernels})
    most = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else f"{registers[0]}"
    spilled = max(kernel.spill_stores + kernel.spill_loads for kernel in kernels)
    return f"{most} registers, {f'up to {spilled} bytes of spills' if spilled else 'no spills'}"


def parse_ptxas(output: str) -> dict[str, Compiled]:
    """Parse the output of `ptxas -v` into its numbers, by mangled name."""
    entry = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
        re.S,
    )
    return {
        symbol: Compiled(int(registers), int(stores), int(loads), int(static or 0))
        for symbol, stores, loads, registers, static in entry.findall(output)
    }


# ---- Occupancy -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The limits of a multiprocessor, and the shared memory that it reserves in each block.

    From the tables of technical specifications in the CUDA C++ Programming Guide.
    """

    warps: int
    blocks: int
    shared_kb: int
    shared_kb_per_block: int
    reserved_bytes: int = 1024


LIMITS = {
    "75": Limits(32, 16, 64, 64, reserved_bytes=0),
    "80": Limits(64, 32, 164, 163),
    "86": Limits(48, 16, 100, 99),
    "89": Limits(48, 24, 100, 99),
    "90": Limits(64, 32, 228, 227),
    "100": Limits(64, 32, 228, 227),
    "120": Limits(48, 24, 100, 99),
}


def shares(arch: str, threads: int, registers: int, shared: int) -> dict[str, Fraction]:
    """Return the share of each resource of a multiprocessor that a block takes."""
    limits = LIMITS[arch]
    warps = -(-threads // WARP)
    registers_per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    allocated = max(-(-(shared + limits.reserved_bytes) // SHARED_UNIT) * SHARED_UNIT, 1)
    return {
        "warps": Fraction(warps, limits.warps),
        "blocks": Fraction(1, limits.blocks),
        # A multiprocessor has four parts, and a warp stays in one.
        "registers": Fraction(warps, REGISTERS_PER_SM // 4 // registers_per_warp * 4),
        "shared memory": Fraction(allocated, limits.shared_kb * 1024),
    }


def resident_blocks(arch: str, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Return how many blocks a multiprocessor holds at once, and the resource that runs out."""
    if shared > LIMITS[arch].shared_kb_per_block * 1024:
        return 0, "shared memory"
    taken = shares(arch, threads, registers, shared)
    fits = {name: int(1 / share) for name, share in taken.items()}
    least = min(fits, key=fits.__getitem__)
    return fits[least], least


# ---- The table of a ladder's resources -----------------------------------------------------------


@dataclass(frozen=True)
class Resources(Compiled):
    """The resources of one kernel for one head_dim on one architecture; sizes in bytes."""

    version: str
    arch: str
    dtype: str
    kernel: str
    head_dim: int
    threads: int
    dynamic_smem: int
    blocks: int
    """Blocks that fit on a multiprocessor at once; 0 if not even one does."""
    warps: int
    """Warps in those blocks."""
    max_warps: int
    limited_by: str
    """Resource that runs out first."""

    @property
    def occupancy(self) -> float:
        """Resident warps as a fraction of the most that a multiprocessor holds."""
        return self.warps / self.max_warps


def resource_table(
    versions: Sequence[VersionHeader],
    archs: Sequence[str] = ARCHS,
    head_dims: Iterable[int] = (32, 64, 128),
) -> list[Resources]:
    """Return the resources of every kernel, one row per dtype, architecture and head_dim.

    Raises BuildError if a compiler is missing or a version does not compile.
    """
    if unknown := {*archs} - {*LIMITS}:
        raise BuildError(f"no limits known for {min(unknown)} (known: {', '.join(LIMITS)})")
    tasks = [
        (version.label, build, arch, dims)
        for version in versions
        for build in version.builds()
        for arch in archs
        if build.compiles_for(arch)
        if (dims := [d for d in head_dims if d in build.head_dims])
    ]
    how: dict[str, Any] = {"desc": "compiling kernels", "max_workers": os.cpu_count(), "unit": ""}
    rows = thread_map(lambda task: [*rows_of(*task)], tasks, **how)
    return [*dict.fromkeys(itertools.chain.from_iterable(rows))]


def rows_of(
    label: str, version: VersionHeader, arch: str, head_dims: Sequence[int]
) -> Iterator[Resources]:
    """Yield the resources of a version's kernels on an architecture; raises BuildError."""
    compiled, _ = compile_version(version, arch)
    for launch in record(version, head_dims):
        if launch.symbol not in compiled:
            raise BuildError(f"{label} launches {launch.kernel}, which ptxas did not compile")
        kernel = compiled[launch.symbol]
        shared = kernel.static_smem + launch.dynamic_smem
        blocks, limited_by = resident_blocks(arch, launch.threads, kernel.registers, shared)
        found: list[Any] = [*dataclasses.astuple(kernel), label, arch, version.dtype]
        found += [launch.kernel, launch.head_dim, launch.threads, launch.dynamic_smem, blocks]
        found += [blocks * -(-launch.threads // WARP), LIMITS[arch].warps, limited_by]
        yield Resources(*found)


COLUMNS = {
    "version": "{0.version}", "arch": "sm_{0.arch}", "dtype": "{0.dtype}",
    "head_dim": "{0.head_dim}", "kernel": "{0.kernel}", "threads": "{0.threads}",
    "registers": "{0.registers}", "spills st/ld": "{0.spill_stores}/{0.spill_loads}",
    "static smem": "{0.static_smem}", "dynamic smem": "{0.dynamic_smem}",
    "blocks/SM": "{0.blocks}", "warps/SM": "{0.warps}/{0.max_warps}",
    "occupancy": "{0.occupancy:.0%}", "limited by": "{0.limited_by}",
}  # fmt: skip
_WORDS = ("version", "arch", "dtype", "kernel", "limited by")


def format_table(rows: Iterable[Resources]) -> str:
    """Format the rows as a text table, sizes in bytes."""
    columns = {name: "left" if name in _WORDS else "right" for name in COLUMNS}
    return table(columns, ([text.format(row) for text in COLUMNS.values()] for row in rows))
