"""The pytest plugin of `make cheats`: write what became of each cheat and of each honest kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import gpu_suite

if TYPE_CHECKING:
    from gpt2_infer.bench.record import Row

TESTS = (
    "tests/attention_kernels/judge/test_cheats.py::test_a_cheat_is_caught",
    "tests/attention_kernels/judge/hundred.py::test_an_honest_kernel_is_no_false_alarm",
    "tests/attention_kernels/judge/hundred.py::test_a_shipped_kernel_is_no_false_alarm",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cheats-report", metavar="FILE", help="the results file to write")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Suite(Path(config.getoption("--cheats-report"))))


class Suite(gpu_suite.Suite):
    """The whole run, in the process that hands out the tests to the workers."""

    def pytest_sessionstart(self) -> None:
        """Note the commit."""
        from gpt2_infer.bench.environment import provenance

        self.provenance = provenance()
        self.fates: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        if report.skipped:
            self.fates[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.when == "call":
            self.fates[report.nodeid] = dict(report.user_properties).get("fate", "")

    def rows(self) -> Iterator[Row]:
        """Yield a row for each way in which a kernel was tried, or is on another machine."""
        from gpt2_infer.bench.record import Row
        from tests.attention_kernels.judge.hundred import ALL, SHIPPED
        from tests.attention_kernels.judge.test_cheats import ways

        cheats, honest, shipped = TESTS
        for way in ways():
            cheat, device, graphs = way.values
            extra = {"by": cheat.by, "is_harmless": cheat.caught == "passed"}
            metric = "honest" if "honest" in cheat.name else "fate"
            row = Row(contender=cheat.name, metric=metric, unit="", extra=extra)
            row.cell = {"device": device, "graphs": graphs}
            yield self.with_fate(row, f"{cheats}[{way.id}]")
        for test, names, devices in ((honest, ALL, ["cpu"]), (shipped, SHIPPED, ["cpu", "cuda"])):
            for name, device in itertools.product(names, devices):
                row = Row(contender=name, cell={"device": device}, metric="honest", unit="")
                yield self.with_fate(row, f"{test}[{name}{f'-{device}' * (test == shipped)}]")

    def with_fate(self, row: Row, test: str) -> Row:
        """Return the row with what its test found, or why there was none."""
        outcome = self.outcomes.get(test, "skipped")
        needs_gpu = row.cell["device"] == "cuda" and self.provenance.gpu is None
        left_out = "it needs a GPU" if needs_gpu else "this run left it out"
        row.status = {"passed": "ok", "failed": "failed", "skipped": "refused"}[outcome]
        row.reason = self.fates.get(test, left_out) or "\n".join(self.messages[test])
        return row

    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        from gpt2_infer.bench.record import File
        from gpt2_infer.bench.show.documents import score
        from tests.attention_kernels.judge.corpora import CORPORA

        study = {"kind": "tests", "corpora": CORPORA}
        File(task="cheats", study=study, provenance=self.provenance, rows=[*self.rows()]).write(
            self.file
        )
        score(self.file)
