"""The record of explanations: what is compared with a report, and what a refused version says."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from attention_kernels import UnsupportedError
from attention_kernels.inspection import explain
from gpt2_infer.bench.explanations import Explanations
from gpt2_infer.bench.study import ExplanationStudy
from gpt2_infer.errors import RequestError
from tests.gpt2_infer.cli.test_lines import EXPLAINED, REPORT

NAME = "CUSTOM_CUDA_VERSION_12"


def contender(**settings: str):
    subject = Explanations(ExplanationStudy(backends=[NAME], **settings))
    (found,) = subject.contenders(subject.cells[0])
    return found


def test_a_report_gives_the_agreement_and_the_worst_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(explain, "explain", lambda *_, **__: EXPLAINED)
    path = tmp_path / "report.csv.gz"
    path.write_bytes(gzip.compress(REPORT.encode()))
    found = contender(report=str(path))
    figures = {row.metric: row.samples[0] for row in found.beside}
    assert (figures["worst found"], figures["worst"], figures["samples"]) == (2, 2, 2000)
    assert found.row.samples == [90.0]
    lines = found.beside[0].extra["lines"]
    assert [(line["line"], line["measured"], line["predicted"]) for line in lines][:2] == [
        (158, 0.75, 0.41),
        (3, 0.25, 0.01),
    ]


def test_without_a_report_there_is_advice_and_a_refusal_has_its_reason(monkeypatch):
    monkeypatch.setattr(explain, "explain", lambda *_, **__: EXPLAINED)
    found = contender()
    assert not found.beside
    assert [one["time_us"] for one in found.row.extra["advice"]] == [71.0, 85.25]

    def refuse(*_, **__):
        raise UnsupportedError("v12", ["too large"])

    monkeypatch.setattr(explain, "explain", refuse)
    found = contender()
    assert (found.row.status, found.row.samples) == ("refused", [])
    assert "too large" in found.row.reason


def test_only_version_files_and_reports_can_be_explained(tmp_path: Path):
    with pytest.raises(RequestError, match="NAIVE_PYTORCH has no version file"):
        Explanations(ExplanationStudy(backends=["NAIVE_PYTORCH"]))
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(RequestError, match=r"x\.csv is not the CSV that `ncu"):
        Explanations(ExplanationStudy(backends=[NAME], report=str(tmp_path / "x.csv")))
