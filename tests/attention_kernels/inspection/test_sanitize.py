"""The sanitizers: AddressSanitizer on emulated kernels, NVIDIA's compute-sanitizer on a GPU.

On a GPU every version of every ladder and Triton's kernels run under memcheck, which looks for bad
accesses. Most versions also run under racecheck, which looks for races in shared memory. Both tools
are first shown to find the faults planted in the negative controls.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_kernels import BackendSpec, get_backend, ladder, list_backends
from attention_kernels.child import Ended
from attention_kernels.errors import UnavailableBackendError, UnsupportedError
from attention_kernels.inspection import sanitize as sanitizers
from attention_kernels.inspection.sanitize import TOOLS, compute_sanitizer, sanitize, tools_of
from attention_kernels.ladder import compilers, header
from tests.attention_kernels.backends.common import changed

NEGATIVE = Path(__file__).parents[1] / "negative"
CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
READ = "Invalid __global__ read of size 4 bytes"
BARRIER = "Barrier error detected. Divergent thread(s) in block"
RACE = (
    "Error: Race reported between Read access at a.cu:33",
    "and Write access at a.cu:24 [4 hazards]",
)


def test_a_dropped_barrier_shows_in_another_order_of_threads(monkeypatch):
    """The suite's check for races, which names both of its lines, is in test_verify.py."""
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", "")  # so that it is restored after the test
    with pytest.raises(SystemExit, match=sanitizers.ORDER):
        sanitizers._run(ladder.resolve(str(NEGATIVE / "v01_dropped_barrier.cu")), "cpu")


@pytest.mark.parametrize(
    ("tool", "status", "out", "fault"),
    [
        ("memcheck", 0, CLEAN["memcheck"], None),
        ("racecheck", 0, CLEAN["racecheck"], None),
        ("memcheck", 0, f"========= {READ}\n========= ERROR SUMMARY: 1 error", READ),
        ("memcheck", 1, f"{CLEAN['memcheck']}\nit crashed", "it crashed"),
        ("racecheck", 0, CLEAN["memcheck"], CLEAN["memcheck"]),  # it has seen no kernel
        ("racecheck", 77, "=".join(f"======== {x}\n" for x in (*RACE, RACE[1])), " ".join(RACE)),
        ("synccheck", 77, f"========= {BARRIER}\n========= ERROR SUMMARY: 1 error", BARRIER),
    ],
)
def test_the_output_of_compute_sanitizer_is_understood(tool, status, out, fault, monkeypatch):
    done = Ended(status, f"ended with exit status {status}", out)
    monkeypatch.setattr(sanitizers, "_worker", lambda *_: done)
    expected = [] if fault is None else [f"{tool}: {fault}"]
    assert compute_sanitizer(tool, ["CUSTOM_CUDA_VERSION_1"]) == expected


def test_each_schedule_also_runs_where_races_are_reported(monkeypatch):
    asked = []

    def worker(arguments, *_):
        asked.append(arguments[2:])
        return Ended(0, "", "")

    monkeypatch.setattr(sanitizers, "_worker", worker)
    assert sanitize(["CUSTOM_CUDA_VERSION_1"], "cpu", schedules=3) == []
    assert asked == [[build, "3", "CUSTOM_CUDA_VERSION_1"] for build in ("cpu", "races")]


def test_a_race_between_blocks_is_a_fault(monkeypatch):
    """Blocks overlap by a row, in which they write the same."""
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", "")
    file = get_backend("CUSTOM_CUDA_VERSION_1").version.path
    spec = changed(file, ("m_block * kBlockM;", "max(0, m_block * kBlockM - 1);"))
    spec = ladder.backend(spec.name, "test", header.race_checked(spec.version))
    with pytest.raises(SystemExit, match=r"race: lane .* of block \(.*, which lane .* writes it"):
        sanitizers._run(spec, "races")


@pytest.mark.slow
def test_the_sanitizer_passes_correct_kernels_and_finds_faults():
    """Only the last kernel has a bad access: a run ends at its first fault.

    The first one uses all kinds of memory; the second decodes, and its fault is of another kind.
    """
    names = ("v05_unscaled_join", "v03_out_of_bounds_read")
    decodes, beyond = (str(NEGATIVE / f"{name}.cu") for name in names)
    (fault,) = sanitize(["FLASH_ATTENTION_1_TENSOR_CORE", decodes, beyond], "cpu")
    place = "v03_out_of_bounds_read.cu:4"  # K's or V's
    assert fault.startswith(f"AddressSanitizer: heap-buffer-overflow at {place}")


def test_what_cannot_be_sanitized_is_refused(monkeypatch):
    with pytest.raises(UnsupportedError, match="only emulated kernels have a sanitizer"):
        sanitize(["NAIVE_PYTORCH"], "cpu")
    monkeypatch.setattr(compilers, "execute", lambda *_: Ended(0, "", "libasan.so\n"))
    with pytest.raises(UnavailableBackendError, match="has no AddressSanitizer"):
        sanitize(["CUSTOM_CUDA_VERSION_1"], "cpu")


@pytest.mark.parametrize(("number", "tools"), [(25, TOOLS), (36, TOOLS[:1]), (37, TOOLS[:1])])
def test_racecheck_is_for_kernels_that_run_before_compute_capability_9(number, tools):
    assert tools_of(get_backend(f"CUSTOM_CUDA_VERSION_{number}")) == tools


# On a GPU

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]
# Racecheck takes minutes for a kernel of Triton's, and half a minute for one of the ablation, which
# the emulator checks for races.
WITHOUT_RACECHECK = {"triton", "ablation"}
USUALLY_MOST = 7  # backends in one process


@pytest.mark.parametrize(
    ("tool", "control"),
    [
        pytest.param("memcheck", "v03_out_of_bounds_read.cu", marks=on_gpu),
        pytest.param("racecheck", "v01_dropped_barrier.cu", marks=on_gpu),
    ],
)
def test_planted_faults_are_found(tool, control):
    (fault,) = compute_sanitizer(tool, [str(NEGATIVE / control)])
    assert fault.startswith(f"{tool}: ")


def has_racecheck(spec: BackendSpec) -> bool:
    return spec.family not in WITHOUT_RACECHECK and "racecheck" in tools_of(spec)


def shares() -> Iterator[Any]:
    """Yield every kernel, in parts of a family for each tool."""

    def family(spec: BackendSpec) -> str:
        return spec.family

    ours = [s for s in list_backends() if s.name in ladder.versions() or s.family == "triton"]
    on_a_gpu = sorted((spec for spec in ours if "cuda" in spec.device_types), key=family)
    for name, group in itertools.groupby(on_a_gpu, family):
        specs = [*group]
        for tool in TOOLS:
            names = [spec.name for spec in specs if tool == "memcheck" or has_racecheck(spec)]
            count = -(-len(names) // (1 if name == "triton" else USUALLY_MOST))
            for part in range(count):
                values = tool, names[part::count]
                yield pytest.param(*values, id=f"{name}-{part}-{tool}", marks=on_gpu)


@pytest.mark.parametrize(("tool", "names"), [*shares()])
def test_compute_sanitizer_finds_no_fault(tool, names):
    assert compute_sanitizer(tool, names) == []
