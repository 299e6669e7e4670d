"""Report what each kernel uses of a multiprocessor: registers, shared memory, occupancy.

Registers, spills and static shared memory come from ptxas; block size and dynamic shared memory are
recorded from the version's launch(), compiled for the host. No GPU is needed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from attention_kernels.errors import UnsupportedError
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import VersionHeader

ARCHS = ("75", "80", "90", "120")
WARP_SIZE = 32
REGISTERS_PER_SM = 65536
# The longest sequence that csrc/binding.cpp accepts.
MAX_SEQLEN = 65535 * 16
_INT_MAX = 2**31 - 1
# Registers are allocated to a warp, and bytes of shared memory to a block, in these units.
REGISTER_UNIT = 256
SHARED_UNIT = 128


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


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel for one head_dim on one architecture; sizes in bytes."""

    version: str
    arch: str
    dtype: str
    kernel: str
    head_dim: int
    threads: int
    registers: int
    spill_stores: int
    spill_loads: int
    static_smem: int
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


@dataclass(frozen=True)
class _Launch:
    head_dim: int
    threads: int
    dynamic_smem: int
    symbol: str
    kernel: str


@dataclass(frozen=True)
class _Compiled:
    registers: int
    spill_stores: int
    spill_loads: int
    static_smem: int


def resource_table(
    versions: Sequence[VersionHeader],
    archs: Sequence[str] = ARCHS,
    head_dims: Iterable[int] = (32, 64, 128),
) -> list[Resources]:
    """Return the resources of every kernel, one row per dtype, architecture and head_dim.

    Raises BuildError if a compiler is missing or a version does not compile.
    """
    if unknown := {*archs} - {*LIMITS}:
        raise BuildError(
            f"no limits known for {', '.join(sorted(unknown))} (known: {', '.join(LIMITS)})"
        )
    head_dims = list(head_dims)
    builds = [(version, build) for version in versions for build in version.builds()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        launches = {
            b.op: pool.submit(_launches, b, [d for d in head_dims if d in b.head_dims])
            for _, b in builds
        }
        compiled = {
            (b.op, a): pool.submit(_compile, b, a)
            for _, b in builds
            for a in archs
            if b.compiles_for(a)
        }
        for future in tqdm(compiled.values(), "compiling kernels", unit=""):
            future.exception()
    return [
        _row(version.label, arch, build.dtype, launch, compiled[build.op, arch].result())
        for version, build in builds
        for arch in archs
        if build.compiles_for(arch)
        for launch in dict.fromkeys(launches[build.op].result())  # drop duplicates
    ]


def _row(
    version: str, arch: str, dtype: str, launch: _Launch, compiled: dict[str, _Compiled]
) -> Resources:
    if launch.symbol not in compiled:
        raise BuildError(f"{version} launches {launch.kernel}, which ptxas did not compile")
    kernel = compiled[launch.symbol]
    shared = kernel.static_smem + launch.dynamic_smem
    blocks, limited_by = resident_blocks(arch, launch.threads, kernel.registers, shared)
    return Resources(
        version=version,
        arch=arch,
        dtype=dtype,
        kernel=launch.kernel,
        head_dim=launch.head_dim,
        threads=launch.threads,
        registers=kernel.registers,
        spill_stores=kernel.spill_stores,
        spill_loads=kernel.spill_loads,
        static_smem=kernel.static_smem,
        dynamic_smem=launch.dynamic_smem,
        blocks=blocks,
        warps=blocks * -(-launch.threads // WARP_SIZE),
        max_warps=LIMITS[arch].warps,
        limited_by=limited_by,
    )


def case_faults(
    version: VersionHeader, *, seqlens: Iterable[int], head_dim: int, batch: int, num_heads: int
) -> list[str]:
    """Return every reason why a version's launch() cannot take a shape."""
    faults = []
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


def resident_blocks(arch: str, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Return how many blocks a multiprocessor holds at once, and the resource that runs out."""
    limits = LIMITS[arch]
    if shared > limits.shared_kb_per_block * 1024:
        return 0, "shared memory"
    warps = -(-threads // WARP_SIZE)
    registers_per_warp = _round_up(registers * WARP_SIZE, REGISTER_UNIT)
    # A multiprocessor has four parts, and a warp stays in one.
    warps_by_registers = REGISTERS_PER_SM // 4 // registers_per_warp * 4
    fits = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared_kb
        * 1024
        // max(_round_up(shared + limits.reserved_bytes, SHARED_UNIT), 1),
    }
    least = min(fits, key=lambda name: fits[name])
    return fits[least], least


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _launches(version: VersionHeader, head_dims: Sequence[int]) -> list[_Launch]:
    """Return the version's launches for each head_dim."""
    if not head_dims:
        return []
    with tempfile.TemporaryDirectory() as folder:
        return _recorded(version, launch_recorder(version, Path(folder)), head_dims)


def launch_recorder(version: VersionHeader, folder: Path) -> Path:
    """Build csrc/recorders/launches.cpp for a version in a folder, and return the program."""
    flags = compilers.compile_flags(version, "emulator", "")
    csrc = header.csrc_of(version)
    program, runtime = folder / "recorder", folder / "runtime.o"
    runtime.write_bytes(compilers.object_file(csrc, "emulator/runtime.cpp", "-O0"))
    recorder = str(csrc / "recorders" / "launches.cpp")
    source = f'-DATTENTION_SOURCE="{version.path}"'
    link = ["-rdynamic", "-o", str(program), "-pthread", "-ldl"]
    compilers.output_of([*flags, "-O0", source, recorder, str(runtime), *link])
    return program


def _recorded(version: VersionHeader, program: Path, head_dims: Sequence[int]) -> list[_Launch]:
    launches = []
    for row in recorded_rows(version, [str(program), *map(str, head_dims)]):
        head_dim, threads, smem, symbol, words, *_ = row
        name = re.search(r"(\w+(<[^(]*>)?)\(", words)
        launches.append(
            _Launch(int(head_dim), int(threads), int(smem), symbol, name[1] if name else words)
        )
    return launches


def recorded_rows(version: VersionHeader, command: Sequence[str]) -> list[list[str]]:
    """Run a launch recorder and return each launch's fields; UnsupportedError without launches."""
    rows = [line.split("\t") for line in compilers.output_of(command).splitlines()]
    if not rows:
        raise UnsupportedError(version.path.name, ["its launch() launches no kernel"])
    return rows


def _compile(version: VersionHeader, arch: str) -> dict[str, _Compiled]:
    """Compile a version and return ptxas's report on every kernel, by mangled name."""
    with tempfile.TemporaryDirectory() as folder:
        flags = compilers.compile_flags(version, "cuda", arch, Path(folder))
        source = compilers.shell_safe(version.path.parent, Path(folder))
        command = [*flags, "-O3", "-cubin", "-Xptxas=-v", f"{source}/{version.path.name}"]
        return parse_ptxas(compilers.output_of([*command, "-o", os.devnull], folder))


def compile_summary(version: VersionHeader, arch: str) -> str:
    """Compile a version and summarize ptxas's report on its kernels in a phrase.

    Raises BuildError if nvcc is missing or the version does not compile.
    """
    kernels = [kernel for one in version.builds() for kernel in _compile(one, arch).values()]
    registers = sorted({kernel.registers for kernel in kernels})
    most = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else f"{registers[0]}"
    spilled = max(kernel.spill_stores + kernel.spill_loads for kernel in kernels)
    return f"{most} registers, {f'up to {spilled} bytes of spills' if spilled else 'no spills'}"


def parse_ptxas(output: str) -> dict[str, _Compiled]:
    """Parse the output of `ptxas -v` into its numbers, by mangled name."""
    entry = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        re.S,
    )
    kernels = {}
    for symbol, stores, loads, registers, rest in entry.findall(output):
        shared = re.search(r"(\d+) bytes smem", rest)
        static = int(shared[1]) if shared else 0
        kernels[symbol] = _Compiled(int(registers), int(stores), int(loads), static)
    return kernels


COLUMNS = (
    "version", "arch", "dtype", "head_dim", "kernel", "threads", "registers", "spills st/ld",
    "static smem", "dynamic smem", "blocks/SM", "warps/SM", "occupancy", "limited by",
)  # fmt: skip


def format_table(rows: Iterable[Resources]) -> str:
    """Format the rows as a text table, sizes in bytes."""
    cells = [COLUMNS]
    for r in rows:
        cells.append(
            (
                r.version,
                f"sm_{r.arch}",
                r.dtype,
                str(r.head_dim),
                r.kernel,
                str(r.threads),
                str(r.registers),
                f"{r.spill_stores}/{r.spill_loads}",
                str(r.static_smem),
                str(r.dynamic_smem),
                str(r.blocks),
                f"{r.warps}/{r.max_warps}",
                f"{r.occupancy:.0%}" if r.blocks else "does not fit",
                r.limited_by,
            )
        )
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Align rows of text in columns, with numbers right-aligned."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    )
