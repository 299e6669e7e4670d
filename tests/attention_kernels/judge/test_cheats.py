"""No cheat of the table passes or is timed as right; an honest kernel is both."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_kernels.errors import AttentionError
from attention_kernels.judge import suite
from attention_kernels.judge.calls import describe_error
from attention_kernels.judge.clock import Clock, Numbers, RejectedTimeError
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import KERNEL_ERRORS, judged, run_check, verify
from attention_kernels.judge.worker import open_runner
from attention_kernels.ladder import compilers
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


def ways() -> Iterator[Any]:
    """Yield each way in which a row is tried: the row, a device, and whether by CUDA graphs."""
    for cheat in CHEATS:
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


def fate(case, device, what):
    """What the judge finds of a backend: checked once, timed, and its clocks compared."""
    with contextlib.closing(open_runner(what, device)) as runner:
        try:
            verdict = run_check(runner, judged(runner, case))
            if not verdict.passed:
                return str(verdict)
            clock = Clock(runner, Numbers(case, 8), floor_us=0.01)
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
    # The checks for races need a build of their own, and have tests of their own.
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
