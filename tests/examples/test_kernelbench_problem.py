"""The example's harness: it passes and times a right submission, and fails a wrong one."""

from __future__ import annotations

import re
import runpy
import shutil

import pytest

from attention_kernels.judge import suite
from scripts.size import code_lines
from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "kernelbench_problem"


def test_its_harness_has_ten_lines():
    assert code_lines((EXAMPLE / "harness.py").read_text("utf-8")) <= 10


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (".tril()", ".tril()", r"PASSED\n\d+ us, from \d+ to \d+\n"),
        (".tril()", ".tril(1)", r"FAILED\n.*(change earlier rows|error).*"),
    ],
    ids=["right", "wrong"],
)
def test_it_judges_a_submission(before, after, verdict, tmp_path, plugin, monkeypatch, capsys):
    folder = shutil.copytree(EXAMPLE, tmp_path / "example")
    file = folder / "problem" / "submission.py"
    text = file.read_text("utf-8")
    assert before in text
    file.write_text(text.replace(before, after, 1), "utf-8")
    harness = folder / "harness.py"
    harness.write_text(harness.read_text().replace("Case(512,", "Case(64,"))  # sooner timed
    checks_of = suite.checks_of
    # It refuses most of these.
    monkeypatch.setattr(suite, "checks_of", lambda *a, **o: checks_of(*a, **o)[:60])
    plugin("")  # the harness's own is found, too, and both are forgotten after the test
    runpy.run_path(str(harness))
    assert re.fullmatch(verdict, capsys.readouterr().out, re.DOTALL)
