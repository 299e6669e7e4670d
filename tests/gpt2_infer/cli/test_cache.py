from __future__ import annotations

from gpt2_infer.cli.cache import cache, text


def test_the_cache_is_shown_and_emptied(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path))
    name = "v01-sm_90-0123456789abcdef"
    (tmp_path / f"{name}.build-x").mkdir()
    (tmp_path / f"{name}.build-x" / "kernel.so").write_bytes(bytes(2 * 2**20))
    (tmp_path / f"{name}.so").write_bytes(bytes(2**20))
    (tmp_path / "thesis.txt").write_text("mine")
    found = cache()
    assert found.entries == {f"{name}.build-x": 2 * 2**20, f"{name}.so": 2**20}
    assert text(found, clear=False).endswith(f"     3.0 MiB in {tmp_path}")
    assert cache(clear=True).freed_bytes == 3 * 2**20
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
