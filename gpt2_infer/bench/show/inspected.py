"""Tables of what is counted or predicted: a profiler's counters, accesses, predictions, stalls."""

from __future__ import annotations

from gpt2_infer.bench.show import columns
from gpt2_infer.bench.show.figures import Value, cell_name, length, shape_of, where
from gpt2_infer.bench.show.pivot import Column, Entry, Layout

LAYOUTS: dict[str, Layout] = {}
"""Layouts by kind of study."""


LAYOUTS["profile"] = Layout(
    title=lambda name, file, block: (
        f"{shape_of(block[0])}, {where(file)}; one profiled call each ({name})"
    ),
    rows=lambda file: file.rows,
    columns=[
        columns.BACKEND,
        Column("{at}", columns.median, "{:,.4g}", over=lambda row: row.metric.replace("_", " ")),
    ],
)


def _shared_kib(line: Entry) -> float:
    return (line.value("shared_bytes") or 0) / 1024


def _shared(line: Entry, kind: str) -> Value:
    """Return the requests and, after a +, the bank conflicts."""
    requests, conflicts, ways = (
        line.value(f"shared_{kind}_{what}") for what in ("requests", "conflicts", "ways")
    )
    return f"{requests:,.0f} + {conflicts:,.0f} ({ways:.0f}-way)" if conflicts else requests


def _sectors(line: Entry, kind: str) -> Value:
    count = line.value(f"global_{kind}_sectors")
    fewest = line.value(f"global_{kind}_fewest_sectors")
    return count if count == fewest else f"{count:,.0f} ({fewest:,.0f} would do)"


def _copies(line: Entry) -> Value:
    copies, sectors = (line.value(f"tma_load_{what}") for what in ("requests", "sectors"))
    return None if copies is None else f"{copies:,.0f}, {sectors:,.0f} sectors"


def _operands(line: Entry) -> Value:
    products, wavefronts = (line.value(f"wgmma_{what}") for what in ("requests", "wavefronts"))
    return None if products is None else f"{products:,.0f} products, {wavefronts:,.0f} wavefronts"


LAYOUTS["inspection"] = Layout(
    title=lambda name, file, block: (
        f"{shape_of(block[0])}; nvcc {file.study['nvcc']} for sm_{file.study['arch']}, accesses "
        f"counted in the source ({name}). Bank conflicts follow the +"
    ),
    rows=lambda file: file.rows,
    keeps=lambda line: line.value("registers") is not None,
    columns=[
        columns.BACKEND,
        Column("registers", lambda line: line.value("registers"), "{:.0f}"),
        Column("spills, bytes", lambda line: line.value("spill_bytes"), "{:.0f}"),
        Column("shared memory, KiB", _shared_kib, "{:.3g}"),
        Column(
            "warps/SM, occupancy",
            lambda line: f"{line.value('warps'):.0f}, {line.value('occupancy_percent'):.0f} %",
        ),
        Column("shared loads", lambda line: _shared(line, "load"), "{:,.0f}"),
        Column("shared stores", lambda line: _shared(line, "store"), "{:,.0f}"),
        Column("sectors loaded", lambda line: _sectors(line, "load"), "{:,.0f}"),
        Column("sectors stored", lambda line: _sectors(line, "store"), "{:,.0f}"),
        Column("loads by TMA", _copies),
        Column("operands of wgmma", _operands),
    ],
)


LAYOUTS["prediction"] = Layout(
    title=lambda name, file, block: (
        f"{cell_name(block[0])}, {file.study['gpu']}; microseconds, predicted ({name})"
    ),
    rows=lambda file: file.rows,
    block=cell_name,
    line=lambda row: row.contender,
    at=lambda block: max(map(length, block)),
    columns=[
        columns.BACKEND,
        Column("N={at}", columns.median, "{:.4g}", over=length),
        Column("bound at the longest", columns.timed(lambda row: row.extra["bound"])),
    ],
)
