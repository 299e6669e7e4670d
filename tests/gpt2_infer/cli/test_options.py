"""Options that take numbers, or nothing."""

from __future__ import annotations

import os
import re

import pytest
import torch

from gpt2_infer.cli.options import see_only
from gpt2_infer.errors import UnavailableDeviceError
from tests.gpt2_infer.cli.program import run

NUMBERS = (
    *("--max-new-tokens", "--top-k", "--seed", "batch x --out y --workers", "verify x --timeout"),
    *("compare --out y --rounds", "compare --out y --seqlens", "predict x --shared"),
)


@pytest.mark.parametrize(
    "value", ["x", "", "nan", "inf", "-1", "0", "1.5", "1e400", "9" * 30, "9" * 5000]
)
@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_out_of_range_is_refused_before_any_work(option, value, capsys):
    *words, name = option.split()
    if value == "0" and name in ("--top-k", "--seed", "--shared"):
        return
    if value == "1.5" and name == "--timeout":
        return
    status, _, err = run(capsys, *words, f"{name}={value}")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(rf"{name}: must be a|Parameter {name} requires", err), err
    assert len(err) < 250


@pytest.mark.parametrize("word", ["none", "NULL"])
@pytest.mark.parametrize(
    "option",
    [
        "predict x --dtype",
        "predict x --grid",
        "verify x --device",
        "--seed",
        "batch x --out y --shard",
    ],
)
def test_no_word_means_that_an_option_is_not_given(option, word, capsys):
    """Cyclopts would read it as None, the default of these options."""
    *words, name = option.split()
    status, _, err = run(capsys, *words, name, word)
    assert status == 2
    assert word in err
    assert name in err


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
