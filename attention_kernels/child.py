"""Run a command with a time limit and say how it ended; start the server of workers."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util

from attention_kernels.errors import ArgumentError

FD = "/proc/self/fd/"
_MEANINGS = {
    signal.SIGSEGV: "an invalid memory access",
    signal.SIGBUS: "an invalid memory access",
    signal.SIGABRT: "after a failed assertion or an uncaught exception, for example",
    signal.SIGFPE: "an integer division by zero",
    signal.SIGILL: "an invalid instruction, or code marked as unreachable",
    signal.SIGKILL: "from outside, most likely by the system for lack of memory",
}
# For `python -c`, the current folder is first on the path, and an http.py there would be imported.
# Python 3.10 has no option -P. What multiprocessing appends, "-c" and a program, becomes sys.argv.
_SAFELY = "import sys; sys.path = [*filter(None, sys.path)]; exec(sys.argv.pop())"


def hide() -> None:
    """Deny other processes of this user to read this one's memory or to trace it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_server(*, fork: bool = False) -> None:
    """Start the server that the judge's processes are forked from, unless it runs.

    Modules in the current folder are not imported there. fork: fork this process, which has all
    modules imported and no thread, instead of starting an interpreter.
    """
    hide()
    flags, spawn = util._args_from_interpreter_flags, util.spawnv_passfds  # type: ignore[attr-defined]
    util._args_from_interpreter_flags = lambda: [*flags(), "-c", _SAFELY]  # type: ignore[attr-defined]
    util.spawnv_passfds = _fork if fork else spawn  # type: ignore[assignment]
    try:
        forkserver.set_forkserver_preload(["attention_kernels.judge.server"])
        forkserver.ensure_running()
    finally:
        util._args_from_interpreter_flags = flags  # type: ignore[attr-defined]
        util.spawnv_passfds = spawn


def _fork(_: str, command: Sequence[str], fds: Sequence[int]) -> int:
    """Run multiprocessing's program, the last word of a command, in a fork of this process."""
    if process := os.fork():
        return process
    try:
        first = 3
        for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, fd)
            first = fd + 1
        sys.argv = [""]
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
        exec(command[-1])
    finally:
        os._exit(1)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    """Exit status; negative after a signal."""
    how: str
    """How it ended, as a predicate: "was killed by SIGSEGV (an invalid memory access)"."""
    out: str = ""
    err: str = ""

    @property
    def output(self) -> str:
        """Its standard output, followed by its standard error."""
        return self.out + self.err


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Ended:
    """Run a command in a folder until it ends or has used up its time, in seconds.

    Kills the child and its own children at the time limit and when this process is interrupted.
    The child inherits the file descriptors that the command names, as /proc/self/fd/N. Raises
    ArgumentError for an invalid time limit.
    """
    check_time_limit(timeout_s)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            pass_fds=[int(x.removeprefix(FD)) for x in command if x.startswith(FD)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Ended(127, f"could not be started: {error}")
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Ended(-signal.SIGKILL, f"did not end in {timeout_s:g} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Ended(process.returncode, ending(process.returncode), out, err)


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
