"""A command in a child process: a kernel may end its process, and someone must say so."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable

from attention_kernels.child import end_with_parent, ending
from gpt2_infer.cli.console import EXIT_BAD_INPUT, EXIT_INTERRUPTED, prepare_streams, print_error

HINT = "if a kernel is at fault, `gpt2-infer verify BACKEND --sanitize` shows where"


def watched(run: Callable[[], int]) -> int:
    """Call a function in a forked child, and return its result in both processes.

    If the child ends before it has returned or raised, print how, and return EXIT_BAD_INPUT.
    """
    came_back = mmap.mmap(-1, 1)  # shared: an exit status of 0 may be a kernel's own exit(0)
    waited = {signal.SIGCHLD, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        end_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        try:
            return run()
        finally:
            came_back[0] = 1
    done = 0
    while not done:
        received = signal.sigwaitinfo(waited)
        if received.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(child, os.WNOHANG)
        elif received.si_code <= 0:  # from a process; a terminal's Ctrl-C reaches the child as well
            os.kill(child, signal.SIGINT)
    status = os.waitstatus_to_exitcode(status)
    if status == -signal.SIGINT:
        return EXIT_INTERRUPTED
    if came_back[0] and status >= 0:
        return status
    early = "" if status < 0 else " before its work was done"
    prepare_streams()
    print_error("gpt2-infer", f"its process {ending(status)}{early}; {HINT}")
    return EXIT_BAD_INPUT
