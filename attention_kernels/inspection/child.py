"""Run a child process with a time limit, and describe how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from attention_kernels.errors import ArgumentError

PROGRESS_AFTER_S = 5.0
_MEANINGS = {
    signal.SIGSEGV: "an invalid memory access",
    signal.SIGBUS: "an invalid memory access",
    signal.SIGABRT: "after a failed assertion or an uncaught exception, for example",
    signal.SIGFPE: "an integer division by zero",
    signal.SIGILL: "an invalid instruction, or code marked as unreachable",
    signal.SIGKILL: "from outside, most likely by the system for lack of memory",
}


def run(
    command: Sequence[str],
    *,
    label: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, showing the elapsed time on a terminal.

    Kills the child and its own children at the time limit and when this process is interrupted.
    Raises subprocess.TimeoutExpired, and ArgumentError for an invalid time limit.
    """
    check_time_limit(timeout_s)
    from tqdm import tqdm

    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s
    try:
        with tqdm(
            desc=label,
            bar_format="{desc} ... {elapsed}",
            delay=PROGRESS_AFTER_S,
            disable=None,
            leave=False,
        ) as bar:
            while True:
                left = deadline - time.monotonic()
                try:
                    out, err = process.communicate(timeout=min(1.0, max(0.0, left)))
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if left <= 1.0:
                        raise subprocess.TimeoutExpired(command, timeout_s) from None
                    bar.update()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def check_time_limit(timeout_s: float) -> None:
    """Raise ArgumentError for an invalid time limit."""
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"the time limit must be a positive number of seconds, not {timeout_s}")


def ending(status: int) -> str:
    """Describe how a process ended, from its exit status (negative after a signal)."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
    meaning = _MEANINGS.get(signal.Signals(-status))
    return f"was killed by {name}" + (f" ({meaning})" if meaning else "")
