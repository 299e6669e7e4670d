"""Explain a prediction: how long the warps wait at each source line, and why.

The line of an instruction is the kernel's own: code inlined from a function counts where the kernel
calls it.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from attention_kernels.inspection.sass import stalls
from attention_kernels.inspection.sass.program import Program, find_disassembler
from attention_kernels.inspection.sass.stalls import Stall, StalledInstruction, StalledLine, Stalls
from attention_kernels.inspection.sass.timing import LaunchModel
from attention_kernels.ladder import compilers

_LEAST = 0.001  # share of the call's stalls from which an instruction is listed
_LEAST_PART = 0.01  # share of a line's stalls from which a reason, or another line, is listed
_PART = re.compile(
    r'^\.text\.(?P<kernel>\S+):$|^\s*//## File "(?P<file>.+?)", line (?P<line>\d+)'
    r"|^\s+(?:\{\s+)?/\*[0-9a-f]{4,}\*/\s",
    re.M,
)
Chain: TypeAlias = tuple[int, ...]
"""The lines of an instruction: the kernel's own, then those of functions inlined into it."""
_Key = TypeVar("_Key")


class _Place(NamedTuple):
    """A kind of stall at one instruction, and its share of the call's cycles."""

    kernel: int
    address: int
    text: str
    chain: Chain
    reason: str
    awaited: int | None
    share: float


def explain(
    program: Program,
    cubin: Path,
    launches: Sequence[tuple[LaunchModel, float, dict[Stall, float]]],
    time_us: float,
) -> Stalls:
    """Explain the launches of a call. cubin: has a line table, or all lines are 0.

    launches: each with its part of the time and the warp-cycles by stall.
    """
    table = _line_table(cubin)
    kernels = list(dict.fromkeys(model.launch.kernel for model, *_ in launches))
    places: list[_Place] = []
    text: list[str] = []
    for model, weight, cycles in launches:
        frames = table.get(model.launch.symbol, [])
        if len(frames) != len(model.code):
            differ = f"nvdisasm and cuobjdump differ in the code of {model.launch.symbol}"
            raise compilers.BuildError(differ)
        # The cached machine code may name the same file in another checkout.
        path = next((Path(lines[0][0]) for lines in frames if lines), Path())
        path = program.path if path.name == program.path.name else path
        text = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
        waits = (x for x in sorted(cycles, key=cycles.__getitem__) if x.reason != stalls.BARRIER)
        chains = mended(own_lines(frames, path.name), waits, text)
        counted = {stall: n for stall, n in cycles.items() if stall.reason != stalls.EXITED}
        scale = weight / (sum(counted.values()) or 1.0)
        for (at, reason, cause), n in counted.items():
            one = model.code[at]
            words = f"@{one.guard} " * bool(one.guard) + f"{one.name} {', '.join(one.operands)}"
            kernel, own = kernels.index(model.launch.kernel), chains[at] or (0,)
            awaited = None if cause == at else (chains[cause] or (0,))[0]
            place = kernel, 16 * at, words.strip(), own, reason, awaited, n * scale
            places.append(_Place(*place))
    whole = sum(place.share for place in places) or 1.0
    stalled = [place for place in places if place.reason != stalls.SELECTED]
    total = sum(place.share for place in stalled) or 1.0
    stalled = [place._replace(share=place.share / total) for place in stalled]
    by_line: defaultdict[int, list[_Place]] = defaultdict(list)
    for place in stalled:
        by_line[place.chain[0]].append(place)
    lines = [_line(line, mine, text) for line, mine in by_line.items()]
    return Stalls(
        model.gpu.name,
        round(time_us, 3),
        round(1 - total / whole, 5),
        _shares((place.reason, place.share) for place in stalled),
        kernels,
        sorted((line for line in lines if line.share > 0), key=lambda line: -line.share),
    )


def _line(line: int, places: Sequence[_Place], text: Sequence[str]) -> StalledLine:
    share = sum(place.share for place in places)
    through = next(iter(_shares((place.chain, place.share) for place in places)))
    parts = [place._replace(share=place.share / (share or 1.0)) for place in places]
    awaited = ((place.awaited, place.share) for place in parts if place.awaited is not None)
    by_instruction: defaultdict[tuple[int, int, str], list[_Place]] = defaultdict(list)
    for place in places:
        by_instruction[place[:3]].append(place)
    instructions = []
    for one, mine in sorted(by_instruction.items()):
        reasons = _shares((place.reason, place.share) for place in mine)
        if (total := sum(place.share for place in mine)) >= _LEAST:
            instructions.append(StalledInstruction(*one, round(total, 5), next(iter(reasons))))
    return StalledLine(
        line,
        round(share, 5),
        _shares(((place.reason, place.share) for place in parts), _LEAST_PART),
        [*through[1:]],
        _shares(awaited, _LEAST_PART),
        instructions,
        len(by_instruction) - len(instructions),
        text[line - 1].strip() if 0 < line <= len(text) else "",
    )


def _shares(found: Iterable[tuple[_Key, float]], least: float = 0.0) -> dict[_Key, float]:
    """Add up shares by key; return the largest first, without those that are too small."""
    total: defaultdict[_Key, float] = defaultdict(float)
    for key, share in found:
        total[key] += share
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {key: round(share, 5) for key, share in ordered if share >= least}


# ---- The line table of nvcc -lineinfo ------------------------------------------------------------


def _line_table(cubin: Path) -> dict[str, list[list[tuple[str, int]]]]:
    command = [find_disassembler("nvdisasm"), "-gi", "-c", str(cubin)]
    return parse(compilers.output_of(command))


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
            if found and found[-1] is frames:  # they have been those of an instruction
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
    found = [
        tuple(line for file, line in frames if Path(file).name == name) for frames in instructions
    ]
    first = found[0][0] if found and found[0] else 0
    return [_from_kernel(lines, first) for lines in found]


def _from_kernel(lines: Chain, first: int) -> Chain:
    while len(lines) > 1 and lines[1] >= first > 0:
        lines = lines[1:]
    return lines


def mended(chains: Sequence[Chain], waits: Iterable[Stall], text: Sequence[str]) -> list[Chain]:
    """Return the lines of each instruction with the callers that nvcc has mixed up.

    If an inlined function calls another, nvcc names the same caller for every copy of that call. A
    result is used by the copy that made it, so its caller is that of the awaited instruction.
    chains: from own_lines(). waits: for results.
    """
    ends = [at for at, line in enumerate(text, 1) if line.startswith("}")]
    callers: defaultdict[int, set[int]] = defaultdict(set)
    for chain in chains:
        if len(chain) > 1:
            callers[chain[1]].add(chain[0])
    found = [*chains]
    for place, _, cause in waits:
        mine, other = chains[place], chains[cause]
        if (
            min(len(mine), len(other)) > 1
            and bisect.bisect(ends, mine[1]) == bisect.bisect(ends, other[1])
            and len(callers[mine[1]]) == 1 < len(callers[other[1]])
        ):
            found[place] = (other[0], *mine[1:])
    return found
