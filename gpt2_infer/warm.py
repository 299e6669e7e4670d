"""The program `gpt2-infer`, whose command `verify` runs in a server with torch already imported.

The first call leaves the server behind: it listens on a socket that only this user can open, forks
a process for each call, and ends when nobody has called for a while or a file of the packages has
changed. The process takes the caller's arguments, environment, folder and standard streams; it gets
Ctrl-C when the caller does and is killed when the caller ends. What a running process cannot take
over (files of the packages, interpreter, variables that libraries read when they are imported,
limits, namespaces) is in the socket's name, so every other setting has a server of its own.

The server holds no kernel, plug-in, seed or input, so what is forked from it knows nothing of any
call. It and all its processes are "not dumpable": a kernel's process can read none of their memory
or descriptors, and none of the sockets is open in it. It could connect, but would only run commands
of its own user, which it can do anyway. It could also put a socket of its own in this one's place,
but nothing would answer there: the server adopts the orphans of a call, and kills all that the call
has left behind before it reports the exit status. What remains is what any program of the user's
can do, such as to change the files of these packages.

Environment: GPT2_INFER_SERVER_S is the time that the server waits for a call in seconds, by default
600; 0 runs each call in its own process, as does a system where the socket cannot be made.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

from attention_kernels import child

LOADED = (
    *("attention_kernels.judge.server", "gpt2_infer.cli.verify", "gpt2_infer.bench.verdict"),
    "gpt2_infer.bench.kernels",
)
PACKAGES = Path(child.__file__).parent, Path(__file__).parent
# What libraries read when they are imported; the rest of the environment is the call's own.
READ_EARLY = re.compile(
    "ATEN|C10|CUDA|GLIBC|GOMP|GPT2_INFER|KMP|LANG|LC_|LD_|MALLOC|MKL|NPY|NUMPY|OMP|OPENBLAS|"
    "PYTHON|PYTORCH|TORCH|TQDM"
)
LOOK_S = 5.0  # how often the server looks whether the packages have changed


def program() -> int:
    """Run the command line and return the exit status; `verify` runs in the server."""
    idle = os.environ.get("GPT2_INFER_SERVER_S", "600")
    if sys.argv[1:2] == ["verify"] and not {"--help", "--version"} & {*sys.argv}:
        if not re.fullmatch(r"\d{1,9}(\.\d+)?", idle):
            return _fail(f"GPT2_INFER_SERVER_S must be a number of seconds, not {idle!r}")
        if float(idle) > 0 and sys.platform == "linux" and (server := _sent(float(idle))):
            return _wait(server)
    from gpt2_infer.cli import program

    return program()


def _fail(message: str) -> int:
    from gpt2_infer.cli import console

    console.print_error("gpt2-infer", message)
    return console.EXIT_BAD_INPUT


# ---- In the caller's process ---------------------------------------------------------------------


def _sent(idle_s: float) -> socket.socket | None:
    """Send this call to the server, which may have to be started.

    Returns None if no socket can be made or if a standard stream is closed.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    call = {"argv": sys.argv, "path": sys.path, "environment": {**os.environ}, "umask": mask}
    try:
        for stream in range(3):
            os.fstat(stream)
        _children()  # some systems do not list them
        child.hide()  # its standard output is the kernel's to read otherwise
        path = _folder() / f"{_packages()}-{_settings()}"
        with _locked(path):
            server = _connected(path) or _started(path, idle_s)
        with os.fdopen(os.memfd_create("call"), "w+") as request:
            json.dump(call, request)
            request.seek(0)
            folder = os.open(".", os.O_PATH)
            socket.send_fds(server, [b"\0"], [request.fileno(), folder, 0, 1, 2])
    except OSError:
        return None
    return server


def _wait(server: socket.socket) -> int:
    """Return the exit status of the call; 128 and the signal that ended it, as a shell reports."""

    def interrupt(*_: object) -> None:
        with contextlib.suppress(OSError):
            server.send(bytes([signal.SIGINT]))

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    status = b""
    with contextlib.suppress(OSError):
        status = server.recv(16)
    if not status:
        return _fail("the server that ran this call has ended")
    return int(status) if int(status) >= 0 else 128 - int(status)


def _started(path: Path, idle_s: float) -> socket.socket:
    """Start a server, and return a connection to it."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        code = f"import sys; sys.path = {sys.path}; from gpt2_infer.warm import serve; "
        code += f"raise SystemExit(serve({listener.fileno()}, {str(path)!r}, {idle_s}))"
        subprocess.Popen(
            [sys.executable, *util._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        ).returncode = 0  # nobody waits for it
    if server := _connected(path):
        return server
    raise ConnectionRefusedError


# ---- In both -------------------------------------------------------------------------------------


def _folder() -> Path:
    """Return the folder of the sockets; raises PermissionError if others can write to it."""
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(home, f"gpt2-infer-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if (status.st_uid, stat.S_IMODE(status.st_mode)) != (os.geteuid(), 0o700):
        raise PermissionError
    return folder


def _packages() -> str:
    """Return a digest of the dates and sizes of the packages' modules, and of other packages."""
    found: list[object] = [
        (str(file), file.stat().st_mtime_ns, file.stat().st_size)
        for package in PACKAGES
        for file in sorted(package.rglob("*.py"))
    ]
    folders = [Path(x) for x in sys.path if x.endswith("-packages")]
    found += [(str(x), x.stat().st_mtime_ns) for x in folders if x.exists()]
    return _digest(found)


def _settings() -> str:
    """Return a digest of all else that a process of the server cannot take from the caller."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return _digest(
        sorted(item for item in os.environ.items() if READ_EARLY.match(item[0])),
        [sys.executable, *util._args_from_interpreter_flags()],  # type: ignore[attr-defined]
        [resource.getrlimit(limit) for limit in limits],
        [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
        [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")],
        Path("/proc/self/cgroup").read_text(),
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a socket's name: a server that ends takes every call that has begun."""
    with path.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _connected(path: Path) -> socket.socket | None:
    """Return a connection to the server with a socket, or None if none listens there."""
    server = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        server.connect(str(path))
        if _user(server) == os.geteuid():
            return server
    server.close()
    return None


def _user(peer: socket.socket) -> int:
    """Return the user at the other end of a connection."""
    size = struct.calcsize("3i")
    return struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]  # type: ignore[no-any-return]


# ---- In the server -------------------------------------------------------------------------------


def serve(listening: int, name: str, idle_s: float) -> int:
    """Serve calls on a socket; return the exit status of the server, and of each call's process."""
    child.hide()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become its children
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    for module in LOADED:
        importlib.import_module(module)
    os.dup2(0, 2)
    gc.freeze()
    path, listener = Path(name), socket.socket(fileno=listening)
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers: dict[socket.socket, int] = {}  # and their processes, 0 before they have started
    until, is_open = time.monotonic() + idle_s, True
    while True:
        wait_s = min(LOOK_S, idle_s) if is_open or callers else 0
        ready, _, _ = select.select([listener, ended, *callers], [], [], wait_s)
        for each in ready:
            if each is ended:
                ended.recv(4096)
            elif each is listener:
                caller, _ = listener.accept()
                callers[caller] = 0
            elif fds := _hear(each, callers):
                if not (process := os.fork()):
                    for other in (listener, ended, wake, *callers):
                        other.close()
                    return _run(*fds)
                os.setpgid(process, process)
                callers[each] = process
                for fd in fds:
                    os.close(fd)
        _report_ends(callers)
        if ready or callers:
            until = time.monotonic() + idle_s
        elif not is_open:
            return 0
        elif time.monotonic() >= until or not path.exists() or _packages() not in name:
            with _locked(path):
                path.unlink(missing_ok=True)
            is_open = False  # calls that have come meanwhile are still served


def _hear(caller: socket.socket, callers: dict[socket.socket, int]) -> list[int]:
    """Return the descriptors of a call that begins; pass on an interrupt, or the caller's end."""
    word, fds = b"", list[int]()
    with contextlib.suppress(OSError):
        word, fds, *_ = socket.recv_fds(caller, 1, 5)
    process = callers[caller]
    if word and fds and not process and _user(caller) == os.geteuid():
        return fds
    if process:
        os.killpg(process, signal.SIGINT if word else signal.SIGKILL)
    if not (word and process):
        caller.close()
        del callers[caller]
    return []


def _report_ends(callers: dict[socket.socket, int]) -> None:
    """Report the calls that have ended, when all that they left behind has ended, too."""
    ends = []
    for caller, process in [*callers.items()]:
        if process and (status := os.waitpid(process, os.WNOHANG))[0]:
            ends.append((caller, os.waitstatus_to_exitcode(status[1])))
            del callers[caller]
    while orphans := {*_children()} - {*callers.values()}:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
    for caller, code in ends:
        with caller, contextlib.suppress(OSError):  # it may have ended, too
            caller.send(str(code).encode())


def _children() -> list[int]:
    """Return the processes whose parent this one is."""
    return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]


def _run(request: int, folder: int, *streams: int) -> int:
    """Run a call in this process, and return its exit status."""
    os.setpgid(0, 0)
    child.end_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.fchdir(folder)
    child.start_server(fork=True)  # before it knows anything of the call
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    from gpt2_infer.cli import program

    return program()
