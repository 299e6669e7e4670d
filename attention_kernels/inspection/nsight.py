"""Read the warp stalls that Nsight Compute sampled, and put them beside the predicted ones.

    ncu --section SourceCounters --import-source yes -o report ...
    ncu --import report.ncu-rep --page source --csv > report.csv

The file has one part per kernel: a row of column names, then a row per machine instruction.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import stalls
from attention_kernels.inspection.explain import Explanation, source_of

_NAMES = {
    "barrier": stalls.BARRIER,
    "branch_resolve": stalls.BRANCH,
    "branch_resolving": stalls.BRANCH,
    "dispatch": stalls.DISPATCH,
    "dispatch_stall": stalls.DISPATCH,
    "lg": stalls.LG,
    "lg_throttle": stalls.LG,
    "long_sb": stalls.LONG,
    "long_scoreboard": stalls.LONG,
    "math": stalls.MATH,
    "math_pipe_throttle": stalls.MATH,
    "mio": stalls.MIO,
    "mio_throttle": stalls.MIO,
    "no_inst": stalls.FETCH,
    "no_instructions": stalls.FETCH,
    "short_sb": stalls.SHORT,
    "short_scoreboard": stalls.SHORT,
}
_PREFIXES = ("stall_", "smsp__pcsamp_warps_issue_stalled_")
# Of the samples in the column before it, those in whose cycle the scheduler issued nothing.
_SUBSETS = (" (Not Issued)", "_not_issued")
WORST = 10  # lines whose reasons are compared


@dataclass(frozen=True)
class Sampled:
    """The samples of one kernel, by instruction."""

    names: list[str]
    """Names without modifiers: "LDS"."""
    samples: list[dict[str, float]]
    """Samples by reason, "selected" among them."""


@dataclass(frozen=True)
class ComparedLine:
    """The measured and the predicted stalls of one source line."""

    line: int
    source: str
    measured: float
    """Share of the call's stall samples."""
    predicted: float
    """Share of the call's stall cycles."""
    measured_reason: str
    predicted_reason: str


@dataclass(frozen=True)
class Comparison:
    """Measured and predicted stalls, line by line."""

    lines: list[ComparedLine]
    """Lines with stalls, by measured share, the worst first."""
    samples: int
    """Number of samples of stalls in the report."""
    rank_correlation: float | None
    """Spearman's, over all lines; null if they do not differ."""
    worst: int
    """Number of worst lines that are looked for: five, or all with samples."""
    worst_found: int
    """Number of those that are predicted to be among the five worst."""
    reasons: int
    """Number of worst lines whose main reasons are compared: ten, or all with samples."""
    reasons_equal: int
    """Number of those whose main reason is the predicted one."""

    def __str__(self) -> str:
        correlation = self.rank_correlation
        ranks = "" if correlation is None else f"rank correlation of all lines {correlation:.2f}; "
        return (
            f"{ranks}{self.worst_found} of the {self.worst} worst lines found; the main reason "
            f"agrees in {self.reasons_equal} of the worst {self.reasons}"
        )


def parse(lines: Iterable[str]) -> list[Sampled]:
    """Return the kernels of a source page that ncu exported as CSV."""
    found: list[Sampled] = []
    header: list[str] = []
    reasons: dict[str, str] = {}  # by column
    for row in csv.reader(lines):
        if "Source" in row and "Address" in row:
            header = row
            reasons = {column: reason for column in row if (reason := _reason(column))}
            found.append(Sampled([], []))
        elif found and len(row) == len(header):
            cells = dict(zip(header, row, strict=True))
            words = [word for word in cells["Source"].split() if word[0] not in "@{"]
            counts = {why: n for column, why in reasons.items() if (n := _number(cells[column]))}
            found[-1].names.append(words[0].split(".")[0].rstrip(";") if words else "")
            found[-1].samples.append(counts)
    return found


def _reason(column: str) -> str | None:
    """Return the reason that a column counts samples of, if any."""
    for prefix in _PREFIXES:
        if column.startswith(prefix) and not column.endswith(_SUBSETS):
            name = column.removeprefix(prefix)
            return _NAMES.get(name, name.replace("_", " "))
    return None


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def compare(one: Explanation, kernels: Sequence[Sampled]) -> Comparison:
    """Compare the kernels of a report with a prediction.

    Raises UnsupportedError if the report lacks a kernel of the call, or has other machine code.
    """
    measured: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for code in one.code:
        same = [sampled for sampled in kernels if _trim(sampled.names) == _trim(code.names)]
        if not same:
            reason = f"no kernel in the report has the machine code of {code.kernel}"
            raise UnsupportedError(one.prediction.version, [reason])
        for line, samples in zip(code.lines, same[0].samples, strict=False):
            for reason, count in samples.items():
                if reason != stalls.SELECTED:
                    measured[line][reason] += count
    total = sum(sum(reasons.values()) for reasons in measured.values())
    if not total:
        reason = "the report has no samples of warp stalls: profile with --section SourceCounters"
        raise UnsupportedError(one.prediction.version, [reason])
    predicted = {line.line: line for line in one.lines}
    found = []
    for line in {*measured, *predicted}:
        mine, reasons = predicted.get(line), measured[line]
        found.append(
            ComparedLine(
                line,
                source_of(one.text, line),
                sum(reasons.values()) / total,
                mine.share if mine else 0.0,
                max(reasons, key=lambda name: reasons[name], default=""),
                next(iter(mine.reasons), "") if mine else "",
            )
        )
    found.sort(key=lambda compared: (-compared.measured, -compared.predicted, compared.line))
    worst = [compared for compared in found if compared.measured][:WORST]
    five = {line.line for line in one.lines[:5]}
    return Comparison(
        found,
        round(total),
        _rank_correlation(found),
        min(5, len(worst)),
        sum(compared.line in five for compared in worst[:5]),
        len(worst),
        sum(x.measured_reason == x.predicted_reason for x in worst),
    )


def _trim(names: Sequence[str]) -> list[str]:
    """Return the instructions without the NOPs behind them."""
    end = len(names)
    while end and names[end - 1] == "NOP":
        end -= 1
    return [*names[:end]]


def _rank_correlation(found: Sequence[ComparedLine]) -> float | None:
    measured = _ranks([compared.measured for compared in found])
    predicted = _ranks([compared.predicted for compared in found])
    if len({*measured}) < 2 or len({*predicted}) < 2:
        return None
    return statistics.correlation(measured, predicted)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    below = [sum(x < value for x in values) for value in values]
    return [n + values.count(value) / 2 for n, value in zip(below, values, strict=True)]
