"""Make the report on kernels: count their accesses, predict, and render the page."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import msgspec
from tqdm import tqdm

from attention_kernels import AttentionError, UnsupportedError
from attention_kernels.inspection.accesses import count_accesses
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.predict import predict
from attention_kernels.judge.suite import Report
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.record import Shape
from gpt2_infer.bench.show import page
from gpt2_infer.bench.show.page.source import Kernel


def make_page(
    versions: Mapping[str, VersionHeader],
    shape: Shape,
    *,
    gpu: GpuModel | None = None,
    predicted: Collection[str] = (),
    verdicts: Mapping[str, Report | str] = MappingProxyType({}),
    timeout_s: float = 600.0,
) -> str:
    """Return the HTML page on versions, given by name.

    shape: the shape to run the versions with in the emulator. predicted: the versions whose time
    and stalls are predicted, for 12 heads and 1,024 tokens. gpu: the GPU to predict for;
    None for no predictions. verdicts: the judge's reports on versions, or why there is
    none. If a version's accesses cannot be counted, the reason is shown. Raises RequestError, or
    BuildError if a version does not compile.
    """
    kernels = _record(versions, shape, timeout_s)
    for kernel in kernels:
        kernel.verdict = verdicts.get(kernel.name)
    if gpu:
        some = [kernel for kernel in kernels if kernel.name in predicted]
        for kernel in tqdm(some, "predicting", unit="", disable=None):
            try:
                kernel.prediction = predict(
                    kernel.version,
                    gpu,
                    head_dim=kernel.head_dim,
                    is_causal=shape.is_causal,
                    lines=True,
                )
            except AttentionError as error:
                kernel.prediction = str(error)
    return page.render(kernels, shape)


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
