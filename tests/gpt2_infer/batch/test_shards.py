"""Jobs in processes that are killed, and in several at once."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from gpt2_infer import RequestError, batch
from tests.gpt2_infer.batch.common import contents, make_settings, write_input

# fork() warns where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def start(body: Callable[..., object], *arguments: object) -> multiprocessing.Process:
    """Run body() in a process that has imported everything."""
    process = multiprocessing.get_context("fork").Process(target=body, args=arguments)
    process.start()
    return process


def end_of(process: multiprocessing.Process) -> int | None:
    """Wait for a process and return its status, or minus the signal that ended it."""
    process.join()
    return process.exitcode


@pytest.fixture
def job(save_checkpoint, tmp_path):
    """Return a function that runs or resumes the job in a folder, and the files expected there."""
    settings = make_settings(save_checkpoint()[0])
    file = write_input(tmp_path / "in.jsonl", 160)

    def run(out: Path, shard=(0, 1), *, resume=True, **changes):
        asked = dataclasses.replace(settings, **changes)
        return batch.run([file], out, asked, device="cpu", shard=shard, resume=resume)

    run(tmp_path / "expected")
    return run, contents(tmp_path / "expected")


def test_kill_9_at_any_moment_loses_nothing_and_repeats_nothing(job, tmp_path):
    run, expected = job
    out, rng = tmp_path / "out", random.Random(0)

    def run_until(at: int, before: bool) -> None:
        """Kill this process before or after rename number `at`; the first one is _job.json's."""
        numbers, replace = itertools.count(1), os.replace

        def dying_replace(*paths):
            number = next(numbers)
            if number == at and before:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = dying_replace  # in this process only
        run(out)

    # Parts and their manifest entries are renamed in turn; a resumed job begins with a part.
    for at, before in ((1, True), (2, True), (2, False), (4, True), (5, False)):
        assert end_of(start(run_until, at, before)) == -signal.SIGKILL
    for shard in ((0, 1), (0, 2), (1, 2), (2, 3), (0, 1)):
        process = start(run, out, shard)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        assert end_of(process) in (-signal.SIGKILL, 0)
    run(out)
    assert contents(out) == expected


def test_a_full_disk_leaves_nothing_half_written(job, tmp_path):
    run, expected = job
    out = tmp_path / "out"

    def with_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # larger than _job.json only
        with pytest.raises(batch.BatchError, match="cannot be written: File too large"):
            run(out)

    assert end_of(start(with_little_room)) == 0
    assert contents(out).items() < expected.items()
    run(out)
    assert contents(out) == expected


def test_shards_at_once_complete_the_job(job, tmp_path):
    run, expected = job
    out = tmp_path / "out"
    processes = [start(run, out, (i, 3)) for i in range(3)]
    assert [end_of(process) for process in processes] == [0, 0, 0]
    assert contents(out) == expected
    assert [entry.file for entry in run(out, (1, 8))] == ["part-00001.jsonl", "part-00009.jsonl"]
    assert run(out, (16, 17), resume=False) == []  # there are 16 parts
    for shard in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(RequestError, match=r"shards? must be an integer"):
            run(out, shard)


def test_a_second_process_does_no_part_of_another(job, tmp_path):
    run, expected = job
    out = tmp_path / "out"
    run(out, (1, 2))
    with FileLock(out / ".shard-0-of-2"):
        for shard in ((0, 2), (0, 1), (2, 3)):
            with pytest.raises(RequestError, match="another process is completing shard 0 of 2"):
                run(out, shard)
        run(out, (1, 2))
    run(out)
    assert contents(out) == expected
