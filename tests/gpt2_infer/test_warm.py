"""The server that the command verify leaves behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRONG, LONG = ["NO_SUCH"], ["NAIVE_PYTORCH", "--device=cpu", "--dtypes=float32", "--seed=1"]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A copy of the packages, and the folder of its server's socket, whose path must be short.

    There `verify --quick` tries less: no test here is about what it finds.
    """
    with tempfile.TemporaryDirectory() as folder:
        for package in ("attention_kernels", "gpt2_infer"):
            shutil.copytree(ROOT / package, Path(folder, package))
        change(Path(folder, "attention_kernels/judge/suite.py"), "SHARE = 0.88", "SHARE = 0.1")
        yield Path(folder)


def change(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def start(home: Path, *words: str, server: int = 1) -> subprocess.Popen[str]:
    more = {"PYTHONPATH": str(home), "XDG_RUNTIME_DIR": str(home)}
    return subprocess.Popen(
        # Ctrl-C works as in a terminal, also if this is a test in the background.
        ["env", "--default-signal=INT", sys.executable, "-m", "gpt2_infer", "verify", *words],
        env={**os.environ, **more, "GPT2_INFER_SERVER": str(server)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
    )


def ended(call: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = call.communicate()
    return call.returncode, out, err


def servers(home: Path) -> dict[str, int]:
    """The mode of each socket."""
    return {x.name: x.stat().st_mode & 0o777 for x in home.glob("gpt2-infer-*/*-*")}


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.05)


def processes(home: Path) -> int:
    """The number of processes of the server, and of those that are forked from it."""
    command = ["pgrep", "-fc", f"warm import serve.*{home}"]
    return int(subprocess.run(command, check=False, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["PYTORCH_SDPA_CUDNN_ATTENTION", "--device=cpu"], 2),
        pytest.param([*LONG, "--quick"], 0, marks=pytest.mark.slow),
    ],
)
def test_a_second_call_says_the_same_and_leaves_only_the_server(home, words, status):
    calls = [ended(start(home, *words)) for _ in range(2)]
    assert calls[0] == calls[1]
    assert calls[0][0] == status
    (folder,) = home.glob("gpt2-infer-*")
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())
    assert [*servers(home).values()] == [0o600]
    until(lambda: processes(home) == 1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_call_ends_with_its_caller(home, number, status):
    call = start(home, *LONG)
    until(lambda: processes(home) >= 5)  # server, judge, tracker, server of workers, worker
    other = start(home, *WRONG)
    assert ended(other)[0] == 2  # at the same time
    call.send_signal(number)
    code, out, err = ended(call)
    assert (code, out) == (status, ""), err
    assert err == "gpt2-infer: interrupted\n" * (number == signal.SIGINT)
    until(lambda: processes(home) == 1)


def test_a_lock_that_is_held_delays_no_call(home):
    assert ended(start(home, *WRONG))[0] == 2
    (file,) = home.glob("gpt2-infer-*/lock")
    with file.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ended(start(home, *WRONG))[0] == 2


def test_a_changed_package_gets_a_new_server_and_the_old_one_ends(home):
    assert ended(start(home, *WRONG))[0] == 2
    before = servers(home)
    Path(home, "gpt2_infer", "config.py").touch()
    assert ended(start(home, *WRONG))[0] == 2
    assert servers(home).keys() - before.keys()
    until(lambda: not servers(home).keys() & before.keys() and processes(home) == 1)


def test_a_server_ends_when_it_is_idle(home):
    change(Path(home, "gpt2_infer/warm.py"), "IDLE_S, LOOK_S = 600.0", "IDLE_S, LOOK_S = 1.0")
    assert ended(start(home, *WRONG))[0] == 2
    until(lambda: not servers(home))
    assert ended(start(home, *WRONG, server=0))[0] == 2
    assert not servers(home)
