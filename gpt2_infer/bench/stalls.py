"""Stalls by source line: how explanations of a ladder's versions are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec
from tqdm import tqdm

from attention_kernels import AttentionError
from attention_kernels.inspection import explain
from attention_kernels.inspection.explain import Explanation, LineStalls
from attention_kernels.inspection.multiprocessor import gpus
from attention_kernels.inspection.predict import Case
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.prediction import figures_of, find_gpu, prediction_row
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.study import Contender, StallStudy, Subject

_Key = TypeVar("_Key", int, str)
_LEAST = 0.001  # share of the call's stalls from which an instruction is listed
_LEAST_PART = 0.01  # share of a line's stalls from which a reason, or another line, is listed


class Instruction(msgspec.Struct, frozen=True, array_like=True):
    """The stalls of one machine instruction."""

    kernel: int
    """Its kernel's index in Stalls.kernels."""
    address: int
    """Its offset in the kernel in bytes."""
    text: str
    share: float
    """Share of the call's stall cycles."""
    reason: str
    """The main reason."""


class Line(msgspec.Struct, frozen=True):
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
    instructions: list[Instruction]
    """The instructions that stall most, in order."""
    others: int
    """Number of the line's other instructions that stall."""

    @property
    def main(self) -> dict[str, float]:
        """The two main reasons."""
        return dict([*self.reasons.items()][:2])


class WhatIf(msgspec.Struct, frozen=True):
    """The call without one cause of its stalls; see advice.Advice."""

    line: int
    share: float
    reason: str
    change: str
    price: str
    time_us: float


class Stalls(msgspec.Struct, frozen=True):
    """Why a call's warps do not issue, by source line."""

    gpu: str
    time_us: float
    issuing: float
    """Share of the warps' cycles in which they issue; they stall in the others."""
    reasons: dict[str, float]
    """Shares of the stall cycles by reason, the largest first."""
    kernels: list[str]
    lines: list[Line]
    """Lines with stalls, the worst first."""
    what_ifs: list[WhatIf]
    """The largest gain first."""

    def us(self, share: float) -> float:
        """Return the part of the predicted time that warps spend in a share of the stalls."""
        return share * (1 - self.issuing) * self.time_us

    @property
    def times_us(self) -> dict[str, float]:
        """The predicted time, and its parts: issuing, and each reason of a stall."""
        reasons = {reason: self.us(share) for reason, share in self.reasons.items()}
        return {
            "predicted time": self.time_us,
            "issuing": self.issuing * self.time_us,
            **reasons,
        }


def stalls_of(one: Explanation) -> Stalls:
    """Return the part of an explanation that is recorded."""
    kernels = list(dict.fromkeys(code.kernel for code in one.code))
    return Stalls(
        one.prediction.gpu,
        round(one.prediction.time_us, 3),
        _rounded(one.issuing),
        {reason: _rounded(share) for reason, share in one.reasons.items()},
        kernels,
        [_line(line, kernels) for line in one.lines if line.share > 0],
        [
            WhatIf(
                advice.line,
                _rounded(advice.share),
                advice.reason,
                advice.change,
                advice.price,
                round(advice.time_us, 3),
            )
            for advice in one.advice
        ],
    )


def _line(one: LineStalls, kernels: list[str]) -> Line:
    listed = [instruction for instruction in one.instructions if instruction.share >= _LEAST]
    found = (
        Instruction(
            kernels.index(instruction.kernel),
            instruction.address,
            instruction.instruction,
            _rounded(instruction.share),
            next(iter(instruction.reasons)),
        )
        for instruction in listed
    )
    return Line(
        one.line,
        _rounded(one.share),
        _parts(one.reasons, one.share),
        [*one.lines[1:]],
        _parts(one.waits_for, one.share),
        sorted(found, key=lambda instruction: (instruction.kernel, instruction.address)),
        len(one.instructions) - len(listed),
    )


def _parts(found: Mapping[_Key, float], whole: float) -> dict[_Key, float]:
    """Return shares of the call's stalls as shares of the line's, without the smallest."""
    parts = {key: _rounded(share / whole) for key, share in found.items()}
    return {key: part for key, part in parts.items() if part >= _LEAST_PART}


def _rounded(share: float) -> float:
    return round(share, 5)


def explain_version(name: str, version: VersionHeader, cell: KernelCell, *, gpu: str) -> Row:
    """Predict a version in a cell, with its stalls; a refused version has a reason."""
    digest = environment.version_digest(version.source)
    case = Case(cell.batch, cell.seqlen, cell.num_heads, cell.head_dim, is_causal=cell.is_causal)
    try:
        found = explain.explain(version, gpus()[gpu], case)
    except AttentionError as error:
        return prediction_row(name, cell, digest, reason=str(error))
    row = prediction_row(name, cell, digest, **figures_of(found.prediction))
    row.extra["stalls"] = msgspec.to_builtins(stalls_of(found), str_keys=True)
    return row


def recorded(row: Row) -> Stalls | None:
    """Return the stalls in a row; None if it has none."""
    found = row.extra.get("stalls")
    return msgspec.convert(found, Stalls, strict=False) if found else None


class StallsByLine(Subject[KernelCell]):
    """Explains all versions of a ladder; a refused one has a reason."""

    def __init__(self, study: StallStudy) -> None:
        self.gpu, card = study.gpu, find_gpu(study.gpu)
        self.versions = {
            name: version
            for name, version in selection.versions_of(study.family).items()
            if not version.is_host
        }
        cell = KernelCell(
            study.seqlen, study.batch, study.heads, study.head_dim, is_causal=not study.full
        )
        self.cells = [cell]
        self.facts = {"gpu": card.name}

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Yield every version's prediction; each keeps all cores busy."""
        for name, version in tqdm(self.versions.items(), "explaining", unit="", disable=None):
            yield Contender(explain_version(name, version, cell, gpu=self.gpu))
