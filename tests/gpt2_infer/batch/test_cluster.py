from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
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


def kill_after_a_part(out: Path, process: int | None = None) -> None:
    """Kill a process, or the worker of shard 0, once a part has been written."""
    while not [*out.glob("part-*")]:
        time.sleep(0.005)
    os.kill(process or holder(out / ".shard-0-of-2"), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_workers_and_drivers_of_ray_die_and_the_job_is_completed(save_checkpoint, tmp_path):
    settings = make_settings(save_checkpoint()[0])
    file = write_input(tmp_path / "in.jsonl", 800)
    batch.run([file], tmp_path / "alone", settings, device="cpu")
    expected = contents(tmp_path / "alone")
    how = {"device": "cpu", "workers": 2}

    out = tmp_path / "worker"
    killer = threading.Thread(target=kill_after_a_part, args=[out])
    killer.start()
    with pytest.raises(batch.BatchError, match=r"^Ray lost shard 0/2; --resume completes the job$"):
        batch.run_on_ray([file], out, settings, **how)
    killer.join()
    left = contents(out)
    assert {f"part-{part:05d}.jsonl" for part in range(1, 80, 2)} <= left.keys()
    assert left.items() < expected.items()
    batch.run_on_ray([file], out, settings, resume=True, **how)
    assert contents(out) == expected

    out = tmp_path / "driver"
    program = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    run = functools.partial(batch.run_on_ray, [file], out, settings, **how)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as driver:
        pickle.dump(run, driver.stdin)
        driver.stdin.close()
        kill_after_a_part(out, driver.pid)
    for _ in range(600):  # Ray ends the workers of a dead driver after a moment
        with contextlib.suppress(RequestError):
            batch.run([file], out, settings, device="cpu", resume=True)
            break
        time.sleep(0.1)
    assert contents(out) == expected


def test_a_cluster_that_is_missing_or_too_small_is_refused(tmp_path):
    for how, message in (
        ({"address": "nonsense"}, "Ray cannot be used at nonsense: "),
        ({"device": "cpu", "workers": 99999}, r"with \d+ CPUs cannot run 99999 workers"),
    ):
        with pytest.raises(RequestError, match=message):
            batch.run_on_ray([], tmp_path, batch.Settings(model="demo"), **how)
