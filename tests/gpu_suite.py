"""The pytest plugin of `make gpu-test`: build every kernel first, and write a results file."""

from __future__ import annotations

import collections
import time
from pathlib import Path

import pytest

# Triton's kernels are tuned for each size.
LONGEST = ("racecheck", "test_conformance[torch", "test_sanitize.py", "TRITON")
MESSAGE_LINES = 8
SLOWEST = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", help="the results file to write")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Suite(Path(config.getoption("--gpu-report"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first: a worker that gets one at the end would keep the others waiting."""

    def place(item: pytest.Item) -> int:
        return next((i for i, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST))

    items.sort(key=place)


class Suite:
    """The whole run, in the process that hands out the tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started = time.perf_counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, list[str]] = {}

    def pytest_sessionstart(self) -> None:
        """Note what is tested, and build on all cores what the workers would wait for."""
        import torch

        from attention_kernels import ladder, list_backends
        from gpt2_infer.bench.environment import provenance

        self.provenance = provenance(besides=self.file)
        if torch.cuda.is_available():
            ladder.build_all("cuda", list_backends())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.messages.setdefault(report.nodeid, []).extend(
                report.longreprtext.splitlines()[-MESSAGE_LINES:]
            )
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> None:
        counts = collections.Counter(self.outcomes.values())
        finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not finished or not counts["passed"] + counts["failed"]:  # without a GPU all are skipped
            return
        from gpt2_infer.bench.record import File, Row

        self.results = File(
            task="gpu-tests",
            study={
                "kind": "tests",
                "workers": session.config.getoption("numprocesses", None) or 1,
                **{name: counts[name] for name in ("passed", "failed", "skipped")},
                "seconds": round(time.perf_counter() - self.started, 1),  # building, too
            },
            provenance=self.provenance,
            rows=[
                Row(contender=test, metric="duration", unit="s", samples=[round(seconds, 1)])
                for test, seconds in self.seconds.most_common(SLOWEST)
            ],
        )
        for test, lines in self.messages.items():
            row = Row(contender=test, metric="outcome", unit="", status="failed")
            row.reason = "\n".join(lines)
            self.results.rows.append(row)
        self.results.write(self.file)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if found := getattr(self, "results", None):
            source = found.provenance
            state = {True: "with uncommitted changes", False: "clean", None: "no checkout"}
            terminalreporter.write_line(
                "{file}: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s; "
                "commit {commit}, {state}".format(
                    file=self.file,
                    commit=source.commit,
                    state=state[source.dirty],
                    **found.study,
                )
            )
