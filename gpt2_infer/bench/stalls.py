"""Predicted stalls by source line, and what-ifs, as they are recorded."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from attention_kernels import AttentionError
from attention_kernels.inspection import nsight
from attention_kernels.inspection.advice import Advice
from attention_kernels.inspection.explain import Explanation, LineStalls
from attention_kernels.inspection.gpus import gpus
from attention_kernels.inspection.nsight import Comparison, Sampled
from attention_kernels.inspection.predictors import predictor_of
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import (
    case_of,
    figures_of,
    find_gpu,
    predicted_in,
    prediction_row,
)
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.study import Contender, StallStudy, Subject
from gpt2_infer.errors import RequestError

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

    def us(self, share: float) -> float:
        """Return the part of the predicted time that warps spend in a share of the stalls."""
        return share * (1 - self.issuing) * self.time_us


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


def _fields(one: Advice) -> dict[str, Any]:
    fields = dataclasses.asdict(one)
    return {
        k: _rounded(value) if isinstance(value, float) else value for k, value in fields.items()
    }


def explain_backend(
    name: str,
    version: VersionHeader | None,
    cell: KernelCell,
    *,
    gpu: str,
    kernels: Sequence[Sampled] = (),
) -> tuple[Row, Comparison | None]:
    """Predict a backend in a cell, with its stalls and what-ifs; a refused one has a reason.

    kernels: of a report, to compare the stalls with.
    """
    digest = environment.version_digest(version.source) if version else None
    try:
        found = predictor_of(name, version, cell.dtype).explain(gpus()[gpu], case_of(cell))
        compared = nsight.compare(found, kernels) if kernels else None
    except AttentionError as error:
        return prediction_row(name, cell, digest, reason=str(error)), None
    row = prediction_row(name, cell, digest, **figures_of(found.prediction))
    row.extra["stalls"] = msgspec.to_builtins(stalls_of(found), str_keys=True)
    row.extra["what_ifs"] = [*map(_fields, found.advice)]
    return row, compared


def recorded(row: Row) -> Stalls | None:
    """Return the stalls in a row; None if it has none."""
    found = row.extra.get("stalls")
    return msgspec.convert(found, Stalls, strict=False) if found else None


def what_ifs(row: Row) -> list[Advice]:
    """Return the what-ifs in a row, the largest gain first."""
    return msgspec.convert(row.extra.get("what_ifs", []), list[Advice])


def read_report(path: Path) -> list[Sampled]:
    """Return the kernels of a source page that ncu exported as CSV; raises RequestError."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
            found = nsight.parse(file)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from error
    if not found:
        wanted = "the CSV that `ncu --import REPORT --page source --csv` prints"
        raise RequestError(f"{path} is not {wanted}")
    return found


class StallsByLine(Subject[KernelCell]):
    """Explains a ladder; a version that cannot be predicted has a reason."""

    def __init__(self, study: StallStudy) -> None:
        self.gpu, card = study.gpu, find_gpu(study.gpu)
        self.versions = predicted_in(study.family)
        shape = study.seqlen, study.batch, study.heads, study.head_dim
        self.dtypes = {k: x.dtypes[0] if x else "float32" for k, x in self.versions.items()}
        self.cells = [
            KernelCell(*shape, dtype, is_causal=not study.full)
            for dtype in dict.fromkeys(self.dtypes.values())
        ]
        self.facts = {"gpu": card.name}

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Yield the prediction of each version in that dtype; each keeps all cores busy."""
        names = [name for name, dtype in self.dtypes.items() if dtype == cell.dtype]
        for name in tqdm(names, "explaining", unit="", disable=None):
            row, _ = explain_backend(name, self.versions[name], cell, gpu=self.gpu)
            yield Contender(row)
