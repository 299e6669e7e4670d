from __future__ import annotations

import subprocess

import pytest
import torch

from attention_kernels import BackendSpec
from attention_kernels.conformance import Case
from gpt2_infer.bench import environment, tables
from gpt2_infer.bench.results import Results, Series, read
from scripts import profile_kernels, update_readme
from scripts.profile_kernels import METRICS, combined, op_of, parse_csv

HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
V06 = "_ZN9attention3v0616attention_kernelILi64EEEvPKf"
FA1 = "_ZN9attention7fa1_v0415row_max_kernelEPKf"


def line(launch: int, kernel: str, metric: str, value: str) -> str:
    return f'"{launch}","{kernel}","{METRICS[metric]}","","{value}"'


def test_a_version_is_told_by_its_namespace():
    assert op_of(V06) == "v06"
    assert op_of(FA1) == "fa1_v04"
    assert op_of("_ZN2at6native6kernelEv") is None


def test_the_csv_of_several_launches_becomes_one_row_per_version(capsys):
    rows = parse_csv(
        [
            HEAD,
            line(0, V06, "duration_us", "2,000"),
            line(0, V06, "issue_active_percent", "50.5"),
            line(1, FA1, "duration_us", "1000"),
            line(1, FA1, "issue_active_percent", "10"),
            line(1, FA1, "shared_load_bank_conflicts", "n/a"),
            line(2, FA1, "duration_us", "3000"),
            line(2, FA1, "issue_active_percent", "50"),
            '"3","at::native::copy","unknown.metric","","7"',
        ]
    )
    assert rows["v06"] == [{"duration_us": 2.0, "issue_active_percent": 50.5}]
    assert "shared_load_bank_conflicts is n/a" in capsys.readouterr().err
    assert combined(rows["fa1_v04"]) == {
        "duration_us": 4.0,
        "issue_active_percent": pytest.approx(40.0),
    }


FAMILY = ["profile_kernels.py", "--family", "ablation", "--full", "--seqlen", "96"]


def test_the_profiler_runs_the_same_command_as_its_worker(monkeypatch):
    commands = []

    def run(words, **_):
        commands.append(words)
        out = f"==PROF== done\n{HEAD}\n{line(0, V06, 'duration_us', '1000')}\n"
        return subprocess.CompletedProcess(words, 0, out, "")

    monkeypatch.setattr(profile_kernels.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", FAMILY)
    assert profile_kernels.profile(["one", "two"]) == {"v06": [{"duration_us": 1.0}]}
    (words,) = commands
    assert words[0] == "ncu"
    assert words[words.index("--metrics") + 1] == "one,two"
    assert words[-6:] == [*FAMILY[1:], "--worker"]


def test_every_version_is_launched_as_asked(monkeypatch):
    seen = []

    def attention(spec, q, k, v, *, is_causal):
        seen.append((spec.name, q, is_causal))

    monkeypatch.setattr(Case, "inputs", lambda case, device: (case, case, case))
    monkeypatch.setattr(BackendSpec, "attention", attention)
    monkeypatch.setattr(profile_kernels, "resolve_device", lambda _: None)
    monkeypatch.setattr(profile_kernels.ladder, "build_all", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for words, is_causal in ((FAMILY, False), ([w for w in FAMILY if w != "--full"], True)):
        monkeypatch.setattr("sys.argv", [*words, "--out", "/tmp/none.json", "--worker"])
        profile_kernels.main()
        case = Case(96, 64, num_heads=12)
        assert seen == [(f"ABLATION_STEP_{n}", case, is_causal) for n in range(1, 9)]
        seen.clear()


def test_a_version_that_the_profiler_has_not_seen_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [*FAMILY, "--out", str(tmp_path / "r.json")])
    monkeypatch.setattr(profile_kernels, "known_counters", lambda: ([], []))
    monkeypatch.setattr(profile_kernels, "launch_each", lambda _: None)
    launch = {"duration_us": 1.0}
    rows = {f"ablation_v0{n}": [launch] for n in range(1, 9)}
    monkeypatch.setattr(profile_kernels, "profile", lambda _: rows)
    profile_kernels.main()
    assert len(read(tmp_path / "r.json").series) == 8
    del rows["ablation_v03"]
    (tmp_path / "r.json").unlink()
    with pytest.raises(SystemExit, match="ncu reported nothing for ablation_v03"):
        profile_kernels.main()


def test_no_two_metrics_are_one_counter():
    assert len({*METRICS.values()}) == len(METRICS)
    for name, counter in METRICS.items():
        if name.startswith(("shared", "global")):
            assert ("load" in name) == any(end in counter for end in ("op_ld.", "op_ldgsts."))


def test_registers_are_the_most_and_not_a_sum():
    one = {"duration_us": 1.0, "registers_per_thread": 40.0, "global_load_bytes": 8.0}
    two = {"duration_us": 1.0, "registers_per_thread": 64.0, "global_load_bytes": 8.0}
    assert combined([one, two]) == {
        "duration_us": 2.0,
        "registers_per_thread": 64.0,
        "global_load_bytes": 16.0,
    }


def test_a_sector_is_32_bytes_and_a_wavefront_128():
    sizes = dict(tables.THROUGHPUTS.values())
    assert {*sizes} <= {*METRICS}
    for metric, size in sizes.items():
        assert size == {"wavefronts": 128, "sectors": 32, "bytes": 1}[metric.rsplit("_", 1)[1]]


def test_a_profile_becomes_a_table_with_throughputs(tmp_path):
    found = {"shared_load_wavefronts": 1e6, "global_load_bytes": 4e6, "duration_us": 100.0}
    series = [
        Series(name, {"metric": metric, "counter": METRICS[metric]}, "", [value])
        for name in ("CUSTOM_CUDA_VERSION_1", "CUSTOM_CUDA_VERSION_2")
        for metric, value in found.items()
    ]
    series[3].samples = [2e6]
    settings = {
        "measures": "profile",
        "batch": 1,
        "heads": 12,
        "seqlen": 1024,
        "head_dim": 64,
        "full": False,
    }
    results = Results("profile-test", environment.provenance(), settings, series)
    results.write(tmp_path / "2026-01-01_x_profile-test.json")
    marked = (
        "<!-- table profile-test -->\n<!-- end -->\n"
        "<!-- ladder custom-cuda profile-test -->\n<!-- end -->\n"
    )
    text = update_readme.render(marked, tmp_path)
    # 1e6 wavefronts of 128 bytes in 100 us are 1.28 TB/s.
    assert "| `CUSTOM_CUDA_VERSION_1` | 1e+06 | 4e+06 | 100 | 1.28e+03 | 40 |" in text
    was = "(`CUSTOM_CUDA_VERSION_1`: 1,000,000)"
    assert f"**Measured:** 2,000,000 wavefronts of shared loads {was}." in text


def test_a_counter_that_the_gpu_has_not_is_not_asked_for(monkeypatch, capsys):
    listed = "\n".join(f"{c.split('.')[0]}  Counter  what it is" for c in METRICS.values())
    listed = "Device NVIDIA\n" + listed.replace("sm__pipe_tensor_cycles_active", "sm__other")
    done = type("Done", (), {"returncode": 0, "stdout": listed, "stderr": ""})
    monkeypatch.setattr(profile_kernels.subprocess, "run", lambda *_, **__: done)
    counters, missing = profile_kernels.known_counters()
    assert missing == ["tensor_pipe_percent"]
    assert {*counters} == {*METRICS.values()} - {METRICS["tensor_pipe_percent"]}
    assert "not on this GPU: tensor_pipe_percent" in capsys.readouterr().err


def test_only_ladders_are_profiled():
    assert [spec.name for spec in profile_kernels.specs_of("wmma-fa2")][-1].endswith("VERSION_3")
    assert "FLASH_ATTENTION_1_CPU" not in {
        spec.name for spec in profile_kernels.specs_of("flash-attention-1")
    }
    with pytest.raises(SystemExit, match="no ladder is of the family pytorch: there are custom-cu"):
        profile_kernels.specs_of("pytorch")


def test_what_the_machine_has_not_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["profile_kernels.py", "--out", str(tmp_path / "r.json")]
    monkeypatch.setattr("sys.argv", [*command, "--family", "nope"])
    with pytest.raises(SystemExit, match=r"^no ladder is of the family nope: there are"):
        profile_kernels.main()
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=r"^ncu, of Nsight Compute, is not on PATH$"):
        profile_kernels.main()
    monkeypatch.setattr(profile_kernels, "known_counters", lambda: ([], []))
    with pytest.raises(SystemExit, match=r"^cuda: this machine has no CUDA device"):
        profile_kernels.main()
    assert not list(tmp_path.iterdir())
