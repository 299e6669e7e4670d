from __future__ import annotations

from pathlib import Path

import pytest

from scripts import update_readme
from scripts.update_readme import ROOT, render


def test_the_generated_parts_of_the_documents_are_current(monkeypatch):
    monkeypatch.setattr("sys.argv", ["update_readme.py", "--check"])
    assert update_readme.main() == 0


def test_links_to_results_are_relative_to_the_page():
    table = "<!-- table kernel-fp32 -->\n<!-- end -->\n"
    assert "](results/" in render(table, ROOT / "results")
    assert "](../results/" in render(table, ROOT / "results", "../")


def test_rendering_twice_is_rendering_once_and_touches_only_what_is_marked(tmp_path: Path):
    text = "before\n<!-- table generation-cpu -->\nold\n<!-- end -->\nafter\n"
    once = render(text, tmp_path)
    assert "old" not in once
    assert "Not measured yet." in once
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert render(once, tmp_path) == once


def test_the_command_tells_what_is_stale_and_writes(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table generation-cpu -->\nold\n<!-- end -->\n")
    for words, status, stale in ((["--check"], 1, True), ([], 0, True), (["--check"], 0, False)):
        monkeypatch.setattr("sys.argv", ["update_readme.py", *words])
        before = readme.read_text()
        assert update_readme.main() == status
        assert (readme.read_text() != before) == (not words)
        assert ("README.md is stale" in capsys.readouterr().err) == (stale and bool(words))
    assert "old" not in readme.read_text()


def test_a_readme_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    for words in ([], ["--check"]):
        monkeypatch.setattr("sys.argv", ["update_readme.py", *words])
        with pytest.raises(SystemExit) as caught:
            update_readme.main()
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert f"{tmp_path / 'README.md'} cannot be used: No such file or directory" in err
        assert err.count("\n") == 1
    assert not (tmp_path / "README.md").exists()


def test_a_picture_is_shown_once_it_is_drawn(tmp_path: Path):
    text = "<!-- plot kernel-cpu time -->\n<!-- end -->\n"
    assert render(text, tmp_path) == text
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "kernel-cpu_time.png").write_bytes(b"")
    shown = render(text, tmp_path)
    assert "![kernel-cpu, time](results/plots/kernel-cpu_time.png)" in shown
