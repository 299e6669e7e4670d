"""What is built before torch is imported is what verify() needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attention_kernels import ladder
from attention_kernels.ladder import ahead, build, compilers, header


@pytest.fixture
def built(monkeypatch):
    """What is built ahead: for each call, the ops and the arguments."""
    found = []
    monkeypatch.setattr(
        build, "build_many", lambda *a, label: found.append(([v.op for v in a[0]], *a[1:], label))
    )
    return found


@pytest.mark.parametrize(
    ("device", "capabilities", "target"),
    [
        ("cpu", [(9, 0)], "emulator"),
        ("", [], "emulator"),
        ("", [(9, 0)], "cuda"),
        ("cuda", [(9, 0)], "cuda"),
        ("cuda", [], None),
    ],
)
def test_the_library_of_the_device_is_built(
    device, capabilities, target, first, built, monkeypatch
):
    monkeypatch.setattr(compilers, "capabilities", lambda: capabilities)
    monkeypatch.setattr(compilers, "missing_compiler", lambda _: None)
    monkeypatch.setattr(compilers, "nvcc_architectures", lambda: {"90"})
    ahead.build_ahead(str(first.path), device)
    op = ladder.resolve(str(first.path)).version.op
    ops = [op, f"{op}_races"] if target == "emulator" else [op]
    arch = ("90",) if target == "cuda" else ()
    assert built == ([(ops, target, *arch, "V01_FIRST")] if target else [])


def test_the_worker_finds_it_in_the_cache(first, calls, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, f"cpu:{first.path}")
    ahead.start()
    ahead.wait()
    version = header.of_file(first.path)
    libraries = build.build_many([version, header.race_checked(version)], "emulator")
    assert len(libraries) == 2
    assert len([call for call in calls() if "v01_first" in call]) == 2


def test_nothing_is_built_ahead_unless_asked_for(monkeypatch):
    monkeypatch.delenv(ahead.VARIABLE, raising=False)
    ahead.start()
    ahead.wait()


def test_building_does_not_import_torch():
    code = "import attention_kernels.ladder.ahead, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
