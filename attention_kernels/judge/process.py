"""A process of the judge's: how it starts, talks to the judge, and ends.

It is forked from a server that has torch imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from attention_kernels.child import end_with_parent, ending, start_server
from attention_kernels.errors import AttentionError
from attention_kernels.judge import isolation
from attention_kernels.judge.calls import Reply

ENDING_TIMEOUT_S = 10.0  # for a process that has closed its end of the pipe
LOADING_TIMEOUT_S = 1800.0  # for imports and a build with nvcc
LARGEST_MESSAGE = 2**20
MESSAGE_S = 10.0  # for the rest of a message that has begun


class EndedError(AttentionError, RuntimeError):
    """A worker ended or hung; the text says how."""

    def __init__(self, how: str, *, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed
        """Whether a signal ended it."""


class Process:
    """A process that answers messages, and the judge's end of the connection to it."""

    def __init__(self, target: Callable[..., None], fds: Sequence[int], *arguments: Any) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        limit = struct.pack("@ll", int(MESSAGE_S), 0)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            for way in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
                ours.setsockopt(socket.SOL_SOCKET, way, limit)
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        arguments = target, theirs, len(fds), dict(os.environ), folder, *arguments
        self._process = context.Process(target=_begin, args=arguments, daemon=True)
        with _without_main_and_argv():
            self._process.start()
        theirs.close()
        with contextlib.suppress(OSError):
            for fd in (2, *fds):
                reduction.send_handle(self._connection, fd, self._process.pid)

    def say(self, message: bytes) -> None:
        """Send a message; whether it arrives, the next answer says. It continues if stopped."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def answer(self, timeout_s: float) -> Reply:
        """Return the next answer; raises EndedError."""
        try:
            if not self._connection.poll(timeout_s):
                self._kill()
                raise EndedError(f"it did not end within {timeout_s:g} s")
            return msgspec.json.decode(self._connection.recv_bytes(LARGEST_MESSAGE), type=Reply)
        except (EOFError, OSError):
            self._process.join(ENDING_TIMEOUT_S)
        except msgspec.DecodeError:
            pass
        status = self._process.exitcode
        self._kill()
        if status is None:
            raise EndedError("it broke off the connection to the judge")
        raise EndedError(f"it {ending(status)}", killed=status < 0)

    def stop(self) -> None:
        """Stop it and the processes that it has started, until the next message."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it and the processes that it has started."""
        self._kill()
        self._process.join()
        self._connection.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.kill()  # it may have no group of its own yet

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to its group, if there is one."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def _without_main_and_argv() -> Iterator[None]:
    """Keep multiprocessing from running the main module, a user's script, in a new process.

    Nor does a kernel learn there from sys.argv that it is being verified.
    """
    main, argv = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = ModuleType("__main__"), [""]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = main, argv


def shared_memory() -> int:
    """Return the descriptor of new shared memory, which no process can make smaller."""
    fd = os.memfd_create("attention", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


# ---- In the process ------------------------------------------------------------------------------


def _begin(
    target: Callable[..., None],
    connection: Connection,
    fds: int,
    environment: dict[str, str],
    folder: Path,
    *arguments: Any,
) -> None:
    """Set up a process of the judge's and run `target` in it, which has to call `enclose`."""
    os.setsid()  # what it starts is in its group, and is stopped and killed with it
    # The judge may be killed while this is stopped, and the thread below with it. The server ends
    # with the judge, unless this keeps it, and the system then ends this.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    end_with_parent()
    stderr, *others = (reduction.recv_handle(connection) for _ in range(1 + fds))
    os.dup2(stderr, 2)
    os.dup2(2, 1)  # only the judge prints the verdict
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the judge reports it

    def enclose(caches: Path = folder) -> None:
        isolation.enclose(folder, caches)
        threading.Thread(target=_die_with_parent, daemon=True).start()

    def answer(reply: Reply) -> None:
        connection.send_bytes(msgspec.json.encode(reply))

    target(answer, connection.recv_bytes, enclose, *others, *arguments)


def _die_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
