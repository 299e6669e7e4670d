"""A process of the judge's: how it starts, talks to the judge, and ends.

It is forked from a server that has torch imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from attention_kernels.child import end_with_parent, ending, start_server
from attention_kernels.errors import AttentionError
from attention_kernels.judge import isolation
from attention_kernels.judge.calls import Reply, plain

ENDING_TIMEOUT_S = 10.0  # for a process that has closed its end of the pipe
LOADING_TIMEOUT_S = 1800.0  # for imports and a build with nvcc
# A message to a process is in records of RECORD bytes, the last of which is shorter; an answer is
# one record. A record arrives whole or not at all.
RECORD, LARGEST_ANSWER = 2**16, 2**18
MESSAGE_S = 10.0  # for a process to take a record
LONGEST_LINE = 2**12
_Kind = TypeVar("_Kind")


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
        self._connection, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST_ANSWER)
        self._connection.settimeout(MESSAGE_S)
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        arguments = target, theirs, len(fds), dict(os.environ), folder, *arguments
        self._process = context.Process(target=_begin, args=arguments, daemon=True)
        with _without_main_and_argv():
            self._process.start()
        theirs.close()
        output, its_output = os.pipe()
        with contextlib.suppress(OSError):
            socket.send_fds(self._connection, [b" "], [its_output, *fds])
        os.close(its_output)
        self._forwarding = threading.Thread(target=_forward, args=[output], daemon=True)
        self._forwarding.start()

    def say(self, message: bytes) -> None:
        """Send a message; whether it arrives, the next answer says. It continues if stopped."""
        self._signal(signal.SIGCONT)
        message += b" " * (len(message) % RECORD == 0)
        self._connection.settimeout(MESSAGE_S)
        with contextlib.suppress(OSError):
            for start in range(0, len(message), RECORD):
                self._connection.send(message[start : start + RECORD])

    def answer(self, timeout_s: float) -> Reply:
        """Return the next answer; raises EndedError."""
        self._connection.settimeout(timeout_s)
        try:
            if record := self._connection.recv(LARGEST_ANSWER):
                return decoded(record, Reply)
            self._process.join(ENDING_TIMEOUT_S)
        except TimeoutError:
            self._kill()
            raise EndedError(f"it did not end within {timeout_s:g} s") from None
        except ConnectionError:
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
        self._forwarding.join(ENDING_TIMEOUT_S)
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


def decoded(message: bytes | str, kind: type[_Kind]) -> _Kind:
    """Return what a process says, its text plain; raises msgspec.DecodeError."""
    try:
        return msgspec.convert(_plain(msgspec.json.decode(message)), kind)
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from None


def _plain(found: object) -> object:
    """Make each text in a message one line, which looks like no other."""
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list):
        return [*map(_plain, found)]
    return plain(" ".join(found.split())) if isinstance(found, str) else found


def _forward(output: int) -> None:
    """Print what a process prints, until it and all that it has started have ended."""
    with open(output, encoding="utf-8", errors="replace") as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), ""):
            print(plain(line), file=sys.stderr)


def shared_memory() -> int:
    """Return the descriptor of new shared memory, which no process can make smaller."""
    fd = os.memfd_create("attention", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


# ---- In the process ------------------------------------------------------------------------------


def _begin(
    target: Callable[..., None],
    connection: socket.socket,
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
    _, (output, *others), *_ = socket.recv_fds(connection, 1, 1 + fds)
    for standard in (1, 2):  # only the judge prints the verdict
        os.dup2(output, standard)
    os.close(output)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # line by line
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the judge reports it

    def enclose(caches: Path = folder) -> None:
        isolation.enclose(folder, caches)
        threading.Thread(target=_die_with_parent, daemon=True).start()

    def answer(reply: Reply) -> None:
        connection.send(msgspec.json.encode(reply))

    def wait() -> bytes:
        message = b""
        while len(message) % RECORD == 0:
            if not (record := connection.recv(RECORD)):
                os._exit(1)  # the judge has ended
            message += record
        return message

    target(answer, wait, enclose, *others, *arguments)


def _die_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
