"""What a page shows of a prediction: the time that each resource needs, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from attention_kernels.inspection.predict import LOAD_STORE_UNIT
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import find_gpu, predict_version, timed_on
from gpt2_infer.bench.report import svg
from gpt2_infer.bench.report.measured import Bars
from gpt2_infer.bench.report.source import Kernel
from gpt2_infer.bench.results import KernelCell, KernelTiming, Predicted, Predictions, Results


def prediction(
    kernel: Kernel, gpu: str, is_full: bool, results: Sequence[Results], makes: bool
) -> Bars | str:
    """Chart a version's prediction, in GPT-2's shape at the length that stands for a kernel.

    Return why there is none, if so. makes: whether to make the one that results do not have.
    """
    card, version = find_gpu(gpu), kernel.version
    cell = KernelCell(
        1024, head_dim=kernel.head_dim, dtype=version.dtypes[0], is_causal=not is_full
    )
    digest = environment.version_digest(version.source)
    found = [
        one
        for file in results
        if isinstance(file, Predictions) and file.gpu == card.name
        for one in file.series
        if (one.name, one.cell, one.version_digest) == (kernel.name, cell, digest)
    ]
    timed = timed_on(card, results)
    if not found and not makes:
        return "no prediction committed"
    found = found or predict_version(kernel.name, version, [cell], gpu=gpu, timed=timed)
    return found[-1].refused or _chart(found[-1], card.name, timed)


def _chart(found: Predicted, card: str, timed: Sequence[KernelTiming]) -> Bars:
    needs = sorted(found.needs_us.items(), key=lambda need: -need[1])
    notes = {LOAD_STORE_UNIT: "shared memory, L1 and shuffles together"}
    rows = [(need, notes.get(need, ""), us, "o0") for need, us in needs if us >= 0.05]
    rows += [
        ("latency", "warps wait for results, barriers and each other", found.waiting_us, "o4"),
        ("uneven blocks", "multiprocessors without work", found.uneven_us, "o4"),
        ("launch", "", found.launch_us, "o4"),
        ("predicted", f"bound by {found.bound}", found.time_us, "r8"),
    ]
    rows += [
        (
            "measured",
            f"{file.task}; predicted {found.time_us / one.median:.2f} times",
            one.median,
            "r0",
        )
        for file in timed
        for one in file.series
        if one.samples and found.is_of(one)
    ]
    most = max(us for _, _, us, _ in rows)
    return Bars(
        f"Predicted for {card}, microseconds, {found.cell}",
        [(row, f"{us:,.1f}", svg.bar(look, us, most), what) for row, what, us, look in rows],
        ("Grey is the time that a resource would need if it were always busy.",),
    )
