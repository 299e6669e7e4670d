from __future__ import annotations

import shutil

import pytest

from gpt2_infer import RequestError, batch
from tests.gpt2_infer.batch.common import CPU, make_settings, write_input

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of its own settings


def test_rays_rows_are_those_of_a_job_without_it(save_checkpoint, tmp_path):
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
    assert counts == (40, sum(b'"error": null' not in line for line in expected))
    # Rows that the checkpoint lacks are completed, and no other.
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


@pytest.mark.parametrize("devices", ["0,1", "cpu:x"])
def test_devices_of_a_cluster_are_its_gpus_or_cpus(devices, tmp_path):
    from gpt2_infer.batch.cluster import run_on_ray

    settings = batch.Settings(model="demo")
    with pytest.raises(RequestError, match="devices must be"):
        run_on_ray([], tmp_path, settings, address="local", devices=devices)
