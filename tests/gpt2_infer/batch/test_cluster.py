from __future__ import annotations

import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pytest

from gpt2_infer import RequestError, batch
from gpt2_infer.batch.rows import read_rows
from tests.gpt2_infer.batch.common import CPU, make_settings, write_input

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns about its own settings


def test_rows_are_the_same_with_and_without_ray(save_checkpoint, tmp_path):
    from gpt2_infer.batch.cluster import run_on_ray

    settings = make_settings(save_checkpoint()[0])
    file = write_input(tmp_path / "in.jsonl")
    batch.run([file], tmp_path / "alone", settings, devices=CPU)

    def lines(name):
        return sorted(
            line
            for part in (tmp_path / name).glob("*.jsonl")
            for line in part.read_bytes().splitlines()
        )

    expected = lines("alone")
    out = tmp_path / "ray"
    how = {"address": "local", "devices": "cpu:2"}
    counts = run_on_ray([file], out, settings, **how)
    assert lines("ray") == expected
    assert counts == (40, sum(b'"error":null' not in line for line in expected))
    # Only the rows missing from the checkpoint are completed.
    first, *others = sorted((out / "_checkpoint").glob("*"))
    for left in others:
        left.unlink() if left.is_file() else shutil.rmtree(left)
    for part in out.glob("*.jsonl"):
        if not part.name.startswith(first.name.partition(".")[0]):
            part.unlink()
    assert len(lines("ray")) < 40
    assert run_on_ray([file], out, settings, resume=True, **how) == counts
    assert lines("ray") == expected
    with pytest.raises(RequestError, match="on_ray"):
        batch.run([file], out, settings, devices=CPU, resume=True)


def test_a_killed_driver_can_be_resumed(save_checkpoint, tmp_path):
    from gpt2_infer.batch.cluster import run_on_ray

    settings = make_settings(save_checkpoint()[0])
    file, out = write_input(tmp_path / "in.jsonl", 400), tmp_path / "out"
    how = {"address": "local", "devices": "cpu:1"}
    driver = subprocess.Popen(
        [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    pickle.dump(functools.partial(run_on_ray, [file], out, settings, **how), driver.stdin)
    driver.stdin.close()
    deadline = time.monotonic() + 120
    while not [*out.glob("*.jsonl")]:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert len([*out.glob("*.jsonl")]) < 40
    assert run_on_ray([file], out, settings, resume=True, **how) == (400, 0)
    ids = [row.fields["id"] for row in read_rows(sorted(out.glob("*.jsonl")))]
    assert sorted(ids) == sorted(f"row-{i}" for i in range(400))


@pytest.mark.parametrize("devices", ["0,1", "cpu:x"])
def test_devices_of_a_cluster_are_its_gpus_or_cpus(devices, tmp_path):
    from gpt2_infer.batch.cluster import run_on_ray

    settings = batch.Settings(model="demo")
    with pytest.raises(RequestError, match="devices must be"):
        run_on_ray([], tmp_path, settings, address="local", devices=devices)
