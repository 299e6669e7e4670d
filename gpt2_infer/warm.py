"""The program `gpt2-infer`, whose command `verify` runs in a server with torch already imported.

The first call leaves the server behind: it listens on a socket that only this user can open, forks
a process for each call, and ends when nobody has called for IDLE_S or a file of the packages has
changed. The process takes the caller's arguments, environment, folder and standard streams, and
ends with the caller. What a running process cannot take over (files of the packages, interpreter,
variables that libraries read when they are imported, limits) is in the socket's name, so every
other setting has a server of its own.

The server holds no kernel, plug-in, seed or input, so what is forked from it knows nothing of any
call. It and all its processes are "not dumpable": a kernel's process can read none of their memory
or descriptors, and none of the sockets is open in it. It could connect, but would only run commands
of its own user, which it can do anyway.

Environment: GPT2_INFER_SERVER=0 runs each call in its own process, as does a system where the
socket cannot be made.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

from attention_kernels import child

LOADED = "gpt2_infer.cli.verify", "gpt2_infer.bench.verdict", "attention_kernels.judge.server"
PACKAGES = Path(child.__file__).parent, Path(__file__).parent
# What libraries read when they are imported; the rest of the environment is the call's own.
READ_EARLY = re.compile(
    "ATEN|C10|CUDA|GLIBC|GOMP|GPT2_INFER|KMP|LANG|LC_|LD_|MALLOC|MKL|NPY|NUMPY|OMP|OPENBLAS|"
    "PYTHON|PYTORCH|TORCH|TQDM"
)
# How long the server waits for a call, and how often it looks whether the packages have changed.
IDLE_S, LOOK_S = 600.0, 5.0


def program() -> int:
    """Run the command line and return the exit status; `verify` runs in the server."""
    is_short = sys.argv[1:2] != ["verify"] or {"--help", "--version"} & {*sys.argv}
    if sys.platform == "linux" and not is_short and os.environ.get("GPT2_INFER_SERVER") != "0":
        with contextlib.suppress(OSError):  # no socket can be made, or a stream is closed
            return _wait(_sent())
    from gpt2_infer.cli import program

    return program()


# ---- In the caller's process ---------------------------------------------------------------------


def _sent() -> socket.socket:
    """Send this call to the server, which may have to be started; raises OSError."""
    mask = os.umask(0o077)
    os.umask(mask)
    call = {"argv": sys.argv, "path": sys.path, "environment": {**os.environ}, "umask": mask}
    for stream in range(3):
        os.fstat(stream)
    child.hide()  # its standard output is the kernel's to read otherwise
    path = _folder() / f"{_packages()}-{_settings()}"
    server = socket.socket(socket.AF_UNIX)
    with _locked(path):
        try:
            server.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            _start(path)
            server.connect(str(path))
    with os.fdopen(os.memfd_create("call"), "w+") as request:
        json.dump(call, request)
        request.seek(0)
        folder = os.open(".", os.O_PATH)
        socket.send_fds(server, [b"\0"], [request.fileno(), folder, 0, 1, 2])
    return server


def _wait(server: socket.socket) -> int:
    """Return the exit status of the call, when its process has ended."""
    from gpt2_infer.cli import console

    try:
        status = server.recv(1)
        server.recv(1)
    except KeyboardInterrupt:
        print("gpt2-infer: interrupted", file=sys.stderr)
        return console.EXIT_INTERRUPTED
    except ConnectionResetError:
        status = b""
    if status:
        return status[0]
    console.print_error("gpt2-infer", "the process that ran this call was killed")
    return console.EXIT_BAD_INPUT


def _start(path: Path) -> None:
    """Start a server that listens on a socket."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        code = f"import sys; sys.path = {sys.path}; from gpt2_infer.warm import serve; "
        code += f"raise SystemExit(serve({listener.fileno()}, {str(path)!r}))"
        subprocess.Popen(
            [sys.executable, *util._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        ).returncode = 0  # nobody waits for it


# ---- In both -------------------------------------------------------------------------------------


def _folder() -> Path:
    """Return the folder of the sockets; raises PermissionError if it is not this user's alone."""
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(home, f"gpt2-infer-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if (status.st_uid, stat.S_IMODE(status.st_mode)) != (os.geteuid(), 0o700):
        raise PermissionError
    return folder


def _packages() -> str:
    """Return a digest of the dates and sizes of the packages' modules, and of other packages."""
    files = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]
    files += [Path(x) for x in sys.path if x.endswith("-packages")]
    return _digest([(str(x), x.stat().st_mtime_ns, x.stat().st_size) for x in files if x.exists()])


def _settings() -> str:
    """Return a digest of all else that a process of the server cannot take from the caller."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return _digest(
        sorted(item for item in os.environ.items() if READ_EARLY.match(item[0])),
        [sys.executable, *util._args_from_interpreter_flags()],  # type: ignore[attr-defined]
        [resource.getrlimit(limit) for limit in limits],
        [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a socket's name: a server that ends takes every call that has begun.

    A kernel's process may hold it, too: raises OSError after a second.
    """
    with path.with_name("lock").open("w") as lock:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


# ---- In the server -------------------------------------------------------------------------------


def serve(listening: int, name: str) -> int:
    """Serve calls on a socket; return the exit status of the server, and of each call's process."""
    child.hide()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the calls' processes
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    for module in LOADED:
        importlib.import_module(module)
    gc.freeze()
    path, listener = Path(name), socket.socket(fileno=listening)
    until, wait_s = time.monotonic() + IDLE_S, min(LOOK_S, IDLE_S)
    while True:
        if select.select([listener], [], [], wait_s)[0]:
            caller, _ = listener.accept()
            if not os.fork():
                listener.close()
                return _run(caller)
            caller.close()
            until = time.monotonic() + IDLE_S
        elif not wait_s:
            return 0
        elif time.monotonic() >= until or not path.exists() or _packages() not in name:
            with contextlib.suppress(OSError), _locked(path):
                path.unlink(missing_ok=True)
            wait_s = 0.0  # calls that have come meanwhile are still served


def _run(caller: socket.socket) -> int:
    """Run a call in this process, and return its exit status."""
    _, (request, folder, *streams), *_ = socket.recv_fds(caller, 1, 5)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.fchdir(folder)
    child.start_server(fork=True)  # before it knows anything of the call, or has its streams
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    with os.fdopen(request) as file:
        call = json.load(file)
    for fd in (folder, *streams):
        os.close(fd)
    os.umask(call["umask"])
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.argv, sys.path = call["argv"], call["path"]
    # The old ones have been opened for another kind of file.
    encoding = sys.stdout.encoding
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding=encoding, closefd=False)
    threading.Thread(target=_end_with, args=[caller], daemon=True).start()
    from gpt2_infer.cli import program

    status = 1
    try:
        status = program()
    finally:
        sys.stdout.flush()
        caller.send(bytes([status]))
    return status


def _end_with(caller: socket.socket) -> None:
    """End this process when the caller does."""
    caller.recv(1)
    os._exit(1)
