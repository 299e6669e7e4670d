from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from gpt2_infer.bench import energy
from gpt2_infer.bench.record import encode
from gpt2_infer.bench.study import Contender, RejectedError
from tests.gpt2_infer.bench.common import file_of, kernel
from tests.gpt2_infer.bench.test_study import CELLS, progress, subject, time_cells

UUID = "GPU-12345678-1234-1234-1234-123456789abc"


class Driver:
    """An imitation of pynvml that knows one GPU, and fails at one of its functions."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_at: str = "", reads: tuple[int, ...] = ()) -> None:
        self._fails_at, self._reads = fails_at, iter(reads)

    def _check(self, name: str) -> None:
        if name == self._fails_at:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        self._check("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._check("nvmlDeviceGetHandleByUUID")
        assert uuid == UUID
        return "the handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        self._check("nvmlDeviceGetTotalEnergyConsumption")
        assert handle == "the handle"
        return next(self._reads)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(energy, "gpu_uuid", lambda: UUID)
    monkeypatch.setattr(energy, "MIN_SECONDS", 0.05)
    monkeypatch.setattr(energy, "WARM_UP_SECONDS", 0.01)


def test_joules_per_call_come_from_the_counter_of_the_gpu_in_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver(reads=(0, 5_000, 17_500)))
    row = energy.measure("A", lambda: time.sleep(0.01), "cuda")
    assert row.extra["seconds"] >= 0.05
    assert 1 <= row.extra["calls"] <= 6
    assert row.samples == [pytest.approx(12.5 / row.extra["calls"], rel=1e-5)]


@pytest.mark.parametrize(
    "fails_at",
    ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"],
)
def test_a_driver_that_refuses_is_a_reason(fails_at, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver(fails_at))
    row = energy.measure("A", lambda: None, "cuda")
    assert (row.samples, row.status, row.reason) == ([], "refused", "NVML: Not Supported")
    encode(file_of("decode", [row]))


def test_a_missing_package_and_a_cpu_are_reasons(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "install gpt2-infer[energy]" in energy.measure("A", lambda: None, "cuda").reason
    assert "on NVIDIA GPUs only" in energy.measure("A", lambda: None, "cpu").reason


def test_energy_is_measured_after_all_rounds_and_not_again_after_an_interruption(
    tmp_path, monkeypatch
):
    calls: list[str] = []
    joules = SimpleNamespace(used=0.0)

    def spend(name: str) -> dict[str, float]:
        calls.append(name)
        joules.used += 3.0
        time.sleep(0.02)
        if name == "LATE" and len(calls) > 9:
            raise RejectedError("its text changes from run to run")
        return {"time": 1.0}

    def contenders(cell):
        if cell == CELLS[1]:
            raise KeyboardInterrupt
        for name in ("A", "B", "LATE"):
            yield Contender(kernel(name, []), lambda name=name: spend(name))

    monkeypatch.setattr(energy, "open_counter", lambda device: lambda: joules.used)
    studied = subject(contenders)
    studied.has_energy, studied.device = True, "cuda"
    out = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        time_cells(studied, progress(out))
    assert calls[:9] == ["A", "B", "LATE"] * 3
    assert calls[9:] == sorted(calls[9:])
    spent = len(calls)
    studied.contenders = lambda _: []
    rows = time_cells(studied, progress(out))
    assert len(calls) == spent
    found = {(row.contender, row.metric): row for row in rows}
    assert found["A", "energy"].samples == found["B", "energy"].samples == [3.0]
    assert found["A", "energy"].cell == found["A", "time"].cell
    assert found["LATE", "time"].status == "failed"
    assert ("LATE", "energy") not in found
