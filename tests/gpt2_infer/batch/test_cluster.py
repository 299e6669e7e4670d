from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gpt2_infer import RequestError, batch
from tests.gpt2_infer.batch.common import contents, make_settings, write_input

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc"),
    pytest.mark.filterwarnings("ignore"),  # Ray warns about its own settings
]


def holder(lock: Path) -> int:
    """Return the process that has a lock file open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if str(lock) in map(os.readlink, (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError


def kill_a_worker(out: Path) -> None:
    """Kill the worker of shard 0 of 2 once it has written a part."""
    while not [*out.glob("part-*[02468].jsonl")]:
        time.sleep(0.005)
    os.kill(holder(out / ".shard-0-of-2"), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_worker_of_ray_dies_and_the_job_is_completed(save_checkpoint, tmp_path):
    settings = make_settings(save_checkpoint()[0])
    file = write_input(tmp_path / "in.jsonl", 800)
    batch.run([file], tmp_path / "alone", settings, device="cpu")
    expected, out = contents(tmp_path / "alone"), tmp_path / "out"
    how = {"device": "cpu", "workers": 2}
    killer = threading.Thread(target=kill_a_worker, args=[out])
    killer.start()
    with pytest.raises(batch.BatchError, match=r"^Ray lost shard 0/2; --resume completes the job$"):
        batch.run_on_ray([file], out, settings, **how)
    killer.join()
    left = contents(out)
    assert {f"part-{part:05d}.jsonl" for part in range(1, 80, 2)} <= left.keys()
    assert left.items() < expected.items()
    batch.run_on_ray([file], out, settings, resume=True, **how)
    assert contents(out) == expected


def test_a_cluster_that_is_missing_or_too_small_is_refused(tmp_path):
    for how, message in (
        ({"address": "nonsense"}, "Ray cannot be used at nonsense: "),
        ({"device": "cpu", "workers": 99999}, r"with \d+ CPUs cannot run 99999 workers"),
    ):
        with pytest.raises(RequestError, match=message):
            batch.run_on_ray([], tmp_path, batch.Settings(model="demo"), **how)
