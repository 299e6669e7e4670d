"""How a child process ended, in words."""

from __future__ import annotations

import sys

import pytest

from attention_kernels import ArgumentError, child


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("sys.exit(3)", "ended with exit status 3"),
        ("os.abort()", "was killed by SIGABRT (after a failed assertion"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (an invalid memory access"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (from outside, most likely"),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40"),
        ("import time; time.sleep(60)", "did not end in 1 s"),
    ],
)
def test_the_end_of_a_process_is_described(does, words):
    command = [sys.executable, "-S", "-c", f"import os, sys; {does}"]
    done = child.run(command, timeout_s=1 if "did not" in words else 60)
    assert done.how.startswith(words)


def test_a_missing_program_is_described():
    assert "No such file" in child.run(["/no/such/program"], timeout_s=60).how


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_invalid_time_limits_are_refused(seconds):
    with pytest.raises(ArgumentError, match="the time limit must be a positive number of seconds"):
        child.run(["true"], timeout_s=seconds)


def test_a_worker_that_is_killed_leaves_no_semaphore():
    program = (
        "import multiprocessing, os; from attention_kernels import child; multiprocessing."
        "set_start_method('forkserver'); child.run(['true'], timeout_s=60); os._exit(0)"
    )
    assert child.run([sys.executable, "-c", program], timeout_s=60).output == ""
