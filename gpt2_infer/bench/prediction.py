"""Predict the time of each version of a ladder on a GPU from its code alone."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from attention_kernels import AttentionError
from attention_kernels.inspection.sass.gpus import GpuModel, gpus
from attention_kernels.inspection.sass.predict import Case, predict
from attention_kernels.inspection.sass.stalls import Stalls
from attention_kernels.inspection.sass.timing import Prediction
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.record import File, KernelCell, Row, timings_of
from gpt2_infer.bench.study import Contender, PredictionStudy, Subject
from gpt2_infer.errors import RequestError


def find_gpu(key: str) -> GpuModel:
    """Return the data of a GPU by its `--gpu` name; raises RequestError if unknown."""
    known = gpus()
    if key not in known:
        raise RequestError(f"no GPU named {key}, only {', '.join(known)}")
    return known[key]


def timed_on(gpu: GpuModel, files: Iterable[File]) -> list[File]:
    """Return the timings of attention kernels that were measured on such a GPU."""
    return [
        file
        for file in files
        if file.study["kind"] == "kernel"
        and not file.study.get("decode")
        and file.provenance.gpu
        and file.provenance.gpu.name in gpu.devices
    ]


def uses_tensor_cores(needs_us: Mapping[str, float]) -> bool:
    """Return whether a kernel uses tensor cores, given the time that each resource needs."""
    return needs_us.get("tensor cores", 0.0) > 0


class Likely(NamedTuple):
    """How far measured times were from the predictions of one class of kernels."""

    low: float
    """Measured over predicted time; a tenth of the kernels had less."""
    high: float
    """Measured over predicted time; a tenth of the kernels had more."""
    cells: int
    """Number of predictions that were measured."""


def likely(files: Sequence[File], *, on_tensor_cores: bool) -> Likely | None:
    """Return the range of 8 in 10 measured times of kernels with, or without, tensor cores.

    files: results, predictions as well as timings. None if they have fewer than ten of them.
    """
    by_name = {gpu.name: gpu for gpu in gpus().values()}
    ratios = []
    for file in files:
        if file.study["kind"] == "prediction" and file.study.get("gpu") in by_name:
            timings = timed_on(by_name[file.study["gpu"]], files)
            timed = [row for timing in timings for row in timing.of("time")]
            rows = (row for row in file.rows if row.samples and "needs_us" in row.extra)
            alike = [x for x in rows if uses_tensor_cores(x.extra["needs_us"]) == on_tensor_cores]
            medians = ((row, timings_of(row, timed)) for row in alike)
            ratios += [found[0].median / row.median for row, found in medians if found]
    if len(ratios) < 10:
        return None
    tenths = statistics.quantiles(ratios, n=10)
    return Likely(tenths[0], tenths[-1], len(ratios))


class Predictions(Subject[KernelCell]):
    """Predicts a ladder; a version that cannot be predicted has a reason."""

    def __init__(self, study: PredictionStudy) -> None:
        self.gpu, card = study.gpu, find_gpu(study.gpu)
        versions = selection.versions_of(study.family, may_decode=True)
        self.versions = {name: one for name, one in versions.items() if not one.is_host}
        self.cells = [
            KernelCell(n, study.batch, study.heads, study.head_dim, not study.full, dtype)
            for dtype in dict.fromkeys(one.dtypes[0] for one in self.versions.values())
            for n in study.seqlens
        ]
        self.facts = {"gpu": card.name}

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Yield the prediction of every version for the cell's dtype."""
        for row in self._rows:
            if row.cell == msgspec.to_builtins(cell):
                yield Contender(row)

    @functools.cached_property
    def _rows(self) -> list[Row]:
        """All predictions; a version's machine code is read once for all cells."""
        cells = [
            [cell for cell in self.cells if cell.dtype == version.dtypes[0]]
            for version in self.versions.values()
        ]
        predict_one = functools.partial(predict_version, gpu=self.gpu)
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(predict_one, self.versions.keys(), self.versions.values(), cells)
            shown = tqdm(found, "predicting", len(self.versions), unit="", disable=None)
            return [*itertools.chain.from_iterable(shown)]


def predict_version(
    name: str,
    version: VersionHeader,
    cells: Sequence[KernelCell],
    *,
    gpu: str,
    lines: bool = False,
) -> list[Row]:
    """Predict a version in cells that differ only in length; a refused one has a reason.

    lines: also explain its stalls by source line.
    """
    digest = environment.version_digest(version.source)
    try:
        found = predict(version, gpus()[gpu], [*map(case_of, cells)], lines=lines)
    except AttentionError as error:
        why = str(error)
        return [prediction_row(name, one, digest, reason=why) for one in cells]
    return [
        prediction_row(name, cell, digest, **figures_of(one))
        for cell, one in zip(cells, found, strict=True)
    ]


def case_of(cell: KernelCell) -> Case:
    """Return the shape of a cell's call."""
    return Case(cell.batch, cell.seqlen, cell.num_heads, cell.head_dim, cell.is_causal)


def figures_of(one: Prediction) -> dict[str, Any]:
    """Return the figures of a prediction for prediction_row()."""
    notes = {
        "assumed": [*one.assumed],
        "stalls": one.stalls and msgspec.to_builtins(one.stalls, str_keys=True),
    }
    return {
        "samples": [round(one.time_us, 3)],
        "bound": one.bound,
        "needs_us": {key: round(value, 3) for key, value in one.needs_us.items() if value},
        "waiting_us": round(one.waiting_us, 3),
        "uneven_us": round(one.uneven_us, 3),
        "launch_us": round(one.launch_us, 3),
        "load_wavefronts": one.load_wavefronts,
        "store_wavefronts": one.store_wavefronts,
    } | {name: value for name, value in notes.items() if value}


def prediction_row(
    name: str,
    cell: KernelCell,
    digest: str,
    *,
    samples: Sequence[float] = (),
    reason: str = "",
    **extra: Any,
) -> Row:
    """Return the row of a prediction, or of the reason against it.

    digest: of its version file. extra: its parts.
    """
    return Row(
        contender=name,
        cell=msgspec.to_builtins(cell),
        metric="predicted time",
        unit="us",
        samples=[*samples],
        status="refused" if reason else "ok",
        reason=reason,
        extra={"version_digest": digest} | extra,
    )


def stalls_of(row: Row) -> Stalls | None:
    """Return the stalls in the row of a prediction; None if it has none."""
    found = row.extra.get("stalls")
    return msgspec.convert(found, Stalls, strict=False) if found else None
