"""Options that take numbers."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import is_dataclass

import pytest
import torch
from cyclopts import Parameter

from gpt2_infer.cli import COMMANDS, extras, main, parameters
from gpt2_infer.cli.options import see_only
from gpt2_infer.errors import UnavailableDeviceError

REQUIRED = {
    **{name: ["x"] for name in ("accesses", "predict", "verify")},
    **{"batch": ["x", "--out", "y"], "compare": ["--out", "y"], "diverge": ["x", "y"]},
}
ZERO_IS_TAKEN = ("--top-k", "--seed", "--shared")


def numeric_options() -> list[tuple[str, str]]:
    """The (command, option) of every option that takes limited numbers, one or several."""
    found = []
    for command in COMMANDS:
        function = getattr(importlib.import_module(f"gpt2_infer.cli.{command}"), command)
        every = parameters(function)
        for group in (one.default for one in [*every.values()] if is_dataclass(one.default)):
            every |= parameters(type(group))
        for name, one in every.items():
            named = [extra.name for extra in extras(one) if isinstance(extra, Parameter)]
            option = next((names[0] for names in named if names), f"--{name.replace('_', '-')}")
            if "msgspec.Meta(" in str(one.annotation) and option not in ("--arch", "--batch-size"):
                found.append((command, option))
    return found


@pytest.mark.parametrize("value", ["x", "", "nan", "inf", "-1", "0", "1e400", "9" * 30, "9" * 5000])
def test_a_number_out_of_range_is_refused_before_any_work(value, capsys):
    options = numeric_options()
    assert len(options) > 20
    for command, option in options:
        if value == "0" and option in ZERO_IS_TAKEN:
            continue
        assert main([command, *REQUIRED.get(command, []), f"{option}={value}"]) == 2
        err = capsys.readouterr().err
        assert re.search(rf"{option}: must be a|Parameter {option} requires", err), err
        assert err.count("\n") == 1
        assert len(err) < 250


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
