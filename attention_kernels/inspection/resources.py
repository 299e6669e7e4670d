"""What each kernel takes of a multiprocessor: registers, spills, shared memory, occupancy.

Registers, spills and static shared memory are ptxas's own report; block size and dynamic shared
memory are recorded from the version's launch(), compiled for the host. No GPU is needed.
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
# What csrc/binding.cpp takes.
MAX_SEQLEN = 65535 * 16
_INT_MAX = 2**31 - 1
# Registers are given to a warp in units of this many; shared memory to a block, likewise.
REGISTER_UNIT = 256
SHARED_UNIT = 128


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has, and what its own bookkeeping takes of each block's shared memory.

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
    """One kernel, as launched for one head_dim on one architecture; sizes in bytes."""

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
    """How many fit on a multiprocessor at once; 0 if not even one does."""
    warps: int
    """How many warps those blocks are."""
    max_warps: int
    limited_by: str
    """What runs out first."""

    @property
    def occupancy(self) -> float:
        """The fraction of the warps that could be resident."""
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

    Raises BuildError where a compiler is missing or a version does not compile.
    """
    if unknown := {*archs} - {*LIMITS}:
        raise BuildError(
            f"no limits known for {', '.join(sorted(unknown))}: there are {', '.join(LIMITS)}"
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
        for launch in dict.fromkeys(launches[build.op].result())  # some are launched often
    ]


def _row(
    version: str, arch: str, dtype: str, launch: _Launch, compiled: dict[str, _Compiled]
) -> Resources:
    if launch.symbol not in compiled:
        raise BuildError(f"{version} launches {launch.kernel}, which ptxas has not compiled")
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
    """Return every reason why a version's launch() must not be called with a shape."""
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
    """Return how many blocks a multiprocessor holds at once, and what limits them."""
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
    """Return what the version launches for each head_dim."""
    if not head_dims:
        return []
    with tempfile.TemporaryDirectory() as folder:
        return _recorded(version, launch_recorder(version, Path(folder)), head_dims)


def launch_recorder(version: VersionHeader, folder: Path) -> Path:
    """Build csrc/recorders/launches.cpp for a version, in a folder."""
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
    """Run a recorder of launches and return the fields of each; raises UnsupportedError if none."""
    rows = [line.split("\t") for line in compilers.output_of(command).splitlines()]
    if not rows:
        raise UnsupportedError(version.path.name, ["its launch() launches no kernel"])
    return rows


def _compile(version: VersionHeader, arch: str) -> dict[str, _Compiled]:
    """Return what ptxas reports of every kernel of a version, by mangled name."""
    with tempfile.TemporaryDirectory() as folder:
        flags = compilers.compile_flags(version, "cuda", arch, Path(folder))
        source = compilers.shell_safe(version.path.parent, Path(folder))
        command = [*flags, "-O3", "-cubin", "-Xptxas=-v", f"{source}/{version.path.name}"]
        return parse_ptxas(compilers.output_of([*command, "-o", os.devnull], folder))


def compile_summary(version: VersionHeader, arch: str) -> str:
    """Return what ptxas reports of all kernels of a version, in a phrase.

    Raises BuildError where there is no nvcc or it does not compile.
    """
    kernels = [kernel for one in version.builds() for kernel in _compile(one, arch).values()]
    registers = sorted({kernel.registers for kernel in kernels})
    most = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else f"{registers[0]}"
    spilled = max(kernel.spill_stores + kernel.spill_loads for kernel in kernels)
    return f"{most} registers, {f'up to {spilled} bytes of spills' if spilled else 'no spills'}"


def parse_ptxas(output: str) -> dict[str, _Compiled]:
    """Return the numbers in the output of `ptxas -v`, by mangled name."""
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
    """Format a table for people: a line per row, sizes in bytes."""
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
    """Align rows of text in columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    )
