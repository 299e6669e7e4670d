"""A kernel reaches neither the network nor other processes, and writes only in its own folders."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from attention_kernels.errors import UnavailableBackendError
from attention_kernels.judge import isolation
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.suite import judged, run_check
from attention_kernels.judge.worker import Worker
from attention_kernels.ladder import build
from tests.attention_kernels.judge.cuda_cheats import SOURCE
from tests.conftest import needs_compiler, version_file

# What a plug-in tries when it is loaded: on files, which landlock protects, and by system calls.
FILES = {
    "reads a process": "open(f'/proc/{JUDGE}/environ')",
    "writes a file": "open(f'{FOLDER}/file', 'a')",
    "empties a file": "os.truncate(f'{FOLDER}/file', 0)",
    "writes in your home": "tempfile.TemporaryFile(dir=os.path.expanduser('~'))",
    "writes for all": "tempfile.TemporaryFile(dir='/dev/shm')",
    "writes beside other kernels": "tempfile.TemporaryFile(dir=CACHE)",
}
CALLS = {
    "connects": "socket.create_connection(('127.0.0.1', PORT))",
    "sends": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "connects to a program": "socket.socket(socket.AF_UNIX).connect(UNIX)",
    "sends to a program": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "signals": "os.kill(JUDGE, 0)",
    "has a signal sent": "fcntl.fcntl(2, fcntl.F_SETOWN, JUDGE)",
    "slows others": "os.sched_setscheduler(JUDGE, os.SCHED_IDLE, os.sched_param(0))",
    "shares memory": "ctypes.CDLL(None).shmget(0x52544D, 4096, 0o1600) + 1 or os.kill(JUDGE, 0)",
}
ALLOWED = {
    "signals itself": "os.kill(os.getpid(), 0)",
    "writes in its own folder": "open(os.environ['TRITON_CACHE_DIR'] + '.txt', 'w')",
    "writes a temporary file": "tempfile.TemporaryFile()",
    "runs a program": "subprocess.run(['true'], check=True, start_new_session=True)",
    "copies a file": "shutil.copy2(__file__, os.environ['TMPDIR'])",
}
PLUGIN = """
import fcntl, resource, shutil, socket, subprocess, tempfile
did = []
for name, code in TRIED.items():
    with contextlib.suppress(PermissionError):
        eval(code)
        did.append(name)
raise RuntimeError(f"did: {sorted(did)}")
"""
needs_landlock = pytest.mark.skipif(
    any("landlock" in line for line in isolation.missing()), reason="this system has no landlock"
)


@pytest.mark.parametrize("tried", [CALLS, pytest.param(FILES, marks=needs_landlock)])
def test_a_plug_in_is_refused_what_is_not_its_own(tried, plugin, tmp_path):
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path := f"\0attention-{os.getpid()}")
        unix.listen()
        names = {"JUDGE": os.getpid(), "FOLDER": str(tmp_path), "CACHE": str(build.cache_dir())}
        names |= {"PORT": inet.getsockname()[1], "UNIX": path, "TRIED": tried | ALLOWED}
        plugin("".join(f"{name} = {value!r}\n" for name, value in names.items()) + PLUGIN)
        with pytest.raises(UnavailableBackendError) as caught:
            Worker("PLUGIN_STRANGE", "cpu")
    assert f"did: {sorted(ALLOWED)}" in str(caught.value)


def test_a_plug_in_stays_in_its_group_and_changes_no_mode(plugin, tmp_path):
    code = "group = os.getpgrp()\nif not (child := os.fork()):\n    os.setsid(), os.setpgid(0, 0)\n"
    code += "    os._exit(os.getpgrp() != group)\nleft = os.waitpid(child, 0)[1]\n"
    plugin(f"{code}os.chmod({str(tmp_path)!r}, 0o777)\nraise RuntimeError(f'left: {{left}}')")
    mode = tmp_path.stat().st_mode
    with pytest.raises(UnavailableBackendError, match="left: 0"):
        Worker("PLUGIN_STRANGE", "cpu")
    assert tmp_path.stat().st_mode == mode


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ninja"), reason="needs ninja")
@needs_compiler
def test_a_plug_in_compiles(plugin, monkeypatch, tmp_path):
    """By torch's inductor, and by ninja, which gives each compiler a group of its own."""
    # Inductor takes a graph from its cache that was compiled for another ATEN_CPU_CAPABILITY.
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path))
    plugin(
        "from torch.utils.cpp_extension import load_inline\n"
        "source = 'int twice(int x) { return 2 * x; }'\n"
        "two = load_inline('twice', source, functions=['twice']).twice(1)\n"
        "one = torch.compile(lambda x: x.cos() + 1)(torch.zeros(8)).sum()\n"
        "raise RuntimeError(f'compiled: {two}, {one:g}')"
    )
    with pytest.raises(UnavailableBackendError, match="compiled: 2, 16"):
        Worker("PLUGIN_STRANGE", "cpu")


@needs_landlock
@needs_compiler
def test_a_version_file_is_restricted_before_it_is_loaded():
    file = Path(__file__).parents[3] / ".pytest_cache" / "written"
    writes = f'static FILE* const kFile = fopen("{file}", "w");\n'
    source = SOURCE.replace("#define IS_HONEST", f"{writes}#define IS_HONEST")
    with contextlib.closing(Worker(str(version_file("v01_writes.cu", source)), "cpu")) as runner:
        assert run_check(runner, judged(runner, Case(8, 32))).passed
    assert not file.exists()


@needs_landlock
@needs_compiler
def test_a_compiler_writes_in_the_cache_only(tmp_path):
    flags = f"Flags:  -Xcompiler=-MMD,-MF,{tmp_path}/notes.txt"
    source = re.sub("Flags: .*", flags, SOURCE)
    with pytest.raises(UnavailableBackendError, match=r"notes\.txt"):
        Worker(str(version_file("v01_has_it_written.cu", source)), "cpu")
    assert not [*tmp_path.glob("notes.txt")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TRITON_FLASH_ATTENTION", "CUSTOM_CUDA"])
def test_an_honest_backend_runs(name):
    with contextlib.closing(Worker(name, "cpu")) as runner:
        assert run_check(runner, judged(runner, Case(8, 64))).passed
