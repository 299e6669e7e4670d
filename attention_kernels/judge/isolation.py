"""Run the conformance suite in a separate process, which a kernel may hang or kill.

concurrent.futures reports that a process died, but not in which check, and it cannot end a worker
that hangs. Hence our own process and pipe.
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
from attention_kernels.child import check_time_limit, ending
from attention_kernels.errors import (
    AttentionError,
    UnavailableBackendError,
    UnknownBackendError,
    describe,
)
from attention_kernels.judge.conformance import Failure, Report, verify

TIMEOUT_S = 300.0  # for one check
LOADING_TIMEOUT_S = 1800.0  # for imports and a build with nvcc
LOADING = "loading it"


def verify_in_child(
    what: str, device: str, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> Report:
    """Call verify() on a backend, named or by version file, in a separate process.

    The backend is loaded and built in that process only. A check that takes longer than timeout_s
    or ends the process is a failure, and the only one reported; so is a loader that ends the
    process. What the process prints goes to standard error. options: those of verify(). A backend
    registered only in this process (in a test or a notebook) cannot be found by another, so it is
    verified here, without a time limit.
    Raises UnavailableBackendError if the backend cannot run or be built, ArgumentError for an
    invalid time limit, and AttentionError for the other errors of verify().
    """
    check_time_limit(timeout_s)
    spec = ladder.resolve(what)
    context = multiprocessing.get_context("spawn")  # a forked child lacks torch's threads
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_report, args=(sender, what, device, options))
    child.start()
    sender.close()
    running = how = ""
    number = total = 0
    try:
        with receiver:
            while True:
                limit = timeout_s if number else max(timeout_s, LOADING_TIMEOUT_S)
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
                if isinstance(message, str):
                    how = message
                    break
                running, number, total = message
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
    failures = [Failure(running, how)]
    return Report(options.get("seed", 0), total, number, 0, True, killed, failures)


def _send_report(sender: Connection, what: str, device: str, options: dict[str, Any]) -> None:
    """Run in the child: send each check as it begins, then the report or the error that ended it.

    Send None if this process has no such backend, and a sentence for an exception that no kernel
    may raise. That includes KeyboardInterrupt: the user's SIGINT would end the process instead.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports it
    os.dup2(2, 1)  # only the parent prints the verdict
    threading.Thread(target=_die_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its default is a semaphore, which a killed process leaks
    sender.send((LOADING, 0, 0))
    try:
        try:
            spec = ladder.resolve(what)
        except UnknownBackendError:
            sender.send(None)
            return
        spec.prepare(device)
        report = verify(spec, device, on_check=lambda *check: sender.send(check), **options)
        sender.send(report)
    except AttentionError as error:
        sender.send(AttentionError(str(error)))  # some subclasses cannot be unpickled
    except BaseException as error:
        sender.send(f"it raised {describe(error)}")


def _die_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
