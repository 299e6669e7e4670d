"""The pytest plugin of `make gpu-test`: build every kernel first, then write a results file."""

from __future__ import annotations

import collections
import time
from pathlib import Path

import pytest

# The longest tests come first. Those with small kernels and many waits come last, because they are
# slow while a sanitizer uses the GPU.
FIRST = ("racecheck", "extension", "test_every_tile", "test_sanitize.py", "TRITON")
LAST = "test_every_backend.py"
MESSAGE_LINES = 8
SLOWEST = 10  # the number of tests in the report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", help="the results file to write")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Suite(Path(config.getoption("--gpu-report"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that the workers finish soon."""
    items.sort(
        key=lambda item: (LAST in item.nodeid, not any(part in item.nodeid for part in FIRST))
    )


class Suite:
    """The whole run, in the process that hands out the tests to the workers."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started = time.perf_counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, list[str]] = {}

    def pytest_sessionstart(self) -> None:
        """Note the commit, and build on all cores what the workers would wait for."""
        import torch

        from attention_kernels import ladder, list_backends
        from gpt2_infer.bench.environment import provenance

        self.provenance = provenance()
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
        if not finished or not counts["passed"] + counts["failed"]:
            return
        from gpt2_infer.bench.record import File, Row

        files: collections.Counter[str] = collections.Counter()
        for test, seconds in self.seconds.items():
            files[test.split("::")[0]] += seconds
        durations = [*files.most_common(), *self.seconds.most_common(SLOWEST)]
        results = File(
            task="gpu-tests",
            study={
                "kind": "tests",
                "workers": session.config.getoption("numprocesses", None) or 1,
                **{name: counts[name] for name in ("passed", "failed", "skipped")},
                "seconds": round(time.perf_counter() - self.started, 1),  # including the build
            },
            provenance=self.provenance,
            rows=[
                Row(contender=name, metric="duration", unit="s", samples=[round(seconds, 1)])
                for name, seconds in durations
            ],
        )
        for test, lines in self.messages.items():
            row = Row(contender=test, metric="outcome", unit="", status="failed")
            row.reason = "\n".join(lines)
            results.rows.append(row)
        results.write(self.file)
