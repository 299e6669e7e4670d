"""Make the report on kernels: count their accesses, predict, and render the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from tqdm import tqdm

from attention_kernels import AttentionError
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.predict import predict
from attention_kernels.judge.suite import Report
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench.counting import count_all
from gpt2_infer.bench.record import Shape
from gpt2_infer.bench.show import page
from gpt2_infer.bench.show.page.source import Kernel


def make_page(
    versions: Mapping[str, VersionHeader],
    shape: Shape,
    *,
    gpu: GpuModel | None,
    predicted: Collection[str],
    verdicts: Mapping[str, Report | str],
    timeout_s: float = 600.0,
) -> str:
    """Return the HTML page on versions, given by name.

    shape: the shape to run the versions with in the emulator. predicted: the versions whose time
    and stalls are predicted, for 12 heads and 1,024 tokens. gpu: the GPU to predict for;
    None for no predictions. verdicts: the judge's reports on versions, or why there is
    none. If a version's accesses cannot be counted, the reason is shown. Raises RequestError, or
    BuildError if a version does not compile.
    """
    shapes = {}
    for name, version in versions.items():
        head_dim = shape.head_dim if shape.head_dim in version.head_dims else version.head_dims[0]
        shapes[name] = msgspec.structs.replace(shape, head_dim=head_dim)
    counted = count_all(zip(versions.values(), shapes.values(), strict=True), timeout_s)
    kernels = [
        Kernel(name, version, found, verdict=verdicts.get(name))
        for (name, version), found in zip(versions.items(), counted, strict=True)
    ]
    if gpu:
        some = [kernel for kernel in kernels if kernel.name in predicted]
        for kernel in tqdm(some, "predicting", unit="", disable=None):
            try:
                kernel.prediction = predict(
                    kernel.version,
                    gpu,
                    head_dim=shapes[kernel.name].head_dim,
                    is_causal=shape.is_causal,
                    lines=True,
                )
            except AttentionError as error:
                kernel.prediction = str(error)
    return page.render(kernels, shape)
