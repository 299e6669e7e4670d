"""Predict the time of each version of a ladder on a GPU from its code alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec

from attention_kernels import AttentionError
from attention_kernels.inspection.sass.gpus import GpuModel, gpus
from attention_kernels.inspection.sass.predict import predict
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.study import Contender, PredictionStudy, Subject
from gpt2_infer.errors import RequestError


def find_gpu(key: str) -> GpuModel:
    """Return the data of a GPU by its `--gpu` name; raises RequestError if unknown."""
    known = gpus()
    if key not in known:
        raise RequestError(f"no GPU named {key}, only {', '.join(known)}")
    return known[key]


class Predictions(Subject[KernelCell]):
    """Predicts a ladder; a version that cannot be predicted has a reason."""

    def __init__(self, study: PredictionStudy) -> None:
        self.gpu, card = study.gpu, find_gpu(study.gpu)
        versions = selection.versions_of(study.family)
        self.versions = {name: one for name, one in versions.items() if not one.is_host}
        self.cells = [
            KernelCell(n, study.batch, study.heads, study.head_dim, not study.full, dtype)
            for dtype in dict.fromkeys(one.dtypes[0] for one in self.versions.values())
            for n in study.seqlens
        ]
        self.facts = {"gpu": card.name}

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Yield the prediction of every version whose first dtype is the cell's."""
        some = {name: one for name, one in self.versions.items() if one.dtypes[0] == cell.dtype}
        predict_one = functools.partial(predict_version, cell=cell, gpu=self.gpu)
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            yield from map(Contender, pool.map(predict_one, some.keys(), some.values()))


def predict_version(name: str, version: VersionHeader, cell: KernelCell, *, gpu: str) -> Row:
    """Predict a version in a cell, or record why not."""
    row = Row(contender=name, cell=msgspec.to_builtins(cell), metric="predicted time", unit="us")
    row.extra["version_digest"] = environment.version_digest(version.source)
    shape = msgspec.structs.asdict(cell)
    del shape["dtype"]
    try:
        found = predict(version, gpus()[gpu], **shape)
    except AttentionError as error:
        row.status, row.reason = "refused", str(error)
        return row
    row.samples = [round(found.time_us, 3)]
    row.extra["bound"] = found.bound  # `gpt2-infer predict --json` has the rest
    return row
