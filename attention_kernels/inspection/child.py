"""Run a child process with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

PROGRESS_AFTER_S = 5.0


def run(
    command: Sequence[str],
    *,
    label: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and show the time that it takes on a terminal.

    The child and its own children are killed when the time is up, and when this process is
    interrupted. Raises subprocess.TimeoutExpired.
    """
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
