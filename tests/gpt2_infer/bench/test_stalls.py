from __future__ import annotations

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
from gpt2_infer.bench.study import StallStudy
from tests.gpt2_infer.bench.common import file_of, stalls
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


def test_each_version_is_explained_in_its_own_dtype():
    subject = StallsByLine(StallStudy(family="fa1"))
    assert [cell.dtype for cell in subject.cells] == ["float16", "float64"]
    assert subject.dtypes["FLASH_ATTENTION_1_FP64"] == "float64"
