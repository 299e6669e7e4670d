"""A process of the judge's: how it starts, talks to the judge, and ends.

It is forked from a server that has torch imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import queue
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from attention_kernels.child import end_with_parent, ending, start_server
from attention_kernels.errors import AttentionError
from attention_kernels.judge import isolation
from attention_kernels.judge.calls import Reply

ENDING_TIMEOUT_S = 10.0  # for a process that has closed its end of the pipe
LOADING_TIMEOUT_S = 1800.0  # for imports and a build with nvcc
# A message to a process is in records of RECORD bytes, the last of which is shorter; an answer is
# one record. A record arrives whole or not at all.
RECORD, LARGEST_ANSWER = 2**16, 2**18
# In JSON, and in JSON in a text of it.
_SPACE = re.compile(r"(?:\s|(?<!\\)\\+(?:u[\da-fA-F]{4}|[bfnrt]))+")


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
        self._connection.settimeout(ENDING_TIMEOUT_S)
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
        with contextlib.suppress(OSError):
            for start in range(0, len(message), RECORD):
                self._connection.send(message[start : start + RECORD])

    def answer(self, timeout_s: float) -> Reply:
        """Return the next answer; raises EndedError."""
        self._connection.settimeout(timeout_s)
        try:
            if record := self._connection.recv(LARGEST_ANSWER):
                return decoded(record.decode("utf-8", "replace"), Reply)  # type: ignore[no-any-return]
        except TimeoutError:
            self._kill()
            raise EndedError(f"it did not end within {timeout_s:g} s") from None
        except (ConnectionError, msgspec.DecodeError, RecursionError):
            pass
        self._process.join(ENDING_TIMEOUT_S)
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


class Judges:
    """Processes that compute what spends its time in Python, where threads wait for each other."""

    def __init__(self, count: int) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        self._free = queue.SimpleQueue[Any]()
        self._all = []
        for connection, theirs in (context.Pipe() for _ in range(count)):
            process = context.Process(target=_compute, args=(theirs,), daemon=True)
            with _without_main_and_argv():
                process.start()
            theirs.close()
            self._free.put(connection)
            self._all.append((process, connection))

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, or raise what it raises, in one of the processes."""
        connection = self._free.get()
        try:
            connection.send((function, arguments))
            found, error = connection.recv()
        except EOFError:
            raise RuntimeError("a process that judges outputs has ended") from None
        finally:
            self._free.put(connection)
        if error:
            raise error
        return found

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._all:
            process.kill()
            process.join()
            connection.close()


def _compute(connection: Any) -> None:
    torch.set_num_threads(1)
    keep_memory()
    while True:  # until the judge closes its end
        function, arguments = connection.recv()
        try:
            connection.send((function(*arguments), None))
        except Exception as error:
            connection.send((None, error))


def keep_memory() -> None:
    """Have this process keep memory that is freed, because new pages take longer than most sums."""
    if sys.platform == "linux":
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 2**30)


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


def decoded(message: str, kind: Any) -> Any:
    """Return what a process says, each text in it in one line without control characters.

    Raises msgspec.DecodeError or RecursionError.
    """
    return msgspec.json.decode(plain(_SPACE.sub(" ", message)), type=kind)


def plain(text: str) -> str:
    """Return one line without control characters, which could hide on a terminal what failed."""
    line = " ".join(text.expandtabs().splitlines())
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in line)


def _forward(output: int) -> None:
    """Print what a process prints, until it and all that it has started have ended."""
    with open(output, encoding="utf-8", errors="replace") as file:
        for line in iter(lambda: file.readline(2**12), ""):
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
    # The server ends with the judge, unless this keeps it, and the system then ends this.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    end_with_parent()
    _, (output, *others), *_ = socket.recv_fds(connection, 1, 1 + fds)
    os.dup2(output, 2)
    os.dup2(output, 1)  # only the judge prints the verdict
    # Line by line.
    (libc := ctypes.CDLL(None)).setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the judge reports it

    def enclose(caches: Path = folder) -> None:
        isolation.enclose(folder, caches)

    def answer(reply: Reply) -> None:
        connection.send(msgspec.json.encode(reply))

    def wait() -> bytes:
        message = b""
        while len(message) % RECORD == 0:
            message += connection.recv(RECORD) or os._exit(1)  # the judge has ended
        return message

    target(answer, wait, enclose, *others, *arguments)
