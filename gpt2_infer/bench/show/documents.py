"""Fill the documents: tables and pictures of a task's newest results, between cog markers.

    <!-- [[[cog from gpt2_infer.bench.show import documents; documents.show("kernel-fp32") ]]] -->
    <!-- [[[end]]] -->

`make docs` fills them. Nothing here imports torch, except to read a ladder's headers.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpt2_infer.bench.record import File, Row, newest, read, timings_of
from gpt2_infer.bench.show import ladders, tables
from gpt2_infer.bench.show.figures import length, main_rows, where
from gpt2_infer.bench.show.pivot import Table, markdown

MEASURES = "cells", "mean error", "median", "off by over 30 %", "the worst, ratio"
SCORE = "corpus", "items", "kinds re-enacted", "cheats", "caught", "harmless", "passed", "timed"


def show(task: str, device: str = "", *, rows: str = "", columns: str = "", kind: str = "") -> None:
    """Print the tables of a task's newest results, for the document that cog is filling.

    device: as in the file's name; see record.newest(). rows, columns: see Table.chosen(). kind: the
    tables' layout, by default the study's.
    """
    path, file = _newest(task, device)
    _print_tables(tables.tables(_link(path), file, kind), rows, columns)


def picture(task: str, plot: str) -> None:
    """Print the link to a picture, which `python scripts/plot_results.py` draws."""
    _print(f"!{_link(Path('results', 'plots', f'{task}_{plot}.svg'), f'{task}, {plot}')}\n")


def overview(family: str, *kernels: str, generation: str, rows: str = "") -> None:
    """Print a ladder's versions with the times from kernel tasks and a generation task.

    rows: a regular expression that the names of the shown versions contain.
    """
    files = [_newest(task)[1] for task in kernels]
    _print(ladders.overview(family, files, _newest(generation)[1], rows))


def ladder(family: str, *tasks: str, chapter: str = "") -> None:
    """Print a section for each version of a ladder: its header and the tasks' times."""
    _print(ladders.sections(family, [_newest(task)[1] for task in tasks], chapter))


def changes(*titles: str) -> None:
    """Print the lines of code that each version adds and removes; see ladders.changes()."""
    _print(ladders.changes(*titles))


def accuracy(*tasks: tuple[str, ...]) -> None:
    """Print a line for each pair of a prediction and the task, and device, that timed it."""
    lines = []
    for task, *measured in tasks:
        (path, file), (own, timed) = _newest(task), _newest(*measured)
        errors = _errors(file, main_rows(timed))
        lines.append([_link(path, task), _link(own, measured[0]), *errors])
    _print(markdown(["predicted", "measured", *MEASURES], lines))


def _errors(file: File, timed: Sequence[Row]) -> list[str]:
    """Summarize how far a file's predictions are from measurements, in the columns of MEASURES."""
    ratios = {
        (row.contender, length(row)): row.median / found[0].median
        for row in file.rows
        if row.samples and (found := timings_of(row, timed))
    }
    off = {key: abs(ratio - 1) for key, ratio in ratios.items()}
    name, seqlen = worst = max(off, key=lambda key: off[key])
    mean, median = statistics.mean(off.values()), statistics.median(off.values())
    far = sum(error > 0.3 for error in off.values())
    worst_ratio = f"`{name}`, N={seqlen}: {ratios[worst]:.2f}"
    return [f"{len(off)}", f"{mean:.1%}", f"{median:.1%}", f"{far}", worst_ratio]


def score(path: Path = Path("results", "cheats.json")) -> None:
    """Print how many cheats of each corpus were caught, and how many honest kernels passed."""
    file, lines, elsewhere = read(path), [], dict[str, list[str]]()
    tried = [row for row in file.rows if row.status != "refused"]
    for corpus in file.study["corpora"]:
        kinds: dict[str, list[str]] = corpus["kinds"]
        cheats = {*itertools.chain(*kinds.values())}
        fates: dict[str, str] = {}
        for row in sorted((row for row in tried if row.contender in cheats), key=_badness):
            fates[row.contender] = SCORE[_badness(row)]
        counts = [len(cheats), *([*fates.values()].count(fate) for fate in SCORE[4:])]
        re_enacted = f"{sum(map(bool, kinds.values()))} of {len(kinds)}"
        head = corpus["name"], str(corpus["items"] or ""), re_enacted
        lines.append([*head, *map(str, counts)])
    _print(f"{where(file)} ({_link(path)}):\n\n{markdown(SCORE, lines)}")
    honest = [row for row in tried if row.metric == "honest"]
    alarms = sum(row.reason != "passed" for row in honest)
    _print(f"{len({row.contender for row in honest})} honest kernels, {alarms} false alarms.\n")
    names = {row.contender for row in tried}
    for row in (row for row in file.rows if row.contender not in names):
        elsewhere.setdefault(row.reason, []).append(f"`{row.contender}`")
    for reason, rows in elsewhere.items():
        _print(f"Not tried, because {reason}: {', '.join(dict.fromkeys(rows))}.\n")


def _badness(row: Row) -> int:
    """Return the column of SCORE that counts a cheat's fate; of several, the last."""
    if row.reason != "passed":
        return 4
    return 5 if row.extra["is_harmless"] else 6 + (row.extra["by"] == "clock")


def _print_tables(found: Iterable[Table], rows: str = "", columns: str = "") -> None:
    for table in (one.chosen(rows, columns) for one in found):
        if table.rows:
            _print(str(table))


@functools.cache
def _newest(task: str, device: str = "") -> tuple[Path, File]:
    path = newest(Path("results"), task, device)
    return path, read(path)


def _link(path: Path, text: str = "") -> str:
    """Return a link to a file from the document that cog is filling."""
    cog = sys.modules.get("cog")
    document = Path(str(cog.inFile) if cog else "README.md")
    return f"[{text or path.name}]({os.path.relpath(path, document.parent)})"


def _print(text: str) -> None:
    print(f"\n{text}")  # Markdown needs an empty line after a comment
