from __future__ import annotations

from tests.gpt2_infer.cli.program import run


def test_the_cache_is_shown_and_emptied(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path))
    name = "v01-sm_90-0123456789abcdef"
    (tmp_path / f"{name}.build-x").mkdir()
    (tmp_path / f"{name}.build-x" / "kernel.so").write_bytes(bytes(2 * 2**20))
    (tmp_path / f"{name}.so").write_bytes(bytes(2**20))
    (tmp_path / "thesis.txt").write_text("mine")
    status, out, _ = run(capsys, "cache")
    assert status == 0
    assert f"     1.0 MiB  {name}.so\n" in out
    assert f"     2.0 MiB  {name}.build-x\n" in out
    assert out.endswith(f"     3.0 MiB in {tmp_path}\n")
    status, out, _ = run(capsys, "cache", "--clear")
    assert (status, out) == (0, f"freed 3.0 MiB in {tmp_path}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    _, out, _ = run(capsys, "cache")
    assert out == f"     0.0 MiB in {tmp_path}\n"
