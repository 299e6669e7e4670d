from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from gpt2_infer.cli import COMMANDS, main
from gpt2_infer.cli.options import see_only
from gpt2_infer.errors import UnavailableDeviceError
from tests.conftest import ROOT, python, rewrite
from tests.gpt2_infer.bench.common import full_disk
from tests.gpt2_infer.cli.program import DEMO, run, unless


@pytest.mark.parametrize(
    "words", [[*DEMO, "--debug", "--backend", "nothing"], ["--debug", "verify", "nothing"]]
)
def test_debug_shows_the_traceback_and_may_precede_the_command(words):
    with pytest.raises(LookupError):
        main(words)


def test_help_needs_no_torch_and_lists_every_command():
    code = (
        "import sys\n"
        "from gpt2_infer.cli import COMMANDS, main\n"
        "status = [main([*words, '--help']) for words in [[], *([name] for name in COMMANDS)]]\n"
        "print(status, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = python("-c", code)
    *helps, last = done.stdout.splitlines()
    assert last == f"{[0] * (len(COMMANDS) + 1)} False False"
    for name in COMMANDS:
        assert any(re.search(rf"^\W+{name} +[A-Z]", line) for line in helps), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        ("--help >&-", 2, "error: standard output is closed"),
        ("--help >/dev/full", 2, "error: standard output cannot be written: No space left on"),
        ("--help | true", 0, ""),
        ("--model demo --prompt-file - <&-", 2, "--prompt-file -: standard input is closed"),
    ],
)
def test_closed_and_full_streams(words, status, error):
    command = f"set -o pipefail; {sys.executable} -m gpt2_infer {words}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == status, done.stderr
    assert error in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tensors_name_cannot_write_to_the_terminal(capsys, save_checkpoint):
    folder, _ = save_checkpoint()
    rewrite(folder, lambda tensors: tensors | {"\x1b[31mred\x9b": torch.zeros(1)})
    capsys.readouterr()  # transformers' progress bar
    status, _, err = run(capsys, *unless(["--model"]), "--model", str(folder))
    assert status == 2
    assert "unexpected \\x1b[31mred\\x9b" in err
    assert not {"\x1b", "\x9b"} & {*err}


@pytest.mark.parametrize(
    ("fail", "status", "message"),
    [
        (full_disk, 2, "No space left on device\n"),
        (lambda *_, **__: {}["x"], 70, "this is a bug in gpt2-infer: KeyError: 'x' (test_main"),
        (lambda *_, **__: torch.empty(2**62, dtype=torch.uint8), 2, "you tried to allocate"),
    ],
)
def test_an_error_is_one_line_and_a_bug_is_called_a_bug(fail, status, message, capsys, monkeypatch):
    monkeypatch.setattr("gpt2_infer.checkpoint.open_checkpoint", fail)
    found, _, err = run(capsys, *DEMO)
    assert (found, err.count("\n")) == (status, 1)
    assert err.startswith("gpt2-infer: error: ")
    assert message in err


def test_a_terminal_need_not_know_every_character(monkeypatch):
    def output_of(*words: str) -> str:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*DEMO, "--prompt", "The café “x” 🦜", *words]) == 0
        return stream.buffer.getvalue().decode("latin-1")

    assert output_of().startswith("The café ?x? ?")
    assert json.loads(output_of("--json"))["results"][0]["prompt"] == "The café “x” 🦜"


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
