from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from gpt2_infer.bench import energy

WATTS = 250


class Driver:
    """An imitation of pynvml that knows one GPU, which takes WATTS."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if handle != "GPU-1234":
            raise self.NVMLError("Not Supported")
        return int(time.perf_counter() * 100) * WATTS * 10  # millijoules, every 10 ms


class Stuck(Driver):
    """One whose counter stands still, as that of a shared GPU may."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return 0


@pytest.mark.parametrize(
    ("device", "uuid", "driver", "reason"),
    [
        ("cuda", "1234", Driver(), ""),
        ("cuda", "5678", Driver(), "NVML: Not Supported"),
        ("cuda", "1234", Stuck(), "stands still"),
        ("cuda", "1234", None, "install gpt2-infer[energy]"),
        ("cpu", "", None, "on NVIDIA GPUs only"),
    ],
)
def test_joules_per_call_come_from_the_counter_of_the_gpu_in_use(
    device, uuid, driver, reason, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(energy, "MIN_SECONDS", 0.3)
    monkeypatch.setattr(energy, "WARM_UP_SECONDS", 0.01)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    row = energy.measure("A", lambda: time.sleep(0.01), device)
    if reason:
        assert (row.samples, row.status) == ([], "refused")
        assert reason in row.reason
    else:
        assert row.extra["seconds"] >= 0.3
        per_call = WATTS * row.extra["seconds"] / row.extra["calls"]
        assert row.samples == [pytest.approx(per_call, rel=0.3)]
