"""Run the conformance suite in a process of its own, which a kernel may hang or kill.

concurrent.futures would say that the process died, but not in which check, and it cannot end a
worker that hangs: hence a process and a pipe of our own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from attention_kernels import ladder
from attention_kernels.conformance import Failure, Report, verify
from attention_kernels.errors import (
    AttentionError,
    UnavailableBackendError,
    UnknownBackendError,
)
from attention_kernels.inspection.child import check_time_limit, ending

TIMEOUT_S = 300.0  # of one check
START_TIMEOUT_S = 300.0  # of imports and loading


def verify_in_child(
    what: str, device: str, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> Report:
    """Call verify() on a backend, by name or version file, in a process of its own.

    A check that takes longer than timeout_s, or ends the process, is a failure, and then nothing
    else is reported. options: verify()'s. A backend that only this process has registered (in a
    test, in a notebook) cannot be found by another: it is verified here, without a time limit.
    Raises UnavailableBackendError where the backend cannot run or be built, ArgumentError for an
    invalid time limit; other errors of verify()'s as an AttentionError.
    """
    check_time_limit(timeout_s)
    spec = ladder.resolve(what)
    spec.prepare(device)  # a build may take longer than a check
    context = multiprocessing.get_context("spawn")  # a fork has none of torch's threads
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_report, args=(sender, what, device, options))
    child.start()
    sender.close()
    running = how = ""
    try:
        with receiver:
            while True:
                limit = timeout_s if running else max(timeout_s, START_TIMEOUT_S)
                if not receiver.poll(limit):
                    how = f"it did not end within {limit:g} s"
                    break
                message = receiver.recv()
                if message is None:
                    return verify(spec, device, **options)
                if isinstance(message, AttentionError):
                    raise message
                if isinstance(message, Report):
                    return message
                running = message
    except EOFError:
        child.join()
    finally:
        child.kill()
        child.join()
    code = child.exitcode or 0
    how = how or f"it {ending(code)}"
    if not running:
        raise UnavailableBackendError(spec.name, f"its suite did not start: {how}")
    killed = code < 0 and "killed by" in how
    return Report(killed=killed, stopped=True, failures=[Failure(running, how)])


def _send_report(sender: Connection, what: str, device: str, options: dict[str, Any]) -> None:
    """Run in the child: send the name of each check, then the report or the error that ended it.

    Send None if this process has no such backend.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    try:
        spec = ladder.resolve(what)
    except UnknownBackendError:
        sender.send(None)
        return
    try:
        sender.send(verify(spec, device, on_check=sender.send, **options))
    except AttentionError as error:
        sender.send(AttentionError(str(error)))  # the others' arguments are not their text


def _die_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
