"""Options that take numbers."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from gpt2_infer.cli import COMMANDS, main, parse
from gpt2_infer.cli.options import Parser, current_family, see_only
from gpt2_infer.errors import UnavailableDeviceError

CHECKED_LATER = ("--temperature", "--top-p")  # Sampling checks these
ZERO_IS_TAKEN = ("--top-k", "--seed", "--shared")


@pytest.fixture
def numeric_options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The (command, option) of every option that takes a number."""
    found: list[tuple[str, str]] = []

    def see(parser: Parser, _: object) -> argparse.Namespace:
        found.extend(
            (parser.prog.split()[-1], action.option_strings[0])
            for action in parser._actions
            if action.type not in (None, Path)
        )
        return argparse.Namespace()

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", see)
        for command in COMMANDS:
            parse([command])
    return [(command, option) for command, option in found if option not in CHECKED_LATER]


@pytest.mark.parametrize("value", ["x", "", "nan", "inf", "-1", "0", "1e400", "9" * 30, "9" * 5000])
def test_a_number_out_of_range_is_refused_before_any_work(value, numeric_options, capsys):
    assert len(numeric_options) > 20
    for command, option in numeric_options:
        if value == "0" and option in ZERO_IS_TAKEN:
            continue
        with pytest.raises(SystemExit) as caught:
            main([command, f"{option}={value}"])
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert f"argument {option}: must be a" in err
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


def test_one_round_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--out", "r.json", "--rounds", "1"])
    assert "--rounds: must be an integer from 2 to 2147483647, not 1" in capsys.readouterr().err


def test_a_former_name_still_works_and_names_the_present_one(capsys):
    _, arguments = parse(["generate", "--no-cuda-graphs"])
    assert arguments.engine == "eager"
    instead = "gpt2-infer generate: warning: --no-cuda-graphs is deprecated: use --engine eager\n"
    assert capsys.readouterr().err == instead
    assert current_family("wmma-fa2") == "wmma_fa2"
    instead = "gpt2-infer: warning: the family wmma-fa2 is deprecated: use wmma_fa2\n"
    assert capsys.readouterr().err == instead
    assert current_family("fp32") == "fp32"
    assert not capsys.readouterr().err
