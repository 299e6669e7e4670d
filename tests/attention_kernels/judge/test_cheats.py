"""No cheat of the table passes or is timed as right; an honest kernel is both."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_kernels import registry
from attention_kernels.errors import AttentionError
from attention_kernels.judge import process, suite, worker
from attention_kernels.judge.calls import describe_error
from attention_kernels.judge.clock import Clock, Numbers
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import KERNEL_ERRORS, judged, run_check, verify
from attention_kernels.judge.worker import RejectedTimeError, open_runner
from attention_kernels.ladder import compilers
from gpt2_infer.bench.kernels import Kernels
from gpt2_infer.bench.record import KernelCell
from gpt2_infer.bench.study import KernelStudy
from tests.attention_kernels.judge import cuda_cheats  # noqa: F401 - adds its rows
from tests.attention_kernels.judge.cheats import CHEATS, Cheat
from tests.conftest import version_file

# A sample takes 0.1 s in the emulator, which is far more than its answer may take. Many heads on a
# GPU: of those that are judged, one or more are among those that a cheat leaves out.
EMULATED, SMALL = Case(320, 32, num_heads=4), Case(64, 32, num_heads=2)
ON_GPU = Case(384, 32, num_heads=16)
MACHINE_CODE = "slows_the_clock", "patches_cudas_clock"
DECODE = DecodeCase(32, lengths=(9, 200), max_seqlen=200)
PLUGIN = """
from attention_kernels import registry
from tests.attention_kernels.judge.cheats import CHEATS
(row,) = (row for row in CHEATS if row.name == {!r})
registry.add(row.spec(device_types=("cuda", "cpu"), cuda_graphs={}))
"""


@pytest.fixture
def short_samples() -> None:
    """Samples keep their length here: in shorter ones, more is forgiven."""


def ways() -> Iterator[Any]:
    """Yield each way in which a row is tried: the row, a device, and whether by CUDA graphs."""
    for cheat in CHEATS:
        if cheat.by == "rivals":
            continue
        for device in cheat.on:
            is_plugin = cheat.by == "clock" and not cheat.source
            for graphs in (True, False) if is_plugin and device == "cuda" else (False,):
                marks = [pytest.mark.gpu] * (device == "cuda")
                marks += [pytest.mark.slow] * (device == "cpu" and cheat.slow)
                name = f"{cheat.name}-{device}{'-graph' * graphs}"
                yield pytest.param(cheat, device, graphs, id=name, marks=marks)


@pytest.mark.parametrize(("cheat", "device", "graphs"), [*ways()])
def test_a_cheat_is_caught(cheat, device, graphs, plugin, monkeypatch, request, record_property):
    if reason := excuse(cheat, device):
        pytest.skip(reason)
    if cheat.caught == "passed":
        request.getfixturevalue("busy_machine")
    if "broke off" in cheat.caught:  # its process does not end
        monkeypatch.setattr(process, "ENDING_TIMEOUT_S", 0.1)
    if cheat.source:
        what = str(version_file(f"v01_{cheat.name}.cu", cheat.source))
    else:
        plugin(PLUGIN.format(cheat.name, graphs))
        what = cheat.name if cheat.by == "clock" else cheat.spec()
    precision = torch.get_float32_matmul_precision()
    try:
        if cheat.by == "clock":
            case = ON_GPU if device == "cuda" else EMULATED if cheat.source else SMALL
            found = fate(DECODE if cheat.name.startswith("decode") else case, device, what)
        else:
            found = verdict(cheat, device, what, monkeypatch)
    except AttentionError as error:
        found = describe_error(error)
    finally:
        torch.set_float32_matmul_precision(precision)
    record_property("fate", found)
    assert re.search(cheat.caught, found), found


@pytest.mark.parametrize("cheat", [x for x in CHEATS if x.by == "rivals"], ids=lambda x: x.name)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_a_rival_is_stopped_while_another_is_timed(cheat, plugin, clean_registry, monkeypatch):
    plugin(PLUGIN.format(cheat.name, False))
    monkeypatch.setitem(worker.REPEATED_S, "cpu", 0.02)
    monkeypatch.setattr(registry, "_discovered", False)  # the study looks for plug-ins again
    study = KernelStudy(backends=[cheat.name], cells=[KernelCell(8, 1, 1, 32)], device="cpu")
    subject = Kernels(study)
    with subject.processes:
        baseline, rival = subject.contenders(subject.cells[0])
        for _ in range(2):
            rival.sample()
            group = subject.processes._open[rival.row.contender]._process._process.pid
            assert wait_for(is_stopped, group)
            before = members(group)
            baseline.sample()
            assert members(group) == before
    assert wait_for(has_ended, group)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_a_stopped_worker_ends_with_the_judge():
    rests = (
        "from attention_kernels import child\nfrom attention_kernels.judge import worker\n"
        "child.start_server(fork=True)\nrunner = worker.Worker('NAIVE_PYTORCH', 'cpu')\n"
        "runner.rest()\nprint(runner._process._process.pid, flush=True)\nworker.time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", rests], stdout=subprocess.PIPE) as judge:
        group = int(judge.stdout.readline())
        assert wait_for(is_stopped, group)
        judge.kill()
    assert wait_for(has_ended, group)


def members(group: int) -> list[tuple[str, int]]:
    """The state and the processor time of each process of a group, but zombies."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *fields = file.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                found.append((state, int(fields[8]) + int(fields[9])))
    return found


def is_stopped(group):
    return {state for state, _ in members(group)} == {"T"}


def has_ended(group):
    return not members(group)


def wait_for(condition, group, seconds=60):
    end = time.monotonic() + seconds
    while not (met := condition(group)) and time.monotonic() < end:
        time.sleep(0.01)
    return met


def fate(case, device, what):
    """What the judge finds of a backend: checked once, timed, and its clocks compared."""
    with contextlib.closing(open_runner(what, device)) as runner:
        try:
            verdict = run_check(runner, judged(runner, case))
            if not verdict.passed:
                return str(verdict)
            clock = Clock(runner, Numbers(case, 8, runner.device), floor_us=0.01)
            for _ in range(3):
                clock.sample()
            clock.check()
        except (RejectedTimeError, *KERNEL_ERRORS) as error:
            return describe_error(error)
        return "passed"


def verdict(cheat, device, what, monkeypatch):
    """What the suite finds, in those of its cases in which the row is wrong."""
    if "call" not in cheat.caught:  # one of the cases catches it
        monkeypatch.setattr(suite, "REPEATS", 50)
    if "race: " not in cheat.caught:  # the checks for races need a build of their own
        monkeypatch.setattr(suite, "race_checks", lambda *_: [])
        monkeypatch.setattr(suite, "open_runner", without_races)
    cases = suite.cases_for
    monkeypatch.setattr(suite, "cases_for", lambda *a, **o: [*filter(cheat.wrong, cases(*a, **o))])
    options = {"max_failures": 1, "timeout_s": cheat.timeout_s, "quick": cheat.caught == "passed"}
    report = verify(what, device, seed=0, **options)
    return "passed" if report.passed else f"{report.failures[0].what}: {report.failures[0].why}"


def without_races(what, device, *, races, **options):
    return open_runner(what, device, **options)


def excuse(cheat: Cheat, device: str) -> str:
    """Return why the row says nothing on this machine, if so."""
    if cheat.source and (
        reason := compilers.missing_compiler("cuda" if device == "cuda" else "emulator")
    ):
        return reason
    if cheat.name in MACHINE_CODE and platform.machine() != "x86_64":
        return "its machine code is for x86-64"
    if cheat.name.startswith("is_right_if_it_can"):
        (may,) = re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
        if int(may, 16) >> 19 & 1:  # CAP_SYS_PTRACE
            return "root may read every process"
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if "server" in cheat.name and scope.exists() and scope.read_text().strip() != "0":
            return "this system lets no process trace its parent"
    return ""


def test_an_honest_kernel_is_timed():
    """Another program on the machine may make the clocks differ, but not every time."""
    for _ in range(10):
        found = fate(Case(384, 64, num_heads=4), "cpu", "NAIVE_PYTORCH")
        if not found.startswith("the clocks disagree"):
            break
    assert found == "passed"
