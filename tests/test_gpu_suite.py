"""The plugin of `make gpu-test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_infer.bench.record import read
from tests.gpu_suite import Suite

ROOT = Path(__file__).parents[1]
LAST_RUN = ROOT / "results" / "gpu_tests.json"
TESTS = """
import pytest

def test_right():
    pass

def test_wrong():
    assert 1 == 2, "one is not two"

@pytest.fixture
def broken():
    yield
    raise RuntimeError("cannot be taken down")

def test_broken(broken):
    pass

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.mark.slow
def test_counts_durations_and_failures_are_written(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_suite", "--gpu-report=report.json"]
    subprocess.run(
        [*command, "-p", "no:cacheprovider", "-n", "1", "test_some.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=False,
    )
    results = read(tmp_path / "report.json")
    study = results.study
    assert (study["passed"], study["failed"], study["skipped"]) == (1, 2, 1)
    messages = {row.contender: row.reason for row in results.of("outcome")}
    assert messages.keys() == {"test_some.py::test_wrong", "test_some.py::test_broken"}
    assert "one is not two" in messages["test_some.py::test_wrong"]
    assert "cannot be taken down" in messages["test_some.py::test_broken"]
    durations = {row.contender: row.samples[0] for row in results.of("duration")}
    total = durations.pop("test_some.py")
    assert total == pytest.approx(sum(durations.values()), abs=0.3)  # rounded to tenths
    tests = ("test_right", "test_wrong", "test_broken", "test_skipped")
    assert {*durations} == {f"test_some.py::{name}" for name in tests}
    assert results.provenance.commit


def test_a_run_that_skips_every_test_is_not_written(tmp_path, request):
    """`-k` may choose only tests that this GPU cannot run."""
    whole = Suite(tmp_path / "report.json")
    place = ("test_some.py", 1, "test_skipped")
    whole.pytest_runtest_logreport(
        pytest.TestReport(place[2], place, {}, "skipped", None, when="setup")
    )
    assert whole.outcomes == {"test_skipped": "skipped"}
    whole.pytest_sessionfinish(request.session, pytest.ExitCode.OK)
    assert not whole.file.exists()


@pytest.mark.skipif(not LAST_RUN.exists(), reason=f"{LAST_RUN.name} is not there: make gpu-test")
def test_the_last_run_on_a_gpu_passed():
    results = read(LAST_RUN)
    assert [row.contender for row in results.of("outcome")] == []
    assert results.study["failed"] == 0
    assert results.study["passed"] > 800
    assert results.provenance.gpu is not None
    assert results.provenance.dirty is False
