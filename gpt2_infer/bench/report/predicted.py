"""What a page shows of a prediction: the time that each resource needs, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import find_gpu, predict_version, timed_on
from gpt2_infer.bench.report import svg
from gpt2_infer.bench.report.measured import Chart
from gpt2_infer.bench.results import KernelCell, Predicted, Predictions, Results
from gpt2_infer.bench.tables import Table


def prediction(
    name: str, version: VersionHeader, gpu: str, cell: KernelCell, results: Sequence[Results]
) -> Chart | str:
    """Chart the prediction of a version beside its measured times; or say why there is none.

    It is taken from the results if they have it for this very file, else made.
    """
    card = find_gpu(gpu)
    digest = environment.version_digest(version.path.read_text("utf-8"))
    known = [
        one
        for file in results
        if isinstance(file, Predictions) and file.gpu == card.name
        for one in file.series
        if (one.name, one.cell, one.version_digest) == (name, cell, digest)
    ]
    timed = timed_on(card, results)
    found = (known or predict_version(name, version, [cell], gpu=gpu, timed=timed))[-1]
    if found.refused:
        return found.refused
    medians = [
        (file.task, one.median)
        for file in timed
        for one in file.series
        if one.samples and found.is_of(one)
    ]
    return _chart(found, card.name, medians)


def _chart(found: Predicted, card: str, medians: Sequence[tuple[str, float]]) -> Chart:
    needs = sorted(found.needs_us.items(), key=lambda need: -need[1])
    rows = [(need, "", us, "o0") for need, us in needs if us >= 0.05]
    rows += [
        ("latency", "warps wait for results, barriers and each other", found.waiting_us, "o4"),
        ("uneven blocks", "multiprocessors without work", found.uneven_us, "o4"),
        ("launch", "", found.launch_us, "o4"),
        ("predicted", f"bound by {found.bound}", found.time_us, "r8"),
    ]
    rows += [
        ("measured", f"{task}; predicted {found.time_us / us:.2f} times as long", us, "r0")
        for task, us in medians
    ]
    marks = [
        svg.Mark(row, look, [(us, 0)], what, f"{us:,.1f}", (us, us)) for row, what, us, look in rows
    ]
    title = f"Predicted for {card}, {found.cell}"
    cells = [(row, f"{us:,.1f}", what) for row, what, us, _ in rows]
    words = "Grey is the time that a resource would need if it were always busy."
    table = Table(title, ["what", "us", ""], cells, {})
    return Chart(title, svg.bars(marks, "microseconds", title), table, (words,))
