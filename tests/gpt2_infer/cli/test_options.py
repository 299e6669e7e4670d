from __future__ import annotations

import os

import pytest
import torch

from gpt2_infer.cli.options import see_only
from gpt2_infer.errors import UnavailableDeviceError


def test_a_gpu_by_number_hides_the_others(monkeypatch):
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: bool(os.environ[name]))
    monkeypatch.setenv(name, "5,7")
    assert see_only("cuda:1") == "cuda"
    assert os.environ[name] == "7"
    with pytest.raises(UnavailableDeviceError, match="cuda:1: "):
        see_only("cuda:1")
    assert os.environ[name] == "7"
