"""What each source line of a kernel asks of memory: requests, wavefronts, conflicts, sectors.

Counted while the version's file runs in the emulator: no GPU is needed, and the counts are the same
every time. They are those of the loads and stores in the source. What nvcc moves out of a loop,
joins to one wider load or keeps in a register is for a profiler to say. Shared memory has 32 banks
of 4 bytes and delivers 128 bytes at once (CUDA C++ Programming Guide, "Shared Memory"); global
memory moves in sectors of 32 bytes.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import child
from attention_kernels.inspection.resources import aligned, case_faults
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.header import VersionHeader

_FLAGS = "-O0 -g -fno-omit-frame-pointer -fsanitize=thread -fsanitize-coverage=trace-pc"


@dataclass(frozen=True)
class Request:
    """What the lanes of one warp access at once."""

    block: int
    warp: int
    cost: int
    """Wavefronts in shared memory, sectors in global memory."""
    array: str
    """"dynamic" or "static" shared memory; q, k, v, o, "scratch", or "qkv", which holds all three.
    """
    offsets: tuple[int | None, ...]
    """By lane, in bytes from where the array begins; None for a lane that takes no part."""


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of the source, summed over a launch."""

    lines: tuple[int, ...]
    """Where it is, from the kernel's own line through the functions called there."""
    source: str
    """The kernel's own line."""
    memory: str
    """"shared" or "global"."""
    kind: str
    """"load", "store" or "atomic"."""
    bytes: int
    """Per lane."""
    requests: int
    """How often a warp executes it."""
    wavefronts: int
    """How often shared memory delivers: a profiler's wavefronts. 0 for global memory."""
    conflicts: int
    """Wavefronts that are there because lanes want different words of one bank."""
    ways: int
    """The most words that the lanes of one wavefront want of one bank: of an atomic, lanes."""
    sectors: int
    """Of global memory, 32 bytes each. 0 for shared memory."""
    fewest_sectors: int
    """As many sectors as would hold the bytes."""
    costliest: Request
    """The one with the most wavefronts or sectors: the first of equals."""


@dataclass(frozen=True)
class Turn:
    """What a warp does before the emulator goes on to another warp, or to the next barrier."""

    barriers: int
    """That the block has passed before."""
    warp: int
    accesses: int
    """Of all its lanes."""


@dataclass(frozen=True)
class Recording:
    """What one launch of a version does."""

    accesses: list[Access]
    """In the order of their lines."""
    block: int
    """The block with the most accesses."""
    turns: list[Turn]
    """Of that block, in the order in which the emulator runs its warps."""


# The recorder's numbers, in its order.
_COUNTED = (
    "bytes",
    "requests",
    "wavefronts",
    "conflicts",
    "ways",
    "sectors",
    "fewest_sectors",
)
_UNCOUNTED = {
    r"^#include <mma\.h>": "a fragment's loads are in an order that CUDA does not document",
}


def record(
    version: VersionHeader,
    *,
    seqlen: int = 128,
    head_dim: int = 64,
    batch: int = 1,
    num_heads: int = 1,
    is_causal: bool = True,
    timeout_s: float = 600.0,
) -> Recording:
    """Run one launch of a version and record its accesses.

    All inputs are zeros, of the first dtype that it takes. timeout_s: seconds that the launch may
    take; ATTENTION_EMULATOR_TIMEOUT limits each of its blocks. Raises UnsupportedError for a
    version that it cannot count, that refuses the case, that accesses nothing or that does not end
    in time, and BuildError where a compiler is missing or the version does not compile.
    """
    reasons = []
    if version.is_host:
        reasons.append("only a kernel's accesses are counted, and this is host code")
    if version.role != "attention":
        reasons.append("only an attention kernel's accesses are counted, and this one decodes")
    source = version.source
    reasons += [why for found, why in _UNCOUNTED.items() if re.search(found, source, re.MULTILINE)]
    reasons += case_faults(
        version, seqlens=[seqlen], head_dim=head_dim, batch=batch, num_heads=num_heads
    )
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    version = version.builds()[0]
    flags = [*compilers.compile_flags(version, "emulator", ""), "-fno-pie"]
    csrc = header.csrc_of(version)
    element = getattr(torch, version.dtype).itemsize
    sizes = (batch, seqlen, num_heads, head_dim, element, int(is_causal))
    arguments = [*map(str, sizes), version.layout]
    with tempfile.TemporaryDirectory() as folder:
        # The emulator's own functions are in both objects: the first one's, bare, are linked.
        objects = [f"{folder}/recorder.o", f"{folder}/kernel.o"]
        # Unoptimized: each access of the source is one of the program, in the order of the source.
        compilers.output_of(
            [*flags, *_FLAGS.split(), "-x", "c++", "-c", str(version.path), "-o", objects[1]]
        )
        recorder = compilers.object_file(csrc, "recorders/accesses.cpp", "-fno-pie", "-O1")
        Path(objects[0]).write_bytes(recorder)
        command = [flags[0], "-no-pie", *objects, "-o", f"{folder}/recorder", "-pthread", "-ldl"]
        compilers.output_of(command)
        file = open(f"{folder}/recorder", "rb")  # noqa: SIM115 - outlives its folder
    # The folder is gone before the launch: whoever kills this process leaves nothing behind.
    with file:
        program = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        label = f"counting accesses of {version.path.name}"
        try:
            done = child.run([program, *arguments], label=label, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"the launch did not end in {timeout_s:g} s"
            raise UnsupportedError(version.path.name, [reason]) from None
        sys.stderr.write(done.stderr)  # what the version prints
        if done.returncode != 0:
            words = done.stdout.strip()
            reason = re.sub(
                r"at (0x\w+)",
                lambda found: f"at {compilers.source_line(program, found[1]) or found[1]}",
                words or f"its launch {child.ending(done.returncode)}",
            )
            raise UnsupportedError(version.path.name, [reason])
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        counted, turns = (
            [row for row in rows if (row[0] == "turn") == is_turn] for is_turn in (0, 1)
        )
        places = _places(program, {address for row in counted for address in row[-1].split()})
    found = [*_accesses(version, counted, places)]
    if not found:
        reason = "there is nothing to count: it launches no kernel, or ends the process before"
        raise UnsupportedError(version.path.name, [reason])
    return Recording(
        sorted(found, key=lambda access: (access.lines, access.memory, access.kind)),
        block=int(turns[0][1]) if turns else 0,
        turns=[Turn(*map(int, turn[2:])) for turn in turns],
    )


def _accesses(
    version: VersionHeader, rows: list[list[str]], places: dict[str, list[tuple[str, int]]]
) -> Iterator[Access]:
    """Yield the accesses of the recorder's rows that are in the version's own file."""
    text = version.source.split("\n")
    for memory, kind, *counts, block, warp, cost, array, offsets, chain in rows:
        frames = itertools.chain.from_iterable(places[address] for address in chain.split())
        lines = tuple(line for file, line in frames if Path(file).name == version.path.name)
        if lines:  # else the emulator's own
            words = text[lines[0] - 1].strip()
            by_lane = tuple(None if at == "-" else int(at) for at in offsets.split())
            request = Request(int(block), int(warp), int(cost), array, by_lane)
            numbers = dict(zip(_COUNTED, map(int, counts), strict=True))
            yield Access(lines, words, memory, kind, **numbers, costliest=request)


def count_accesses(version: VersionHeader, **case: Any) -> list[Access]:
    """Return the accesses of record()."""
    return record(version, **case).accesses


def _places(program: str, addresses: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """Return file and line of each return address; callers of inlined functions come first."""
    wanted = sorted(addresses)
    # The call ends before the address that it returns to.
    calls = [hex(max(int(address, 16) - 1, 0)) for address in wanted]
    return dict(zip(wanted, compilers.source_lines(program, calls), strict=True))


def format_table(accesses: Iterable[Access], width: int | None = None) -> str:
    """Format a table for people: a line per access, cut to `width` columns if that is given."""
    cells = [
        ("line", "access", "bytes", "requests", "wavefronts", "conflicts", "sectors", "source")
    ]
    for a in accesses:
        lines = ">".join(map(str, a.lines))
        kind = f"{a.memory} {a.kind}"
        conflicts = f"{a.conflicts} ({a.ways}-way)" if a.conflicts else ""
        sectors = str(a.sectors) if a.memory == "global" else ""
        if a.fewest_sectors < a.sectors:
            sectors += f" ({a.fewest_sectors} would do)"
        wavefronts = str(a.wavefronts) if a.memory == "shared" else ""
        counts = (str(a.bytes), str(a.requests), wavefronts, conflicts, sectors)
        cells.append((lines, kind, *counts, a.source))
    rows = aligned(cells).splitlines()
    return "\n".join(
        r if width is None or len(r) <= width else f"{r[: width - 3]}..." for r in rows
    )
