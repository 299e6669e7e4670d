"""Explain a prediction: the stalls of each source line, and what the call would gain without them.

The line of an instruction is the kernel's own: code inlined from a function counts where the kernel
calls it. advice.py simulates the call again without one cause at a time.
"""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from attention_kernels.inspection import line_table, predict
from attention_kernels.inspection.advice import Advice, Call, Place, advise
from attention_kernels.inspection.gpus import GpuModel
from attention_kernels.inspection.predict import Case, LaunchModel, Prediction
from attention_kernels.inspection.program import Program, compile_program, find_disassembler
from attention_kernels.inspection.stalls import BARRIER, EXITED, SELECTED, Watch
from attention_kernels.ladder import compilers
from attention_kernels.ladder.header import VersionHeader

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True)
class InstructionStalls:
    """The stalls of one machine instruction."""

    kernel: str
    address: int
    """Its offset in the kernel in bytes."""
    instruction: str
    lines: tuple[int, ...]
    """Source lines of its call chain, the kernel's own line first; empty if nvcc gives none."""
    share: float
    """Share of the call's stall cycles."""
    reasons: dict[str, float]
    """Shares of the call's stall cycles by reason, the largest first."""


@dataclass(frozen=True)
class LineStalls:
    """The stalls of one source line of a kernel; line 0 has the instructions without a line."""

    line: int
    lines: tuple[int, ...]
    """Call chain with most of its stalls, the kernel's own line first."""
    source: str
    share: float
    """Share of the call's stall cycles."""
    reasons: dict[str, float]
    """Shares of the call's stall cycles by reason, the largest first."""
    waits_for: dict[int, float]
    """Shares of the call's stall cycles by the line whose result, or barrier, is awaited."""
    instructions: list[InstructionStalls]


@dataclass(frozen=True)
class KernelCode:
    """The machine instructions of one kernel, and their source lines."""

    kernel: str
    names: list[str]
    """Names without modifiers: "LDS"."""
    lines: list[int]
    """The kernel's own source line of each; 0 if nvcc gives none."""


@dataclass(frozen=True)
class Explanation:
    """A prediction, with stalls by source line and what the call would gain without a cause."""

    prediction: Prediction
    reasons: dict[str, float]
    """Shares of the call's stall cycles by reason, the largest first."""
    issuing: float
    """Warp-cycles in which a warp issues, as a share of all: those and the stalls."""
    lines: list[LineStalls]
    """Lines with stalls, the worst first."""
    advise: Callable[[], list[Advice]]
    """Simulates the call without one cause at a time, which takes as long as all the rest."""
    code: list[KernelCode]
    text: list[str]
    """The lines of the source file, after an empty line 0."""

    @functools.cached_property
    def advice(self) -> list[Advice]:
        """What the call would gain without one cause, the largest gain first."""
        return self.advise()


def explain(version: VersionHeader, gpu: GpuModel, case: Case) -> Explanation:
    """Predict one call of a version and explain it; raises the errors of predict()."""
    version = predict.checked(version, gpu, [case])
    bar = tqdm(total=2, desc="compiling", unit="", disable=None, leave=False)
    with bar, tempfile.TemporaryDirectory() as folder:
        # The line table leaves the code as it is: test_explain.py compares them.
        program = compile_program(version, gpu, Path(folder), "-lineinfo")
        table = _line_table(program, Path(folder) / "kernel.cubin")
        bar.set_description("executing blocks")
        bar.update()
        models = predict.models_of(program, case)
    frames = {
        symbol: line_table.own_lines(instructions, program.path)
        for symbol, instructions in table.items()
    }
    return _explained(models, case, frames, version.source)


def explain_launch(program: Program, model: LaunchModel, case: Case, cubin: Path) -> Explanation:
    """Explain one launch. Its lines are those of the file in the cubin's line table, if any."""
    symbol = model.launch.symbol
    instructions = _line_table(program, cubin)[symbol]
    path = next((Path(frames[0][0]) for frames in instructions if frames), None)
    if path and path.name == program.path.name:
        path = program.path  # machine code from Triton's cache may name another checkout
    frames = {symbol: line_table.own_lines(instructions, path or program.path)}
    source = path.read_text("utf-8", "replace") if path and path.is_file() else ""
    return _explained([(1, model)], case, frames, source)


def _explained(
    models: Sequence[tuple[int, LaunchModel]],
    case: Case,
    frames: dict[str, list[tuple[int, ...]]],
    source: str,
) -> Explanation:
    each = []
    watches = [Watch() for _ in models]
    pairs = zip(models, watches, strict=True)
    for (count, model), watch in tqdm(
        pairs, "simulating", len(models), unit="", disable=None, leave=False
    ):
        each.append((count, predict.time_of(model, watch)))
        symbol = model.launch.symbol
        waits = [
            (one.place, one.cause)
            for one in sorted(watch.cycles, key=watch.cycles.__getitem__)
            if one.reason != BARRIER
        ]
        frames[symbol] = line_table.mended(frames[symbol], waits, source)
    prediction = predict.sum_of(each, case)
    lines = [[(chain or (0,))[0] for chain in frames[one.launch.symbol]] for _, one in models]
    places = _places(each, watches, lines)
    stalled = [place for place in places if place.reason != SELECTED]
    total = sum(place.share for place in stalled) or 1.0
    shares = [place._replace(share=place.share / total) for place in stalled]
    text = ["", *source.split("\n")]
    return Explanation(
        prediction,
        _by_reason(shares),
        1 - total / (sum(place.share for place in places) or 1.0),
        _lines(text, models, shares, frames),
        functools.partial(advise, Call(case, models, lines, shares), prediction),
        [
            KernelCode(model.launch.kernel, [one.base for one in model.code], of)
            for (_, model), of in zip(models, lines, strict=True)
        ],
        text,
    )


def _line_table(program: Program, cubin: Path) -> dict[str, list[line_table.Frames]]:
    """Return the frames of each kernel's instructions, by symbol."""
    command = [find_disassembler("nvdisasm"), "-gi", "-c", str(cubin)]
    table = line_table.parse(compilers.output_of(command))
    for symbol, code in program.code.items():
        if len(table.get(symbol, ())) != len(code):
            raise compilers.BuildError(f"nvdisasm and cuobjdump differ in the code of {symbol}")
    return table


def _places(
    each: Sequence[tuple[int, Prediction]], watches: Sequence[Watch], lines: Sequence[list[int]]
) -> list[Place]:
    """Return all stalls with lines. A launch weighs as much as its part of the time."""
    found = []
    for number, (watch, of) in enumerate(zip(watches, lines, strict=True)):
        cycles = {stall: n for stall, n in watch.cycles.items() if stall.reason != EXITED}
        count, one = each[number]
        scale = count * (one.time_us - one.launch_us) / (sum(cycles.values()) or 1.0)
        found += [
            Place(number, *stall, of[stall.place], of[stall.cause], n * scale)
            for stall, n in cycles.items()
        ]
    return found


def _by_reason(places: Sequence[Place]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for place in places:
        found[place.reason] += place.share
    return _sorted(found)


def _sorted(found: dict[_Key, float]) -> dict[_Key, float]:
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def source_of(text: Sequence[str], line: int) -> str:
    """Return a line of Explanation.text; empty if the source file is not here."""
    return text[line].strip() if line < len(text) else ""


def _lines(
    text: Sequence[str],
    models: Sequence[tuple[int, LaunchModel]],
    places: Sequence[Place],
    frames: dict[str, list[tuple[int, ...]]],
) -> list[LineStalls]:
    by_line: defaultdict[int, list[Place]] = defaultdict(list)
    for place in places:
        by_line[place.line].append(place)
    found = []
    for line, mine in by_line.items():
        chains: defaultdict[tuple[int, ...], float] = defaultdict(float)
        waits_for: defaultdict[int, float] = defaultdict(float)
        by_instruction: defaultdict[tuple[int, int], list[Place]] = defaultdict(list)
        for place in mine:
            symbol = models[place.launch][1].launch.symbol
            chains[frames[symbol][place.at]] += place.share
            by_instruction[place.launch, place.at].append(place)
            if place.cause != place.at:
                waits_for[place.cause_line] += place.share
        instructions = [
            _instruction(models[launch][1], index, these, frames)
            for (launch, index), these in by_instruction.items()
        ]
        found.append(
            LineStalls(
                line,
                max(chains, key=lambda chain: chains[chain]),
                source_of(text, line),
                sum(place.share for place in mine),
                _by_reason(mine),
                _sorted(waits_for),
                sorted(instructions, key=lambda one: -one.share),
            )
        )
    return sorted(found, key=lambda one: -one.share)


def _instruction(
    model: LaunchModel,
    index: int,
    places: Sequence[Place],
    frames: dict[str, list[tuple[int, ...]]],
) -> InstructionStalls:
    one = model.code[index]
    guard = f"@{one.guard} " if one.guard else ""
    return InstructionStalls(
        model.launch.kernel,
        16 * index,
        f"{guard}{one.name} {', '.join(one.operands)}".strip(),
        frames[model.launch.symbol][index],
        sum(place.share for place in places),
        _by_reason(places),
    )
