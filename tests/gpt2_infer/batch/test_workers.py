"""Jobs in processes that are killed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt2_infer import RequestError, batch
from gpt2_infer.batch.workers import find_devices
from gpt2_infer.errors import UnavailableDeviceError
from tests.gpt2_infer.batch.common import CPU, contents, make_settings, write_input

pytestmark = [
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),  # of fork()
]


def start(body: Callable[[], object]) -> int:
    """Run body() in a process that has imported everything; return its id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            body()
            status = 0
        except RequestError:
            status = 97
        except batch.BatchError as error:
            killed = "was killed by SIGKILL" in str(error)
            is_full = "cannot be written: File too large" in str(error)
            status = 99 if killed else 96 if is_full else 98
        finally:
            os._exit(status)
    return process


def end_of(process: int) -> int:
    """Wait for a process and return its status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def job(save_checkpoint, tmp_path):
    """A function that runs or resumes the job in a folder, and the files expected there."""
    settings = make_settings(save_checkpoint()[0])
    file = write_input(tmp_path / "in.jsonl", 160)

    def run(out: Path, *, devices=CPU, **changes):
        asked = dataclasses.replace(settings, **changes)
        return batch.run([file], out, asked, devices=devices, resume=True)

    run(tmp_path / "expected")
    return run, contents(tmp_path / "expected")


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing_and_repeats_nothing(job, tmp_path, monkeypatch):
    run, expected = job
    out, rng = tmp_path / "out", random.Random(0)
    replace = os.replace

    def run_until(at: int, before: bool) -> None:
        """Kill this process before or after rename number `at`; the first one is _job.json's."""
        numbers = itertools.count(1)

        def dying_replace(*paths):
            number = next(numbers)
            if number == at and before:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(os, "replace", dying_replace)  # patches the forked process only
        run(out)

    # Parts and their manifest entries are renamed in turn; a resumed job begins with a part.
    for at, before in ((1, True), (2, True), (2, False), (4, True), (5, False)):
        assert end_of(start(functools.partial(run_until, at, before))) == -signal.SIGKILL
    for _ in range(5):
        process = start(lambda: run(out))
        time.sleep(rng.uniform(0, 0.3))
        os.kill(process, signal.SIGKILL)
        assert end_of(process) in (-signal.SIGKILL, 0)
    run(out)
    assert contents(out) == expected


def test_a_full_disk_leaves_nothing_half_written(job, tmp_path):
    run, expected = job
    out = tmp_path / "out"

    def with_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # larger than _job.json only
        run(out)

    assert end_of(start(with_little_room)) == 96
    left = contents(out)
    assert left.items() < expected.items()
    run(out)
    assert contents(out) == expected


def children(process: int) -> list[int]:
    """The worker processes of a process, without its resource tracker."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [c for c in map(int, found) if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_workers_and_driver_die_and_the_job_is_completed(job, tmp_path):
    run, expected = job
    out = tmp_path / "out"
    two = [torch.device("cpu")] * 2

    driver = start(lambda: run(out, devices=two))
    wait_for(lambda: len(children(driver)) == 2)
    os.kill(children(driver)[0], signal.SIGKILL)
    assert end_of(driver) == 99
    entered = len([*(out / "_manifest").glob("*.json")])
    assert 0 < entered < 16

    driver = start(lambda: run(out, devices=two))
    wait_for(lambda: len(children(driver)) == 2)
    workers = children(driver)
    os.kill(driver, signal.SIGKILL)
    assert end_of(driver) == -signal.SIGKILL
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))

    run(out)
    assert contents(out) == expected


def test_ranks_share_a_job_and_its_refusal(job, tmp_path, monkeypatch):
    run, expected = job
    out = tmp_path / "out"

    def ranks(body) -> list[int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        processes = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            processes.append(start(body))
        return [end_of(process) for process in processes]

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert ranks(lambda: run(out)) == [0, 0]
    assert contents(out) == expected
    assert ranks(lambda: run(out, max_new_tokens=6)) == [97, 97]
    assert ranks(lambda: run(out, backend="UNKNOWN")) == [97, 97]


def test_devices_by_name(monkeypatch):
    cpu = torch.device("cpu")
    assert find_devices("cpu") == [cpu]
    assert find_devices("cpu:3") == [cpu] * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [str(d) for d in find_devices("all")] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [str(d) for d in find_devices("3,1")] == ["cuda:3", "cuda:1"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [str(d) for d in find_devices(None)] == ["cuda:2"]
    with pytest.raises(UnavailableDeviceError, match=r"cuda:4: .* no such CUDA device"):
        find_devices("0,4")
    for names in ("cpu:0", "gpu", "0,", "1,1", ""):
        with pytest.raises(RequestError, match="devices"):
            find_devices(names)
