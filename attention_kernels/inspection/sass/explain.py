"""Explain a prediction: how long the warps wait at each source line, and why.

The line of an instruction is the kernel's own: code inlined from a function counts where the kernel
calls it. If an inlined function calls another, nvcc names the same caller for every copy of that
call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from attention_kernels.inspection.resources import Launch
from attention_kernels.inspection.sass.decode import Program, find_disassembler
from attention_kernels.inspection.sass.time import EXITED, SELECTED, Stall
from attention_kernels.ladder import compilers

_LEAST = 0.01  # share of a line's stalls from which a reason, or another line, is listed
_PART = re.compile(
    r'^\.text\.(?P<kernel>\S+):$|^\s*//## File "(?P<file>.+?)", line (?P<line>\d+)'
    r"|^\s+(?:\{\s+)?/\*[0-9a-f]{4,}\*/\s",
    re.M,
)
Chain: TypeAlias = tuple[int, ...]
"""The lines of an instruction: the kernel's own, then those of functions inlined into it."""


@dataclass(frozen=True)
class StalledLine:
    """The stalls of one source line; line 0 has the instructions without a line."""

    line: int
    share: float
    """Share of the call's stall cycles."""
    reasons: dict[str, float]
    """Shares of the line's stalls, the largest first."""
    through: list[int]
    """The inlined lines that stall most, if the line calls a function."""
    waits_for: dict[int, float]
    """Shares of the line's stalls, by the line whose result is awaited."""
    source: str


@dataclass(frozen=True)
class Stalls:
    """Why a call's warps do not issue, by source line."""

    gpu: str
    time_us: float
    issuing: float
    """Share of the warps' cycles in which they issue; they stall in the others."""
    reasons: dict[str, float]
    """Shares of the stall cycles by reason, the largest first."""
    lines: list[StalledLine]
    """Lines with stalls, the worst first."""

    def us(self, share: float) -> float:
        """Return the part of the predicted time that warps spend in a share of the stalls."""
        return share * (1 - self.issuing) * self.time_us


class _Place(NamedTuple):
    """A kind of stall in one line."""

    chain: Chain
    reason: str
    awaited: int | None
    """The line whose result is awaited."""


def explain(
    program: Program, launches: Sequence[tuple[Launch, float, dict[Stall, float]]], time_us: float
) -> Stalls:
    """Explain the launches of a call. Without a line table in the cubin, all lines are 0.

    launches: each with its part of the time and the warp-cycles by stall.
    """
    table = line_table(program.cubin)
    places: defaultdict[_Place, float] = defaultdict(float)
    text: list[str] = []
    for launch, weight, cycles in launches:
        frames = table.get(launch.symbol, [])
        # The cached machine code may name the same file in another checkout. The copies of an
        # Entry have no line.
        path = next((Path(lines[0][0]) for lines in frames if lines), Path())
        path = program.path if path.name in (program.path.name, "adapter.cuh") else path
        text = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
        chains = own_lines(frames, path.name)
        counted = {stall: n for stall, n in cycles.items() if stall.reason != EXITED}
        scale = weight / (sum(counted.values()) or 1.0)
        for (at, reason, cause), n in counted.items():
            awaited = None if cause == at else (chains[cause] or (0,))[0]
            places[_Place(chains[at] or (0,), reason, awaited)] += n * scale
    whole = sum(places.values()) or 1.0
    stalled = {place: n for place, n in places.items() if place.reason != SELECTED}
    total = sum(stalled.values()) or 1.0
    by_line: defaultdict[int, dict[_Place, float]] = defaultdict(dict)
    for place, n in stalled.items():
        by_line[place.chain[0]][place] = n / total
    lines = [_line(line, mine, text) for line, mine in by_line.items()]
    worst = sorted((line for line in lines if line.share > 0), key=lambda line: -line.share)
    shares, issuing = _shares(stalled, "reason", total), round(1 - total / whole, 5)
    return Stalls(program.gpu.name, round(time_us, 3), issuing, shares, worst)


def _line(line: int, places: dict[_Place, float], text: Sequence[str]) -> StalledLine:
    share = sum(places.values())
    through, *_ = _shares(places, "chain")
    awaited = _shares(places, "awaited", share or 1.0, _LEAST)
    awaited.pop(None, None)
    reasons = _shares(places, "reason", share or 1.0, _LEAST)
    source = text[line - 1].strip() if 0 < line <= len(text) else ""
    return StalledLine(line, round(share, 5), reasons, [*through[1:]], awaited, source)


def _shares(
    places: dict[_Place, float], name: str, whole: float = 1.0, least: float = 0.0
) -> dict[Any, float]:
    """Add up shares of a whole by a field of the places: the largest first, without small ones."""
    total: defaultdict[Any, float] = defaultdict(float)
    for place, n in places.items():
        total[getattr(place, name)] += n / whole
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {key: round(share, 5) for key, share in ordered if share >= least}


# ---- The line table of nvcc -lineinfo ------------------------------------------------------------


def line_table(cubin: Path) -> dict[str, list[list[tuple[str, int]]]]:
    """Return parse() of a cubin; raises BuildError."""
    return parse(compilers.output_of([find_disassembler("nvdisasm"), "-gi", "-c", str(cubin)]))


def parse(text: str) -> dict[str, list[list[tuple[str, int]]]]:
    """Return file and line of each kernel's instructions in the output of `nvdisasm -gi`.

    Callers come before the code inlined into them. An instruction without a line, such as one of a
    division, has none.
    """
    kernels: dict[str, list[list[tuple[str, int]]]] = {}
    found: list[list[tuple[str, int]]] = []
    frames: list[tuple[str, int]] = []
    for part in _PART.finditer(text):
        if part["kernel"]:
            found, frames = kernels.setdefault(part["kernel"], []), []
        elif part["file"]:
            if found and found[-1] is frames:  # an instruction has had them
                frames = []
            frames.insert(0, (part["file"], int(part["line"])))
        else:
            found.append(frames)
    return kernels


def own_lines(instructions: Iterable[Iterable[tuple[str, int]]], name: str) -> list[Chain]:
    """Return each instruction's lines in a file.

    A lambda in the kernel is the kernel's own code. The first instruction is on the kernel's first
    line; functions that it calls are above it.
    """
    found = [tuple(x for file, x in some if Path(file).name == name) for some in instructions]
    first = found[0][0] if found and found[0] else 0
    for at, lines in enumerate(found):
        inner = lines
        while len(inner) > 1 and inner[1] >= first > 0:
            inner = inner[1:]
        found[at] = inner
    return found
