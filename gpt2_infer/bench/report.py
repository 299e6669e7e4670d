"""Make the report on kernels: count their accesses, predict, and render the page."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import msgspec
from tqdm import tqdm

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import count_accesses
from attention_kernels.judge.suite import Report
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.prediction import find_gpu, predict_version, stalls_of
from gpt2_infer.bench.record import KernelCell, Shape
from gpt2_infer.bench.show import page
from gpt2_infer.bench.show.page.source import Kernel


def make_page(
    versions: Mapping[str, VersionHeader],
    shape: Shape,
    *,
    gpu: str | None = None,
    predict: Collection[str] = (),
    verdicts: Mapping[str, Report | str] = MappingProxyType({}),
    timeout_s: float = 600.0,
) -> str:
    """Return the HTML page on versions, given by name.

    shape: the shape to run the versions with in the emulator. predict: the versions whose time and
    stalls are predicted, for 12 heads and 1,024 tokens. gpu: the GPU to predict for, a name in
    gpus(); None for no predictions. verdicts: the judge's reports on versions, or why there is
    none. If a version's accesses cannot be counted, the reason is shown. Raises RequestError, or
    BuildError if a version does not compile.
    """
    if gpu:
        find_gpu(gpu)  # fail on an unknown name before minutes of counting
    kernels = _record(versions, shape, timeout_s)
    for kernel in kernels:
        if isinstance(found := verdicts.get(kernel.name), Report):
            kernel.found_wrong = found.failures
    predictions: dict[str, page.Bars | str] = {}
    predicted = [kernel for kernel in kernels if gpu and kernel.name in predict]
    for kernel in tqdm(predicted, "predicting", unit="", disable=None):
        assert gpu
        cell = KernelCell(
            1024,
            head_dim=kernel.head_dim,
            dtype=kernel.version.dtypes[0],
            is_causal=shape.is_causal,
        )
        (row,) = predict_version(kernel.name, kernel.version, [cell], gpu=gpu, lines=True)
        predictions[kernel.name] = page.bars(row, gpu)
        kernel.stalls = stalls_of(row)
    return page.render(kernels, shape, predictions=predictions, verdicts=verdicts)


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
