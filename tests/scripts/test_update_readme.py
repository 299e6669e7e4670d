from __future__ import annotations

from pathlib import Path

from scripts.update_readme import ROOT, render


def test_the_readmes_tables_are_current():
    text = (ROOT / "README.md").read_text("utf-8")
    assert render(text, ROOT / "results") == text


def test_rendering_twice_is_rendering_once_and_touches_only_what_is_marked(tmp_path: Path):
    text = "before\n<!-- table generation-cpu -->\nold\n<!-- end -->\nafter\n"
    once = render(text, tmp_path)
    assert "old" not in once
    assert "Not measured yet." in once
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert render(once, tmp_path) == once
