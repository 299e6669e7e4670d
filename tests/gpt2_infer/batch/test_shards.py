"""Jobs in processes that are killed, and in several at once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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


def start(body: Callable[[], object]) -> int:
    """Run body() in a process that has imported everything; return its id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            body()
            status = 0
        except batch.BatchError as error:
            status = 96 if "cannot be written: File too large" in str(error) else 98
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

    def run(out: Path, shard=(0, 1), *, resume=True, **changes):
        asked = dataclasses.replace(settings, **changes)
        return batch.run([file], out, asked, device="cpu", shard=shard, resume=resume)

    run(tmp_path / "expected")
    return run, contents(tmp_path / "expected")


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
    for shard in ((0, 1), (0, 2), (1, 2), (2, 3), (0, 1)):
        process = start(lambda shard=shard: run(out, shard))
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


def test_shards_at_once_complete_the_job(job, tmp_path):
    run, expected = job
    out = tmp_path / "out"
    processes = [start(lambda i=i: run(out, (i, 3), resume=False)) for i in range(3)]
    assert [end_of(process) for process in processes] == [0, 0, 0]
    assert contents(out) == expected
    with pytest.raises(RequestError, match="has a job: --resume completes it"):
        run(out, (1, 3), resume=False)
    assert [entry.file for entry in run(out, (1, 8))] == ["part-00001.jsonl", "part-00009.jsonl"]
    assert run(out, (16, 17), resume=False) == []  # there are 16 parts


def test_a_second_process_does_no_part_of_another(job, tmp_path):
    run, _ = job
    out = tmp_path / "out"
    run(out, (1, 2), part_rows=80)
    first = out / "part-00001.jsonl"
    written, _ = first.read_bytes(), first.unlink()
    with FileLock(out / ".shard-0-of-2"):
        for shard in ((0, 2), (0, 1), (2, 3)):
            with pytest.raises(RequestError, match="another process is completing shard 0 of 2"):
                run(out, shard, part_rows=80)
        (out / "_manifest" / "00001.json").unlink()
        # The job has no rows, but its other process may have begun.
        with pytest.raises(RequestError, match="differs in max_new_tokens"):
            run(out, (1, 2), part_rows=80, max_new_tokens=6)
        run(out, (1, 2), part_rows=80)
    assert first.read_bytes() == written


def test_a_shard_that_does_not_exist_is_refused(tmp_path):
    for shard in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(RequestError, match=r"shards? must be an integer"):
            batch.run([], tmp_path, batch.Settings(model="demo"), device="cpu", shard=shard)
