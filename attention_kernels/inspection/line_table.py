"""Find the source lines of a kernel's instructions in nvcc's line table (`nvcc -lineinfo`)."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

Frames: TypeAlias = tuple[tuple[str, int], ...]
"""File and line of an instruction: callers before the code inlined into them."""

_SECTION = re.compile(r"^\.text\.(\S+):$")
_FRAME = re.compile(r'^\s*//## File "(.+?)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s+(?:\{\s+)?/\*[0-9a-f]{4,}\*/\s")


def parse(text: str) -> dict[str, list[Frames]]:
    """Return the frames of each kernel's instructions in the output of `nvdisasm -gi`, by symbol.

    An instruction without a line, such as one of a division, has the frames of none.
    """
    kernels: dict[str, list[Frames]] = {}
    found: list[Frames] = []
    frames: list[tuple[str, int]] = []
    is_complete = False
    for line in text.splitlines():
        if section := _SECTION.match(line):
            found = kernels.setdefault(section[1], [])
            frames = []
        elif frame := _FRAME.match(line):
            frames = [] if is_complete else frames
            is_complete = False
            frames.insert(0, (frame[1], int(frame[2])))
        elif _INSTRUCTION.match(line):
            is_complete = True
            found.append(tuple(frames))
    return kernels


def own_lines(instructions: list[Frames], path: Path) -> list[tuple[int, ...]]:
    """Return each instruction's lines in a version file, the kernel's own line first.

    A lambda in the kernel is the kernel's own code. The first instruction is on the kernel's first
    line; functions that it calls are above it.
    """
    found = [
        tuple(line for file, line in frames if Path(file).name == path.name)
        for frames in instructions
    ]
    first = found[0][0] if found and found[0] else 0
    return [_from_kernel(lines, first) for lines in found]


def _from_kernel(lines: tuple[int, ...], first: int) -> tuple[int, ...]:
    while len(lines) > 1 and lines[1] >= first > 0:
        lines = lines[1:]
    return lines


def mended(
    chains: Sequence[tuple[int, ...]], waits: Iterable[tuple[int, int]], source: str
) -> list[tuple[int, ...]]:
    """Return the lines of each instruction with the callers that nvcc has mixed up.

    If an inlined function calls another, nvcc names the same caller for every copy of that call. A
    result is used by the copy that made it, so its caller is that of the awaited instruction.
    chains: from own_lines(). waits: instructions that wait for a result, and the ones that make it.
    """
    ends = [at for at, line in enumerate(source.split("\n"), 1) if line.startswith("}")]
    callers: defaultdict[int, set[int]] = defaultdict(set)
    for chain in chains:
        if len(chain) > 1:
            callers[chain[1]].add(chain[0])
    found = [*chains]
    for place, cause in waits:
        mine, other = chains[place], chains[cause]
        if (
            min(len(mine), len(other)) > 1
            and bisect.bisect(ends, mine[1]) == bisect.bisect(ends, other[1])
            and len(callers[mine[1]]) == 1 < len(callers[other[1]])
        ):
            found[place] = (other[0], *mine[1:])
    return found
