from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from attention_kernels import ladder, list_backends
from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import explain
from attention_kernels.inspection.advice import Advice
from attention_kernels.inspection.explain import (
    Explanation,
    InstructionStalls,
    KernelCode,
    LineStalls,
)
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.show import tables
from gpt2_infer.bench.stalls import StallsByLine, explain_backend, recorded, what_ifs
from gpt2_infer.bench.study import Contender, StallStudy
from gpt2_infer.errors import RequestError
from tests.gpt2_infer.bench.common import file_of, stalls
from tests.gpt2_infer.cli import test_lines
from tests.gpt2_infer.cli.test_predict import FOUND

NAME = "CUSTOM_CUDA_VERSION_12"


def instruction(kernel: str, address: int, share: float) -> InstructionStalls:
    return InstructionStalls(kernel, address, "FADD R1, R2, R3", (7, 3), share, {"wait": share})


LINE = LineStalls(
    line=7,
    lines=(7, 3),
    source="f(x);",
    share=0.8,
    reasons={"wait": 0.6, "barrier": 0.196, "branch resolving": 0.004},
    waits_for={5: 0.4},
    instructions=[
        instruction("b", 32, 0.5),
        instruction("b", 16, 0.2),
        instruction("a", 64, 0.0995),
        instruction("b", 48, 0.0005),
    ],
)
EXPLAINED = Explanation(
    prediction=FOUND,
    reasons={"wait": 0.7, "barrier": 0.3},
    issuing=0.25,
    lines=[LINE, LineStalls(8, (8,), "}", 0.0, {"wait": 0.0}, {}, [instruction("a", 0, 0.0)])],
    advise=lambda: [Advice("barrier", 7, 0.2, "barrier", "without the barrier", "", 80.0)],
    code=[KernelCode("a", [], []), KernelCode("b", [], []), KernelCode("a", [], [])],
    text=[],
)


@pytest.fixture
def version():
    list_backends()
    return ladder.versions()[NAME]


def contender(**settings: str) -> Contender:
    subject = StallsByLine(StallStudy(backends=[NAME], **settings))
    (found,) = subject.contenders(subject.cells[0])
    return found


def test_an_explanation_is_recorded_with_its_largest_parts(monkeypatch, version):
    monkeypatch.setattr(explain, "explain", lambda *_: EXPLAINED)
    row, _ = explain_backend(NAME, version, KernelCell(1024), gpu="h200")
    row = msgspec.json.decode(msgspec.json.encode(row), type=Row)
    found = recorded(row)
    assert (row.samples, row.extra["bound"]) == ([90.0], "shared memory")
    assert found is not None
    (line,) = found.lines
    assert line.reasons == {"wait": 0.75, "barrier": 0.245}
    assert (line.through, line.waits_for, line.others) == ([3], {5: 0.5}, 1)
    places = [(found.kernels[one.kernel], one.address, one.share) for one in line.instructions]
    assert places == [("a", 64, 0.0995), ("b", 16, 0.2), ("b", 32, 0.5)]
    assert found.us(line.share) == pytest.approx(0.8 * 0.75 * 90)
    assert [(one.line, one.time_us) for one in what_ifs(row)] == [(7, 80.0)]


def test_a_version_that_cannot_be_explained_has_the_reason(monkeypatch, version):
    def refuse(*_):
        raise UnsupportedError("A", ["not this"])

    monkeypatch.setattr(explain, "explain", refuse)
    row, _ = explain_backend(NAME, version, KernelCell(1024), gpu="h200")
    assert (row.status, row.samples, recorded(row)) == ("refused", [], None)
    assert "not this" in row.reason
    (table,) = tables.tables("FILE", file_of("stalls", [row], settings={"gpu": "H200 SXM"}))
    assert "not this" in table.notes[NAME]


def test_the_table_of_stalls_names_the_worst_line():
    (table,) = tables.tables("FILE", stalls({NAME: ("1", [(9, 0.25), (7, 0.75)])}))
    reasons = ("short scoreboard, 75%", "wait, 25%", "line 7, short scoreboard, 75%")
    assert table.rows == [(f"`{NAME}`", "100", "80", *reasons)]


def test_a_report_gives_the_agreement_and_the_worst_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(explain, "explain", lambda *_: test_lines.EXPLAINED)
    path = tmp_path / "report.csv.gz"
    path.write_bytes(gzip.compress(test_lines.REPORT.encode()))
    found = contender(report=str(path))
    figures = {row.metric: row.samples[0] for row in found.beside}
    assert (figures["worst found"], figures["worst"], figures["samples"]) == (2, 2, 2000)
    lines = found.beside[0].extra["lines"]
    assert [(line["line"], line["measured"], line["predicted"]) for line in lines][:2] == [
        (158, 0.75, 0.41),
        (3, 0.25, 0.01),
    ]


def test_each_backend_is_explained_in_its_own_dtype():
    study = StallStudy(backends=[NAME, "HOPPER_VERSION_5", "TRITON_FLASH_ATTENTION"])
    subject = StallsByLine(study)
    assert [cell.dtype for cell in subject.cells] == ["float32", "float16"]
    assert [*subject.dtypes.values()] == ["float32", "float16", "float32"]


def test_only_backends_with_a_predictor_and_reports_can_be_explained(tmp_path: Path):
    with pytest.raises(RequestError, match="NAIVE_PYTORCH has no version file"):
        StallsByLine(StallStudy(backends=["NAIVE_PYTORCH"]))
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(RequestError, match=r"x\.csv is not the CSV that `ncu"):
        contender(report=str(tmp_path / "x.csv"))
