"""No cheat in a version file, in C++ or in CUDA, passes or is timed as right; an honest one is.

On a GPU, every row of cu_results.py and cu_process.py runs; without one, those that need no CUDA
and are unlike the others.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_kernels.errors import AttentionError
from attention_kernels.judge import suite
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.suite import describe_error, verify
from attention_kernels.judge.worker import open_runner
from attention_kernels.ladder import compilers
from tests.attention_kernels.judge import cu_process, cu_results
from tests.attention_kernels.judge.cu_cheat import Cheat
from tests.attention_kernels.judge.test_clock import fate
from tests.conftest import on_every_device

CHEATS = [*cu_results.CHEATS, *cu_process.CHEATS]
# Each is compiled; without a GPU, the others are slow.
QUICK = {
    "writes_nothing",
    "takes_shared_memory_to_be_zero",
    "asks_for_nine_times_the_budget",
    "ends_with_status_0",
    "prints_a_verdict_when_it_is_loaded",
    "leaves_the_work_to_a_thread",
    "slows_the_clock",
}
# A sample takes 0.1 s on a CPU, which is far more than its answer may take. Many heads on a GPU: of
# those that are judged, one or more are among those that a cheat leaves out.
CASES = {"cpu": Case(320, 32, num_heads=4), "cuda": Case(384, 32, num_heads=16)}


def tried(on: str) -> list[object]:
    """The rows for a device, as test parameters."""
    return [
        pytest.param(
            cheat,
            id=cheat.name,
            marks=[pytest.mark.slow] * (on == "cpu" and cheat.name not in QUICK),
        )
        for cheat in CHEATS
        if cheat.on in (on, "both")
    ]


def without_races(what, device, *, races, **options):
    return open_runner(what, device, **options)


@pytest.fixture
def find(request, monkeypatch):
    """find(cheat, device): what the judge finds of a version file.

    The file has the same path in every run, so that its build is reused.
    """
    folder = request.config.cache.mkdir("cu_cheats")

    def find(cheat: Cheat, device: str) -> str:
        if reason := compilers.missing_compiler("cuda" if device == "cuda" else "emulator"):
            pytest.skip(reason)
        file = folder / f"v01_{cheat.name}_{device}.cu"
        if not file.exists() or file.read_text() != cheat.source():
            file.write_text(cheat.source())
        try:
            if cheat.by == "clock":
                return fate(CASES[device], device, what=str(file))
            # The checks for races need a build of their own, and have tests of their own.
            monkeypatch.setattr(suite, "race_checks", lambda *_: [])
            monkeypatch.setattr(suite, "open_runner", without_races)
            options = {"max_failures": 1, "timeout_s": cheat.timeout_s, "quick": not cheat.caught}
            report = verify(str(file), device, seed=0, **options)
        except AttentionError as error:
            return describe_error(error)
        return "passed" if report.passed else str(report.failures[0])

    return find


def excuse(cheat: Cheat) -> str:
    """Return why the row says nothing on this machine, if so."""
    if "detour" in cheat.code and platform.machine() != "x86_64":
        return "its machine code is for x86-64"
    if "can_open" in cheat.code:
        (may,) = re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
        if int(may, 16) >> 19 & 1:  # CAP_SYS_PTRACE
            return "root may read every process"
    if "can_open(getppid())" in cheat.launch:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and scope.read_text().strip() != "0":
            return "this system lets no process trace its parent"
    return ""


def check(cheat: Cheat, device: str, find: Callable[[Cheat, str], str]) -> None:
    if reason := excuse(cheat):
        pytest.skip(reason)
    found = find(cheat, device)
    assert re.search(cheat.caught, found), found


@pytest.mark.parametrize("cheat", tried("cpu"))
def test_a_cheat_is_caught_in_the_emulator(cheat, find):
    check(cheat, "cpu", find)


@pytest.mark.gpu
@pytest.mark.parametrize("cheat", tried("cuda"))
def test_a_cheat_is_caught_on_a_gpu(cheat, find):
    check(cheat, "cuda", find)


@on_every_device
@pytest.mark.parametrize("by", ["clock", pytest.param("verify", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("busy_machine")
def test_an_honest_one_passes_and_is_timed(by, device, find):
    assert find(Cheat(f"honest_{by}", "", by), device) == "passed"
