from __future__ import annotations

import pytest
import torch

from scripts import bench_generation


def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "r.json"
    monkeypatch.setattr("sys.argv", ["bench_generation.py", "cuda", "--out", str(file)])
    with pytest.raises(SystemExit) as caught:
        bench_generation.main()
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "cuda: this machine has no CUDA device that torch can use" in err
    assert err.count("\n") == 1
    assert not file.exists()
