"""Timing contenders cell by cell, in interleaved rounds, so that an interrupted run can go on.

Samples are taken A B C A B C: a drift of the machine reaches every contender alike. Nothing is
written between two samples; a finished cell is one JSON line in a file beside the output.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from tqdm import tqdm

from gpt2_infer.bench.results import Provenance, ResultsError, Sampled

MIN_ROUNDS = 2  # one sample has no spread
Figure = TypeVar("Figure")
Cell = TypeVar("Cell", bound=msgspec.Struct)
SeriesType = TypeVar("SeriesType", bound=Sampled)


class RejectedError(Exception):
    """A contender's output was wrong: it gets no figure and does not run again."""


@dataclass
class Contender(Generic[SeriesType]):
    """Something to time in a cell."""

    series: SeriesType
    sample: Callable[[], Mapping[str, float]] | None = None
    """Take one sample of each of these fields of the series; None if it is not to be timed.

    May raise RejectedError.
    """
    recheck: Callable[[], None] | None = None
    """Check the output once more when all samples are taken; may raise RejectedError."""


def interleave(
    runs: Mapping[str, Callable[[], Figure]],
    *,
    rounds: int,
    warm_up: int = 1,
    on_round: Callable[[int], None] = lambda _: None,
) -> dict[str, list[Figure] | RejectedError]:
    """Run each in turn, `rounds` times after `warm_up` rounds that are not kept.

    Returns the figures of each run, or the RejectedError that it raised. on_round(index) is called
    before each round.
    """
    figures: dict[str, list[Figure]] = {name: [] for name in runs}
    rejected: dict[str, RejectedError] = {}
    for index in range(-warm_up, rounds):
        on_round(index)
        for name, run in runs.items():
            if name in rejected:
                continue
            try:
                figure = run()
            except RejectedError as error:
                rejected[name] = error
            else:
                if index >= 0:
                    figures[name].append(figure)
    return {**figures, **rejected}


def time_cells(
    cells: Sequence[Cell],
    contenders: Callable[[Cell], Iterable[Contender[SeriesType]]],
    *,
    rounds: int,
    progress: Progress[SeriesType],
) -> list[SeriesType]:
    """Check and time the contenders of each cell, except in cells that `progress` has already."""
    with tqdm(total=len(cells), unit="cell", disable=None) as bar:
        for cell in cells:
            bar.set_description(str(cell))
            if str(cell) not in progress.cells:
                progress.add(cell, _time_cell(contenders(cell), rounds, bar))
            bar.update()
    return [series for cell in cells for series in progress.cells[str(cell)]]


def _time_cell(
    contenders: Iterable[Contender[SeriesType]], rounds: int, bar: tqdm[Any]
) -> list[SeriesType]:
    timed = {}
    bar.set_postfix_str("checking")
    for contender in contenders:
        timed[contender.series.name] = contender
        bar.set_postfix_str(f"{contender.series.name}: {contender.series.status}")
    outcomes = interleave(
        {name: contender.sample for name, contender in timed.items() if contender.sample},
        rounds=rounds,
        on_round=lambda index: bar.set_postfix_str(f"round {index + 1} of {rounds}"),
    )
    for contender in timed.values():
        contender.sample = None  # frees its graph's memory before anything is checked again
    for name, outcome in outcomes.items():
        series = timed[name].series
        try:
            if isinstance(outcome, RejectedError):
                raise outcome
            if recheck := timed[name].recheck:
                recheck()
        except RejectedError as error:
            series.status, series.reason = "failed", str(error)
            continue
        for field in outcome[0]:
            setattr(series, field, [float(f"{figures[field]:.6g}") for figures in outcome])
    return [contender.series for contender in timed.values()]


# ---- Going on after an interruption --------------------------------------------------------------


class _Plan(msgspec.Struct):
    """What must be the same for the cells of two runs to belong together."""

    settings: dict[str, Any]
    commit: str | None
    source_digest: str
    sources: dict[str, str | None]
    machine: dict[str, Any]


class Progress(Generic[SeriesType]):
    """The finished cells of a run, one JSON line each in a file beside its output.

    out: None keeps nothing. settings, sources: what is to be run, and a digest of each backend's
    files. Raises ResultsError if the file beside `out` is of another run, or cannot be read.
    """

    def __init__(
        self,
        out: Path | None,
        series_type: type[SeriesType],
        provenance: Provenance,
        settings: Mapping[str, Any],
        sources: Mapping[str, str | None],
    ) -> None:
        self.cells: dict[str, list[SeriesType]] = {}
        self.path = out.with_name(f"{out.name}.partial") if out else None
        self._provenance = provenance
        plan = _Plan(
            settings=msgspec.to_builtins(settings),
            commit=provenance.commit,
            source_digest=provenance.source_digest,
            sources=dict(sources),
            machine={
                "machine": provenance.machine,
                "driver": provenance.gpu.driver_version if provenance.gpu else None,
                "packages": provenance.packages,
                "precision": provenance.precision,
                "build_flags": provenance.build_flags,
            },
        )
        self._header = msgspec.json.encode((provenance.date, plan))
        if self.path and self.path.exists():
            self._read(self.path, plan, series_type)

    def add(self, cell: msgspec.Struct, series: list[SeriesType]) -> None:
        """Keep a finished cell; raises ResultsError if it cannot be written."""
        if self.path:
            line = msgspec.json.encode((str(cell), series))
            try:
                with self.path.open("ab") as file:
                    if file.tell() == 0:
                        file.write(self._header + b"\n")
                    file.write(line + b"\n")
            except OSError as error:
                raise ResultsError(self._not_written(error)) from error
        self.cells[str(cell)] = series

    def remove(self) -> None:
        """Delete the file: the output is written."""
        if self.path:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path, plan: _Plan, series_type: type[SeriesType]) -> None:
        try:
            header, *lines = path.read_bytes().splitlines(keepends=True)
            date, earlier = msgspec.json.decode(header, type=tuple[str, _Plan])
            differ = [
                name
                for name in _Plan.__struct_fields__
                if getattr(earlier, name) != getattr(plan, name)
            ]
            if differ:
                names = ", ".join(name.replace("_", " ") for name in differ)
                raise ResultsError(
                    f"{path} is of another run (its {names} differ): delete it or name another "
                    "output"
                )
            for line in lines:
                if line.endswith(b"\n"):  # a cell that was cut off while written is run again
                    cell, series = msgspec.json.decode(line, type=tuple[str, list[series_type]])  # type: ignore[valid-type]
                    self.cells[cell] = series
        except (OSError, ValueError) as error:
            if isinstance(error, ResultsError):
                raise
            raise ResultsError(f"{path} cannot be read, delete it: {error}") from error
        whole = header + b"".join(line for line in lines if line.endswith(b"\n"))
        path.write_bytes(whole)
        self._provenance.resumed_from = [date]

    def _not_written(self, error: OSError) -> str:
        full = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        kept = "nothing was finished" if not self.cells else f"{len(self.cells)} cells are kept"
        return f"{self.path} cannot be written: {full}; {kept}, and the same command goes on"
