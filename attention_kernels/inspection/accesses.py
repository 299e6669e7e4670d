"""Count the memory traffic of each source line of a kernel: wavefronts, conflicts, sectors.

The version's file runs in the emulator, so no GPU is needed and every run gives the same counts.
They cover the loads and stores in the source; only a profiler can tell which of them nvcc moves out
of a loop, joins into a wider load or replaces with a register. A copy by TMA is a request of global
and one of shared memory, where it fills whole rows of 128 bytes. A product of a warpgroup (wgmma)
is a request of shared memory for the operands that are there. Shared memory has 32 banks of 4 bytes
and delivers 128 bytes at once (CUDA C++ Programming Guide, "Shared Memory"); global memory moves in
sectors of 32 bytes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_kernels import child
from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.resources import case_faults
from attention_kernels.inspection.table import table
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.header import VersionHeader

# Inlined, but otherwise unoptimized: the program makes every access of the source, in order.
_FLAGS = (
    "-Og -fno-tree-fre -fno-tree-dce -fno-tree-dse -fno-tree-sra -fno-reorder-blocks -g "
    "-fno-omit-frame-pointer -fsanitize=thread -fsanitize-coverage=trace-pc"
)


@dataclass(frozen=True)
class MemoryRequest:
    """One memory request: the simultaneous accesses of a warp's lanes."""

    block: int
    warp: int
    cost: int
    """Wavefronts in shared memory, sectors in global memory."""
    array: str
    """Name of the array: "dynamic" or "static" in shared memory; "q", "k", "v", "qkv" (all three in
    one), "o" or "scratch" in global memory."""
    offsets: tuple[int | None, ...]
    """Offset into the array in bytes, by lane; None for an inactive lane, and for all lanes of a
    copy by TMA or a product."""


BY_LANE = ("load", "store", "atomic")


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of the source, summed over a launch."""

    lines: tuple[int, ...]
    """Source lines of the call chain, the kernel's own line first."""
    source: str
    """Text of the kernel's own line."""
    memory: str
    """"shared" or "global"."""
    kind: str
    """One of BY_LANE, or "TMA load", "TMA store" or "wgmma"."""
    bytes: int
    """Bytes per lane; of a copy by TMA all of its bytes, of a product its operands in shared
    memory."""
    requests: int
    """Number of times that warps execute it; a product is executed by four at once."""
    wavefronts: int
    """Deliveries of shared memory, which a profiler calls wavefronts; 0 for global memory."""
    conflicts: int
    """Extra wavefronts, needed because lanes access different words of one bank."""
    ways: int
    """Degree of the conflict: most words (for an atomic, lanes) that collide in one bank."""
    sectors: int
    """Sectors of global memory, 32 bytes each; 0 for shared memory."""
    fewest_sectors: int
    """Fewest sectors that could hold the bytes."""
    costliest: MemoryRequest
    """The request with the most wavefronts or sectors; the first of equals."""


# The recorder's counts, in the order of its columns.
_COUNTED = "bytes", "requests", "wavefronts", "conflicts", "ways", "sectors", "fewest_sectors"


def count_accesses(
    version: VersionHeader,
    *,
    seqlen: int = 128,
    head_dim: int = 64,
    batch: int = 1,
    num_heads: int = 1,
    is_causal: bool = True,
    timeout_s: float = 600.0,
) -> list[Access]:
    """Run one launch of a version and record its accesses.

    All inputs are zeros of the version's first dtype. timeout_s limits the launch, in seconds;
    ATTENTION_EMULATOR_TIMEOUT limits each of its blocks. Raises UnsupportedError for a version that
    cannot be counted, that refuses the case, that accesses nothing or that does not end in time,
    and BuildError if a compiler is missing or the version does not compile.
    """
    reasons = case_faults(
        version, seqlens=[seqlen], head_dim=head_dim, batch=batch, num_heads=num_heads
    )
    if "\n#include <mma.h>" in version.source:
        reasons.append("a fragment's loads are in an order that CUDA does not document")
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    version = version.builds()[0]
    flags = [*compilers.compile_flags(version, "emulator", ""), "-fno-pie"]
    csrc, element = header.csrc_of(version), getattr(torch, version.dtype).itemsize
    sizes = (batch, seqlen, num_heads, head_dim, element, int(is_causal))
    arguments = [*map(str, sizes), version.layout]
    command = [*flags, *_FLAGS.split()]
    ours = ("recorders/accesses.cpp", "-fno-pie", "-O1"), build.RUNTIME

    def build_recorder(program: Path) -> None:
        # The linker takes the first function of each name. All objects contain the emulator's
        # inline functions, but only the last one's are instrumented; the first two define the
        # functions that -fsanitize=thread calls.
        objects = [str(build.object_file("emulator", csrc, *one)) for one in ours]
        objects.append(f"{program}.o")
        source = build.source_flags(version, command, program.parent)
        compilers.output_of([*command, *source, "-c", "-o", objects[-1]])
        options = ["-o", str(program), "-pthread", "-ldl", *compilers.torch_libraries(version)]
        compilers.output_of([flags[0], "-no-pie", "-Wl,-z,muldefs", *objects, *options])

    name, files = f"accesses-{version.op}", [version.path, *(csrc / one[0] for one in ours)]
    with build.kept(name, "", files, csrc, command, build_recorder).open("rb") as file:
        program = f"{child.FD}{file.fileno()}"
        done = child.run([program, *arguments], timeout_s=timeout_s)
        sys.stderr.write(done.err)  # output of the version's own printf
        if done.status != 0:
            reason = re.sub(
                r"at (0x\w+)",
                # Not from the cache: another program had the same name.
                lambda at: f"at {compilers.source_line.__wrapped__(program, at[1]) or at[1]}",
                done.out.strip() or f"its launch {done.how}",
            )
            raise UnsupportedError(version.path.name, [reason])
        rows = [line.split("\t") for line in done.out.splitlines()]
        addresses = sorted({address for row in rows for address in row[-1].split()})
        # A return address lies just behind the call instruction.
        calls = [hex(max(int(address, 16) - 1, 0)) for address in addresses]
        # By return address: files and lines, callers before the code inlined into them.
        places = dict(zip(addresses, compilers.source_lines(program, calls), strict=True))
    found = [*_accesses(version, rows, places)]
    if not found:
        reason = "nothing to count: it launches no kernel, or exits before it does"
        raise UnsupportedError(version.path.name, [reason])
    return sorted(found, key=lambda access: (access.lines, access.memory, access.kind))


def _accesses(
    version: VersionHeader, rows: list[list[str]], places: dict[str, list[tuple[str, int]]]
) -> Iterator[Access]:
    """Yield the recorded accesses that are in the version's own file."""
    text = version.source.split("\n")
    for memory, kind, *counts, block, warp, cost, array, offsets, chain in rows:
        frames = itertools.chain.from_iterable(places[address] for address in chain.split())
        lines = tuple(line for file, line in frames if Path(file).name == version.listing.name)
        if lines:  # otherwise the emulator's own code made the access
            words = text[lines[0] - 1].strip()
            if counts[0] == "1" and "__shared__" in words:
                continue  # a flag of g++'s, whether a static array has been initialized
            by_lane = tuple(None if at == "-" else int(at) for at in offsets.split())
            request = MemoryRequest(int(block), int(warp), int(cost), array, by_lane)
            numbers = dict(zip(_COUNTED, map(int, counts), strict=True))
            yield Access(lines, words, memory, kind, **numbers, costliest=request)


COLUMNS = {
    "line": "right", "access": "left", "bytes": "right", "requests": "right",
    "wavefronts": "right", "conflicts": "right", "sectors": "right", "source": "left",
}  # fmt: skip


def format_table(accesses: Iterable[Access], width: int | None = None) -> str:
    """Format the accesses as a text table, one per line, cut to `width` columns if given."""
    rows = []
    for a in accesses:
        lines = ">".join(map(str, a.lines))
        conflicts = f"{a.conflicts} ({a.ways}-way)" if a.conflicts else ""
        sectors = str(a.sectors) if a.memory == "global" else ""
        if a.fewest_sectors < a.sectors:
            sectors += f" ({a.fewest_sectors} would do)"
        wavefronts = str(a.wavefronts) if a.memory == "shared" else ""
        counts = (a.bytes, a.requests, wavefronts, conflicts, sectors)
        rows.append((lines, f"{a.memory} {a.kind}", *counts, a.source))
    return table(COLUMNS, rows, width)
