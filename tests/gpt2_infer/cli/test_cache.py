from __future__ import annotations

from tests.gpt2_infer.cli.program import run


def test_the_cache_is_shown_and_emptied(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path))
    (tmp_path / "v01").mkdir()
    (tmp_path / "v01" / "kernel.so").write_bytes(bytes(3 * 2**20))
    status, out, _ = run(capsys, "cache")
    assert status == 0
    assert "     3.0 MiB  v01\n" in out
    assert out.endswith(f"     3.0 MiB in {tmp_path}\n")
    status, out, _ = run(capsys, "cache", "--clear")
    assert (status, out) == (0, f"freed 3.0 MiB in {tmp_path}\n")
    assert not any(tmp_path.iterdir())
    _, out, _ = run(capsys, "cache")
    assert out == f"     0.0 MiB in {tmp_path}\n"
