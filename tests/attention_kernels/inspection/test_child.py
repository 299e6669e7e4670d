"""How a child process ended, in words."""

from __future__ import annotations

import sys

import pytest

from attention_kernels import ArgumentError
from attention_kernels.inspection import child


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("sys.exit(3)", "ended with exit status 3"),
        ("os.abort()", "was killed by SIGABRT (after a failed assertion"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (an invalid memory access"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (from outside, most likely"),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(does, words):
    command = [sys.executable, "-S", "-c", f"import os, sys; {does}"]
    done = child.run(command, label="ending", timeout_s=60)
    assert child.ending(done.returncode).startswith(words)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_a_number_of_seconds(seconds):
    with pytest.raises(ArgumentError, match="the time limit must be a positive number of seconds"):
        child.run(["true"], label="nothing", timeout_s=seconds)
