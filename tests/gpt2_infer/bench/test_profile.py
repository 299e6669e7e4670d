from __future__ import annotations

import pytest

from gpt2_infer.bench.profile import METRICS, _ncu, combined, parse_csv
from gpt2_infer.errors import RequestError

HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
V06 = "_ZN9attention3v0616attention_kernelILi64EEEvPKf"
FA1 = "_ZN9attention7fa1_v0415row_max_kernelEPKf"


def line(launch: int, kernel: str, metric: str, value: str) -> str:
    return f'"{launch}","{kernel}","{METRICS[metric]}","","{value}"'


def test_the_csv_of_several_launches_becomes_one_row_per_version(capsys):
    rows = parse_csv(
        [
            HEAD,
            line(0, V06, "duration_us", "2,000"),
            line(0, V06, "issue_active_percent", "50.5"),
            line(1, FA1, "duration_us", "1000"),
            line(1, FA1, "issue_active_percent", "10"),
            line(1, FA1, "registers_per_thread", "90"),
            line(1, FA1, "shared_load_bank_conflicts", "n/a"),
            line(2, FA1, "duration_us", "3000"),
            line(2, FA1, "issue_active_percent", "50"),
            line(2, FA1, "registers_per_thread", "40"),
            '"3","at::native::copy","unknown.metric","","7"',
        ]
    )
    assert rows["v06"] == [{"duration_us": 2.0, "issue_active_percent": 50.5}]
    assert "shared_load_bank_conflicts is n/a" in capsys.readouterr().err
    assert combined(rows["fa1_v04"]) == {
        "duration_us": 4.0,
        "issue_active_percent": pytest.approx(40.0),
        "registers_per_thread": 90,
    }


def test_a_missing_profiler_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RequestError, match=r"ncu \(Nsight Compute\) is not on PATH"):
        _ncu("--version")
