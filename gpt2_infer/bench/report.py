"""Make the report on kernels and results: count, predict, and hand the page what it shows."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import msgspec
from tqdm import tqdm

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import count_accesses
from attention_kernels.judge.suite import Report
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import find_gpu, predict_version, stalls_of
from gpt2_infer.bench.record import File, KernelCell, Row, Shape
from gpt2_infer.bench.show import page
from gpt2_infer.bench.show.page.source import Kernel

NO_PREDICTION = "no prediction committed"


def make_page(
    versions: Mapping[str, VersionHeader],
    measured: Sequence[page.Measured],
    shape: Shape,
    *,
    gpu: str | None = None,
    predict: Collection[str] = (),
    verdicts: Mapping[str, Report | str] = MappingProxyType({}),
    timeout_s: float = 600.0,
) -> str:
    """Return the HTML page on versions, given by name, and on results files.

    measured: the files, read. shape: the shape to run the versions with in the emulator. gpu: the
    GPU to show predicted times and stalls for, a name in gpus(); None for no predictions. predict:
    the versions to predict if the results have no stalls of them. verdicts: the judge's reports on
    versions, or why there is none. If a version's accesses cannot be counted, the reason is shown.
    Raises RequestError, or BuildError if a version does not compile.
    """
    if gpu:
        find_gpu(gpu)  # fail on an unknown name before minutes of counting
    kernels = _record(versions, shape, timeout_s)
    for kernel in kernels:
        if isinstance(found := verdicts.get(kernel.name), Report):
            kernel.found_wrong = found.failures
    predictions: dict[str, page.Bars | str] = {}
    if gpu:
        results = [one.file for one in measured]
        for kernel in tqdm(kernels, "predicting", unit="", disable=None):
            makes = kernel.name in predict
            row = _predicted(kernel, gpu, shape, results, makes=makes)
            predictions[kernel.name] = page.bars(row, gpu, results) if row else NO_PREDICTION
            if row:
                kernel.stalls = stalls_of(row)
    return page.render(kernels, measured, shape, predictions=predictions, verdicts=verdicts)


def _predicted(
    kernel: Kernel,
    gpu: str,
    shape: Shape,
    files: Sequence[File],
    *,
    makes: bool,
) -> Row | None:
    """Return a version's prediction for 12 heads and 1,024 tokens, with its stalls if possible.

    makes: whether to predict if the files have no stalls. Returns None if there is no prediction.
    """
    card, version = find_gpu(gpu), kernel.version
    cell = KernelCell(
        1024, head_dim=kernel.head_dim, dtype=version.dtypes[0], is_causal=shape.is_causal
    )
    wanted = kernel.name, cell, environment.version_digest(version.path.read_text("utf-8"))
    found = [
        row
        for kind in ("prediction", "stalls")
        for file in files
        if file.study["kind"] == kind and file.study["gpu"] == card.name
        for row in file.of("predicted time")
        if (row.contender, row.kernel, row.extra.get("version_digest")) == wanted
        and (row.reason or "needs_us" in row.extra)  # converted files have only the time
    ]
    if makes and not any("stalls" in row.extra for row in found):
        (row,) = predict_version(kernel.name, version, [cell], gpu=gpu, lines=True)
        return row
    return found[-1] if found else None


def _record(versions: Mapping[str, VersionHeader], shape: Shape, timeout_s: float) -> list[Kernel]:
    def run(named: tuple[str, VersionHeader]) -> Kernel:
        name, version = named
        head_dims = version.head_dims
        head_dim = shape.head_dim if shape.head_dim in head_dims else head_dims[0]
        taken = msgspec.structs.asdict(shape) | {"head_dim": head_dim}
        try:
            recording = count_accesses(version, **taken, timeout_s=timeout_s)
        except UnsupportedError as error:
            return Kernel(name, version, head_dim, None, "; ".join(error.reasons))
        return Kernel(name, version, head_dim, recording)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(run, versions.items())
        return [*tqdm(found, "counting accesses", len(versions), unit="", disable=None)]
