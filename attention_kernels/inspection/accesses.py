"""What each source line of a kernel asks of memory: requests, bank conflicts, sectors.

Counted while the version's file runs in the emulator: no GPU is needed, and the counts are the same
every time. They are those of the loads and stores in the source. What nvcc moves out of a loop,
joins to one wider load or keeps in a register is for a profiler to say. Shared memory has 32 banks
of 4 bytes and delivers 128 bytes at once (CUDA C++ Programming Guide, "Shared Memory"); global
memory moves in sectors of 32 bytes.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.resources import aligned
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.header import VersionHeader

_FLAGS = "-O0 -g -fno-omit-frame-pointer -fsanitize=thread -fsanitize-coverage=trace-pc"


@dataclass(frozen=True)
class Access:
    """One load or store of the source, summed over a launch.

    lines: where it is, from the kernel's own line through the functions called there. source: the
    kernel's own line. memory: "shared" or "global". bytes: per lane. requests: how often a warp
    executes it. conflicts: how often shared memory must be asked again, since lanes want different
    words of one bank; ways: the most words that they want. sectors: of global memory;
    fewest_sectors: as many as would hold the bytes.
    """

    lines: tuple[int, ...]
    source: str
    memory: str
    is_store: bool
    bytes: int
    requests: int
    conflicts: int
    ways: int
    sectors: int
    fewest_sectors: int


def count_accesses(
    version: VersionHeader,
    *,
    seqlen: int = 128,
    head_dim: int = 64,
    batch: int = 1,
    num_heads: int = 1,
    is_causal: bool = True,
) -> list[Access]:
    """The accesses of one launch of a version, in the order of their lines; all inputs are zeros.

    Raises UnsupportedError for a version that it cannot count, or that refuses the case, and
    BuildError where a compiler is missing or the version does not compile.
    """
    reasons = []
    if version.is_host:
        reasons.append("only a kernel's accesses are counted, and this is host code")
    if re.search(r"^#include <mma\.h>", version.path.read_text("utf-8"), re.MULTILINE):
        reasons.append("a fragment's loads are in an order that CUDA does not document")
    if head_dim not in version.head_dims:
        reasons.append(f"head_dim {head_dim} (it takes {', '.join(map(str, version.head_dims))})")
    sizes = {"seqlen": seqlen, "batch": batch, "num_heads": num_heads}
    reasons += [f"{name} {size} (1 or more)" for name, size in sizes.items() if size < 1]
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    flags = [*compilers.compile_flags(version, "emulator", ""), "-fno-pie"]
    source, recorder = (
        str(version.path),
        str(header.csrc_of(version) / "recorders" / "accesses.cpp"),
    )
    element = getattr(torch, version.dtype).itemsize
    arguments = map(str, (batch, seqlen, num_heads, head_dim, element, int(is_causal)))
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/recorder"
        # The emulator's own functions are in both objects: the first one's, bare, are linked.
        objects = [f"{folder}/recorder.o", f"{folder}/kernel.o"]
        compilers.output_of([*flags, "-O2", "-c", recorder, "-o", objects[0]])
        # Unoptimized: each access of the source is one of the program, in the order of the source.
        compilers.output_of([*flags, *_FLAGS.split(), "-x", "c++", "-c", source, "-o", objects[1]])
        compilers.output_of([flags[0], "-no-pie", *objects, "-o", program, "-pthread", "-ldl"])
        status, output = compilers.execute([program, *arguments])
        if status != 0:
            raise UnsupportedError(version.path.name, [output.strip() or f"exit status {status}"])
        rows = [line.split("\t") for line in output.splitlines()]
        places = _places(program, {address for row in rows for address in row[-1].split()})
    text = version.path.read_text("utf-8").splitlines()
    found = []
    for memory, kind, *counts, chain in rows:
        frames = itertools.chain.from_iterable(places[address] for address in chain.split())
        lines = tuple(line for file, line in frames if Path(file).name == version.path.name)
        if lines:  # else the emulator's own
            words = text[lines[0] - 1].strip()
            found.append(Access(lines, words, memory, kind == "store", *map(int, counts)))
    return sorted(found, key=lambda access: (access.lines, access.memory, access.is_store))


def _places(program: str, addresses: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """File and line of each return address, in hexadecimal; callers of inlined functions first."""
    wanted = sorted(addresses)
    # The call ends before the address that it returns to.
    calls = [hex(max(int(address, 16) - 1, 0)) for address in wanted]
    return dict(zip(wanted, compilers.source_lines(program, calls), strict=True))


def format_table(accesses: Iterable[Access], width: int | None = None) -> str:
    """The table for people: a line per access, cut to `width` columns where that is given."""
    cells = [("line", "access", "bytes", "requests", "conflicts", "sectors", "source")]
    for a in accesses:
        lines = ">".join(map(str, a.lines))
        kind = f"{a.memory} {'store' if a.is_store else 'load'}"
        conflicts = f"{a.conflicts} ({a.ways}-way)" if a.conflicts else ""
        sectors = str(a.sectors) if a.memory == "global" else ""
        if a.fewest_sectors < a.sectors:
            sectors += f" ({a.fewest_sectors} would do)"
        cells.append((lines, kind, str(a.bytes), str(a.requests), conflicts, sectors, a.source))
    rows = aligned(cells).splitlines()
    return "\n".join(
        r if width is None or len(r) <= width else f"{r[: width - 3]}..." for r in rows
    )
