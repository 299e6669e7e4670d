"""What a page shows of results: charts of kernels, and the tables of any file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from gpt2_infer.bench.report import svg
from gpt2_infer.bench.results import KernelSeries, KernelTiming, Provenance, Results
from gpt2_infer.bench.tables import ROOFS, Table, detail_seqlen, group_by, tables

_SHADES = 9
_OTHERS = 6


@dataclass(frozen=True)
class Chart:
    """A picture and the same in figures."""

    title: str
    drawing: Markup
    table: Table | None
    """None where the file's own table has its figures."""
    words: tuple[str, ...] = ()
    """What else there is to say, a sentence each."""


@dataclass(frozen=True)
class Bars:
    """Figures with a bar each."""

    title: str
    rows: Sequence[tuple[str, str, Markup, str]]
    """Name, figure, bar, and what else there is to say of it."""
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class File:
    """A results file on the page."""

    path: Path
    results: Results

    @property
    def slug(self) -> str:
        """The name in an address of the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.path.stem.lower())

    @property
    def tables(self) -> list[Table]:
        """The tables that the documents show, too."""
        return tables(self.path.name, self.results)

    @property
    def charts(self) -> list[Chart | Bars]:
        """The charts of each shape; none for what is not a timing of kernels."""
        if not isinstance(self.results, KernelTiming):
            return []
        limits = self.results.provenance.limits
        groups = group_by(self.results.series, lambda one: one.cell.shape).values()
        return [chart for group in groups for chart in _charts(group, limits)]

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """Where the results come from."""
        return _facts(self.results.provenance)


def _charts(group: list[KernelSeries], limits: dict[str, float]) -> list[Chart | Bars]:
    timed = [one for one in group if one.samples]
    if not timed:
        return []
    chosen = detail_seqlen({one.cell.seqlen for one in timed})
    at = [one for one in group if one.cell.seqlen == chosen]
    looks = _looks(group)
    drawn = [_error(at, looks), _lengths(timed, looks), _roofline(timed, limits, looks)]
    return [_ladder(at, looks), *(chart for chart in drawn if chart)]


def _looks(group: Sequence[KernelSeries]) -> dict[str, str]:
    """Return the class of each backend: shades for the rungs of a ladder, or a colour."""
    names = list(dict.fromkeys(one.name for one in group))
    rungs = [name for name in names if re.search(r"_\d+$", name)]
    shades = {n: f"r{(_SHADES - 1) * i // max(len(rungs) - 1, 1)}" for i, n in enumerate(rungs)}
    others = [name for name in names if name not in shades]
    return shades | {name: f"o{i % _OTHERS}" for i, name in enumerate(others)}


def _ladder(at: Sequence[KernelSeries], looks: dict[str, str]) -> Bars:
    most = max((one.spread[1] for one in at if one.samples), default=1.0)
    rows = [
        (
            one.name,
            f"{one.median:,.1f}" if one.samples else f"\u2715 {one.status}",
            svg.bar(looks[one.name], one.median, most, one.spread) if one.samples else Markup(),
            one.change or one.precision,
        )
        for one in at
    ]
    untimed = (f"\u2715 {s.name} {s.status}: {s.reason.rstrip('.')}." for s in at if not s.samples)
    return Bars(
        f"Microseconds of the kernel alone, least, median and most, {at[0].cell}", rows, (*untimed,)
    )


def _error(at: Sequence[KernelSeries], looks: dict[str, str]) -> Chart | None:
    """Chart each error as a part of its budget, the row's where the file has it, over the time."""
    rows = []
    for one in at:
        if (check := one.check) is None:
            continue
        by_row = check.row_error is not None
        error = check.row_error if by_row else check.error
        budget = check.row_budget if by_row else check.budget
        if error and budget:
            rows.append((one, error, budget))
    drawn = [(one, error / budget) for one, error, budget in rows if one.samples]
    if len(drawn) < 2:
        return None
    marks = [svg.Mark(one.name, looks[one.name], [(one.median, part)]) for one, part in drawn]
    xs = svg.around(one.median for one, _ in drawn)
    ys = svg.around([1.0, *(part for _, part in drawn)], 1.6)
    axes = svg.Axes(xs, ys, ("microseconds", "error, as a part of its budget"))
    title = f"Error against speed, {at[0].cell}"
    cells = [
        (
            f"`{one.name}`",
            one.precision,
            f"{one.median:.1f}" if one.samples else one.status,
            f"{error:.2e}",
            f"{budget:.2e}",
            f"{error / budget:.2f}",
        )
        for one, error, budget in rows
    ]
    head = ["backend", "precision", "us", "error", "budget", "error / budget"]
    failed = tuple(
        f"\u2715 {s.name} failed: {s.reason.rstrip('.')}." for s in at if s.status == "failed"
    )
    drawing = axes.draw(marks, title, axes.rules({"budget: above it a kernel fails": 1}))
    return Chart(title, drawing, Table(title, head, cells, {}), failed)


def _lengths(timed: Sequence[KernelSeries], looks: dict[str, str]) -> Chart | None:
    lengths = sorted({one.cell.seqlen for one in timed})
    if len(lengths) < 2:
        return None
    marks = [
        svg.Mark(name, looks[name], sorted((float(one.cell.seqlen), one.median) for one in mine))
        for name, mine in group_by(timed, lambda one: one.name).items()
    ]
    ys = svg.around(y for mark in marks for _, y in mark.points)
    xs = svg.around(map(float, lengths), 1.1)
    axes = svg.Axes(xs, ys, ("seqlen", "microseconds"), lengths)
    title = f"Time by length, {timed[0].cell.shape}"
    return Chart(title, axes.draw(marks, title), None)


def _roofline(
    timed: Sequence[KernelSeries], limits: dict[str, float], looks: dict[str, str]
) -> Chart | None:
    """Chart TFLOP/s over arithmetic intensity, below what the GPU reached in the same run."""
    dtype = timed[0].cell.dtype
    roofs = {f"8192\u00b3 matmul, {dtype}": limits.get(f"matmul_{dtype}_tflops", 0.0)}
    roofs |= {words: limits.get(name, 0.0) / n for words, name, n in ROOFS.get(dtype, ())}
    roofs = {words: roof for words, roof in roofs.items() if roof}
    copy = limits.get("copy_gbps")
    if not roofs or not copy:
        return None
    highest = max(roofs.values())

    def intensity(one: KernelSeries) -> float:
        return one.cell.flops / one.cell.min_bytes

    def reached(one: KernelSeries) -> float:
        return one.cell.flops / one.median / 1e6

    marks = [
        svg.Mark(name, looks[name], sorted((intensity(one), reached(one)) for one in mine))
        for name, mine in group_by(timed, lambda one: one.name).items()
    ]
    low, high = svg.around([*map(intensity, timed), 1e3 * highest / copy], 1.3)
    bottom = min(map(reached, timed)) / 1.5
    axes = svg.Axes(
        (low, high), (bottom, 1.5 * highest), ("FLOP per byte of q, k, v and o", "TFLOP/s")
    )
    start = max(low, 1e3 * bottom / copy)
    slope = (
        f'<path class="limit" d="M{axes.x(start):.1f} {axes.y(start * copy / 1e3):.1f}'
        f'L{axes.x(1e3 * highest / copy):.1f} {axes.y(highest):.1f}"/>'
    )
    rules = axes.rules({f"{words}: {roof:.0f} TFLOP/s": roof for words, roof in roofs.items()})
    title = f"Roofline, {timed[0].cell.shape}; a copy reached {copy:,.0f} GB/s in this run"
    flagged = []
    for one in timed:
        floor = max(one.cell.flops / highest / 1e6, one.cell.min_bytes / copy / 1e3)
        beneath = sum(sample < floor for sample in one.samples)
        if beneath:
            flagged.append(
                f"\u2691 {one.name}, N={one.cell.seqlen}: {beneath} of {len(one.samples)} samples "
                f"are beneath {floor:.2f} us, which copy and roofs allow."
            )
    lengths = sorted({one.cell.seqlen for one in timed})
    by_name = group_by(timed, lambda one: one.name)
    cells = []
    for name, mine in by_name.items():
        speeds = {one.cell.seqlen: f"{reached(one):.3g}" for one in mine}
        cells.append((f"`{name}`", *(speeds.get(n, "") for n in lengths)))
    at = {one.cell.seqlen: intensity(one) for one in timed}
    head = ["TFLOP/s of", *(f"N={n}, {at[n]:.3g} FLOP/byte" for n in lengths)]
    words = tuple(flagged) or ("No sample is beneath what copy and roofs allow.",)
    return Chart(
        title, axes.draw(marks, title, [slope, *rules]), Table(title, head, cells, {}), words
    )


def _facts(found: Provenance) -> list[tuple[str, str]]:
    facts = {
        "date": found.date,
        "command": found.command,
        "commit": found.commit or "unknown",
        "source digest": found.source_digest,
        "machine": found.machine,
        "driver": found.gpu.driver_version if found.gpu else None,
        "CUDA": found.gpu.cuda if found.gpu else None,
        "Python": found.python,
        "packages": ", ".join(f"{name} {v}" for name, v in found.packages.items()),
        "precision": ", ".join(f"{name} {value}" for name, value in found.precision.items()),
        "limits": ", ".join(f"{name} {value:g}" for name, value in found.limits.items()),
    }
    return [(name, text) for name, text in facts.items() if text]
