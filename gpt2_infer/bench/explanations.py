"""Predict where versions stall and what they would gain, next to a profiler's samples if any."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from attention_kernels import ladder
from attention_kernels.errors import AttentionError
from attention_kernels.inspection import explain, nsight
from attention_kernels.inspection.predict import Case
from gpt2_infer.bench import environment
from gpt2_infer.bench.prediction import find_gpu
from gpt2_infer.bench.record import Row, Shape
from gpt2_infer.bench.study import Contender, ExplanationStudy, Subject
from gpt2_infer.errors import RequestError


class Explanations(Subject[Shape]):
    """Explains the prediction of each version; a refused one has a reason."""

    def __init__(self, study: ExplanationStudy) -> None:
        self.gpu = find_gpu(study.gpu)
        self.versions = {}
        for name in study.backends:
            if (version := ladder.resolve(name).version) is None:
                raise RequestError(f"{name} has no version file")
            self.versions[name] = version
        self.kernels = read_report(Path(study.report)) if study.report else []
        self.cells = [
            Shape(
                batch=study.batch,
                num_heads=study.heads,
                seqlen=study.seqlen,
                head_dim=study.head_dim,
                is_causal=not study.full,
            )
        ]
        self.facts = {"gpu": self.gpu.name}

    def contenders(self, cell: Shape) -> Iterator[Contender]:
        """Explain every version."""
        case = Case(**msgspec.structs.asdict(cell))
        for name, version in self.versions.items():
            row = Row(contender=name, metric="predicted time", unit="us")
            beside = []
            try:
                found = explain.explain(version, self.gpu, case, what_if=not self.kernels)
                if self.kernels:
                    beside = _rows(name, nsight.compare(found, self.kernels))
            except AttentionError as error:
                row.status, row.reason = "refused", str(error)
            else:
                row.samples = [round(found.prediction.time_us, 3)]
                row.extra = {"version_digest": environment.version_digest(version.source)}
                if found.advice:
                    row.extra["advice"] = [_rounded(dataclasses.asdict(x)) for x in found.advice]
            yield Contender(row, beside=beside)


def read_report(path: Path) -> list[nsight.Sampled]:
    """Return the kernels of a source page that ncu exported as CSV; raises RequestError."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
            found = nsight.parse(file)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from error
    if not found:
        wanted = "the CSV that `ncu --import REPORT --page source --csv` prints"
        raise RequestError(f"{path} is not {wanted}")
    return found


def _rows(name: str, found: nsight.Comparison) -> list[Row]:
    """Return how well the stalls were predicted; `extra` has the worst lines."""
    lines = [_rounded(dataclasses.asdict(one)) for one in found.lines[: nsight.WORST]]
    figures: dict[str, float] = {
        "worst found": found.worst_found,
        "worst": found.worst,
        "reasons equal": found.reasons_equal,
        "reasons": found.reasons,
        "samples": found.samples,
    }
    if found.rank_correlation is not None:
        figures["rank correlation"] = round(found.rank_correlation, 4)
    rows = [
        Row(contender=name, metric=metric, unit="1", samples=[value])
        for metric, value in figures.items()
    ]
    rows[0].extra["lines"] = lines
    return rows


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
    }
