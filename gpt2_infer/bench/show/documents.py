"""Fill the documents: tables and pictures of a task's newest results, between cog markers.

    <!-- [[[cog from gpt2_infer.bench.show import documents; documents.show("kernel-fp32") ]]] -->
    <!-- [[[end]]] -->

`make docs` fills them. Nothing here imports torch, except to read a ladder's headers
and to divide the fused step into blocks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpt2_infer.bench.record import File, ResultsError, Row, newest
from gpt2_infer.bench.show import cards, explained, inspected, ladders, predicted, tables
from gpt2_infer.bench.show.columns import BACKEND
from gpt2_infer.bench.show.figures import (
    Value,
    group_by,
    length,
    main_rows,
    shape_of,
    spread_percent,
    where,
)
from gpt2_infer.bench.show.pivot import Column, Entry, Layout, markdown, pivot


def show(task: str, chapter: str = "") -> None:
    """Print the table of a task's newest results, for the document that cog is filling.

    chapter: one of ladders.CHAPTERS, to leave out the versions of the others.
    """
    path, file = _newest(task)
    _print(tables.render(_link(path), ladders.of_chapter(file, chapter)))


def section(heading: str, task: str, *plots: str) -> None:
    """Print a section with a task's table and pictures, if the task was measured."""
    if task in _files():
        _print(heading)
        show(task)
        for plot in plots:
            picture(task, plot)


def picture(task: str, plot: str) -> None:
    """Print the link to a picture, which `python scripts/plot_results.py` draws."""
    _print(f"!{_link(Path('results', 'plots', f'{task}_{plot}.svg'), f'{task}, {plot}')}\n")


def versions(family: str) -> None:
    """Print the table of a ladder's versions, from their headers."""
    _print(ladders.versions_table(family))


def overview(family: str, *kernels: str, generation: str) -> None:
    """Print a ladder's versions with the times from kernel tasks and a generation task."""
    _print(ladders.overview(family, _measured(kernels), _newest(generation)[1]))


def ladder(family: str, *tasks: str, chapter: str = "") -> None:
    """Print a section for each version of a ladder: its header and the tasks' results."""
    _print(ladders.sections(family, _measured(tasks), chapter))


def repeated(task: str, again: str) -> None:
    """Print how far the medians of a second kernel run differ from the first's."""
    (path, first), (path_again, second) = _newest(task), _newest(again)

    def code(row: Row) -> tuple[object, ...]:
        return row.contender, row.kernel, row.extra.get("version_digest")

    medians = {code(row): row.median for row in main_rows(second) if row.samples}
    timed = [row for row in main_rows(first) if row.samples and code(row) in medians]
    apart, inside = [], 0
    for mine in group_by(timed, lambda row: row.contender).values():
        percent = [100 * abs(medians[code(row)] / row.median - 1) for row in mine]
        inside += max(percent) <= max(spread_percent(row.samples) for row in mine)
        apart += percent
    _print(
        f"{_link(path_again)} repeats {_link(path)}: {inside} of "
        f"{len({row.contender for row in timed})} backends stay within the spread of the first "
        f"run, and no median is more than {max(apart):.1f} % apart.\n"
    )


def row_errors(task: str, *names: str) -> None:
    """Print some backends' relative row error at each length, divided by its budget."""

    def errors(line: Entry) -> Value:
        found = line.row and line.row.check
        return f"{found.row_error:.1e} / {found.row_budget:.1e}" if found else None

    layout = Layout(
        title=lambda name, file, _: f"{where(file)} ({name})",
        rows=lambda file: [row for row in main_rows(file) if row.contender in names],
        line=lambda row: row.contender,
        columns=[BACKEND, Column("N={at}", errors, over=length)],
    )
    _show(task, layout)


def predictions(task: str, *measured: str) -> None:
    """Print a task's predictions next to the times of the same version files, if measured."""
    timed = [row for name in measured if name in _files() for row in main_rows(_files()[name][1])]
    _show(task, inspected.predictions(timed))
    _print(f"{predicted.accuracy(_newest(task)[1], timed)}\n")


def step_predictions(task: str, *measured: str) -> None:
    """Print a task's predictions of the fused step next to times of whole texts, if measured."""
    timed = [row for name in measured if name in _files() for row in main_rows(_files()[name][1])]
    _show(task, inspected.step_predictions(timed))


def other_cards(task: str) -> None:
    """Print what to expect of the fused step on GPUs that were not measured."""
    _print(cards.expected(_newest(task)[1], "fused, sm_80"))


def blocks_on_other_cards() -> None:
    """Print the blocks of the fused step's products on these GPUs."""
    _print(cards.blocks())


def wavefronts(task: str, profile: str) -> None:
    """Print predicted wavefronts next to those of a profile."""
    path, profiled = _newest(profile)
    cell = profiled.rows[0].cell
    counted = {(row.contender, row.metric): row.samples[0] for row in profiled.rows}

    def share(line: Entry, kind: str, *metrics: str) -> str:
        mine = line.first.extra.get(f"{kind}_wavefronts", 0)
        found = sum(counted.get((line.first.contender, metric), 0) for metric in metrics)
        return f"{mine:,} / {found:,.0f}" + (f" = {mine / found:.3f}" if found else "")

    loads = "shared_load_wavefronts", "shared_matrix_wavefronts"
    layout = Layout(
        title=lambda name, *_: (
            f"{shape_of(profiled.rows[0])}; counted / profiled ({name}, {_link(path)})"
        ),
        rows=lambda file: [
            row
            for row in file.rows
            if cell.items() <= row.cell.items() and (row.contender, "duration_us") in counted
        ],
        columns=[
            BACKEND,
            Column("loads", lambda line: share(line, "load", *loads)),
            Column("stores", lambda line: share(line, "store", "shared_store_wavefronts")),
        ],
    )
    _show(task, layout)


def stalls(task: str, earlier: str) -> None:
    """Print how well stalls were predicted, first with an earlier model."""
    _show(task, explained.compared(_newest(earlier)[1]))


def worst_lines(task: str, contender: str) -> None:
    """Print a version's worst lines, measured and predicted."""
    path, file = _newest(task)
    _print(str(explained.worst_lines(_link(path), file, contender)))


def steps(*found: tuple[str, str, Sequence[explained.Step]]) -> None:
    """Print what-ifs next to the next versions' times, given the two tasks and the steps."""
    rows = [
        explained.step(one, _newest(task)[1], main_rows(_newest(timing)[1]))
        for task, timing, steps in found
        for one in steps
    ]
    _print(markdown(explained.STEPS_HEAD, rows))


def _show(task: str, layout: Layout) -> None:
    path, file = _newest(task)
    _print("\n".join(map(str, pivot(_link(path), file, layout))))


@functools.cache
def _files() -> dict[str, tuple[Path, File]]:
    return newest(Path("results"))


def _newest(task: str) -> tuple[Path, File]:
    if task not in _files():
        raise ResultsError(f"there are no results of a task {task}, only of {', '.join(_files())}")
    return _files()[task]


def _measured(tasks: Iterable[str]) -> list[File]:
    """Return the newest results of those tasks that were measured."""
    return [_files()[task][1] for task in tasks if task in _files()]


def _link(path: Path, text: str = "") -> str:
    """Return a link to a file from the document that cog is filling."""
    cog = sys.modules.get("cog")
    document = Path(str(cog.inFile) if cog else "README.md")
    return f"[{text or path.name}]({os.path.relpath(path, document.parent)})"


def _print(text: str) -> None:
    print(f"\n{text}")  # Markdown needs an empty line after a comment
