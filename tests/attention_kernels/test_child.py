"""How a child process ended, in words."""

from __future__ import annotations

import sys

import pytest

from attention_kernels import ArgumentError, child


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("sys.exit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (an invalid memory access"),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40"),
        ("os.system('sleep 60')", "did not end in 1 s"),
    ],
)
def test_the_end_of_a_process_is_described(does, words):
    command = [sys.executable, "-S", "-c", f"import os, sys; {does}"]
    done = child.run(command, timeout_s=1 if "did not" in words else 60)
    assert done.how.startswith(words)


def test_a_missing_program_and_an_invalid_time_limit_are_described():
    assert "No such file" in child.run(["/no/such/program"], timeout_s=60).how
    for seconds in (0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="the time limit must be a positive number of sec"):
            child.run(["true"], timeout_s=seconds)
