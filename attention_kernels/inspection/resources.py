"""Report what each kernel uses of a multiprocessor: registers, shared memory, occupancy.

Registers, spills and static shared memory come from ptxas, block size and dynamic shared memory
from the recorded launches. No GPU is needed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from attention_kernels.inspection.launches import WARP, Launch, launches_of
from attention_kernels.ladder import build, compilers
from attention_kernels.ladder.compilers import FLAGS, BuildError
from attention_kernels.ladder.header import VersionHeader, csrc_of

ARCHS = ("75", "80", "90", "120")
REGISTERS_PER_SM = 65536
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
class Compiled:
    """ptxas's report on a kernel; sizes in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    static_smem: int


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

    @property
    def shown_occupancy(self) -> str:
        """The occupancy in percent, or "does not fit"."""
        return f"{self.occupancy:.0%}" if self.blocks else "does not fit"


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
    builds = [
        (version.label, build, [d for d in head_dims if d in build.head_dims])
        for version in versions
        for build in version.builds()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        launches = {
            build.op: pool.submit(launches_of, build, dims) for _, build, dims in builds if dims
        }
        compiled = {
            (build.op, arch): pool.submit(compile_version, build, arch)
            for _, build, dims in builds
            for arch in archs
            if dims and build.compiles_for(arch)
        }
        for future in tqdm(compiled.values(), "compiling kernels", unit=""):
            future.exception()
    rows = [
        _row(label, arch, build.dtype, launch, compiled[build.op, arch].result())
        for label, build, _ in builds
        for arch in archs
        if (build.op, arch) in compiled
        for launch in launches[build.op].result()
    ]
    return [*dict.fromkeys(rows)]


def _row(
    version: str, arch: str, dtype: str, launch: Launch, compiled: dict[str, Compiled]
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
        dynamic_smem=launch.dynamic_smem,
        **dataclasses.asdict(kernel),
        blocks=blocks,
        warps=blocks * -(-launch.threads // WARP),
        max_warps=LIMITS[arch].warps,
        limited_by=limited_by,
    )


def resident_blocks(arch: str, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Return how many blocks a multiprocessor holds at once, and the resource that runs out."""
    limits = LIMITS[arch]
    if shared > limits.shared_kb_per_block * 1024:
        return 0, "shared memory"
    warps = -(-threads // WARP)
    registers_per_warp = _round_up(registers * WARP, REGISTER_UNIT)
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


def reserved_first(arch: str) -> int:
    """Return the bytes of shared memory that are reserved before a block's own.

    From sm_90 on, they are part of its addresses and of the size that cuobjdump lists.
    """
    return LIMITS[arch].reserved_bytes if int(arch) >= 90 else 0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def compile_version(
    version: VersionHeader, arch: str, folder: Path | None = None, *more: str
) -> dict[str, Compiled]:
    """Compile a version to kernel.cubin in a folder; return ptxas's report by mangled name.

    more: flags for nvcc besides the version's own.

    Raises BuildError if nvcc is missing or the version does not compile.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return compile_version(version, arch, Path(temporary), *more)
    flags = [*compilers.compile_flags(version, "cuda", arch), *more]

    def compile_to(output: Path) -> None:
        """Write ptxas's report, a zero byte and the machine code."""
        options = ["-O3", "-cubin", "-Xptxas=-v", str(version.path), "-o", "kernel.cubin"]
        report = compilers.output_of([*flags, *options], str(folder))
        output.write_bytes(report.encode() + b"\0" + (folder / "kernel.cubin").read_bytes())

    others: list[object] = [version.path] if more else []  # a line table names the file
    others += [compilers.asked(str(compilers.find_gxx())), *map(os.environ.get, FLAGS)]
    name, csrc = f"{version.op}-sm_{arch}", csrc_of(version)
    kept = build.kept(name, ".cubin", [version.path], csrc, flags, compile_to, *others)
    report, _, code = kept.read_bytes()[: -build.DIGEST_BYTES].partition(b"\0")
    (folder / "kernel.cubin").write_bytes(code)
    return parse_ptxas(report.decode())


def compile_summary(version: VersionHeader, arch: str) -> str:
    """Compile a version and summarize ptxas's report on its kernels in a phrase.

    Raises BuildError if nvcc is missing or the version does not compile.
    """
    kernels = [k for build in version.builds() for k in compile_version(build, arch).values()]
    registers = sorted({kernel.registers for kernel in kernels})
    most = f"{registers[0]} to {registers[-1]}" if len(registers) > 1 else f"{registers[0]}"
    spilled = max(kernel.spill_stores + kernel.spill_loads for kernel in kernels)
    return f"{most} registers, {f'up to {spilled} bytes of spills' if spilled else 'no spills'}"


def parse_ptxas(output: str) -> dict[str, Compiled]:
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
        kernels[symbol] = Compiled(int(registers), int(stores), int(loads), static)
    return kernels


COLUMNS = {
    "version": "{0.version}",
    "arch": "sm_{0.arch}",
    "dtype": "{0.dtype}",
    "head_dim": "{0.head_dim}",
    "kernel": "{0.kernel}",
    "threads": "{0.threads}",
    "registers": "{0.registers}",
    "spills st/ld": "{0.spill_stores}/{0.spill_loads}",
    "static smem": "{0.static_smem}",
    "dynamic smem": "{0.dynamic_smem}",
    "blocks/SM": "{0.blocks}",
    "warps/SM": "{0.warps}/{0.max_warps}",
    "occupancy": "{0.shown_occupancy}",
    "limited by": "{0.limited_by}",
}
_WORDS = ("version", "arch", "dtype", "kernel", "limited by")


def format_table(rows: Iterable[Resources]) -> str:
    """Format the rows as a text table, sizes in bytes."""
    cells = [[*COLUMNS], *([text.format(row) for text in COLUMNS.values()] for row in rows)]
    align = ["left" if name in _WORDS else "right" for name in COLUMNS]
    return tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
