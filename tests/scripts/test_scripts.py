from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from gpt2_infer.bench import study
from scripts import measure, plot_results

ROOT = Path(__file__).parents[2]
SCRIPTS = [file.name for file in sorted((ROOT / "scripts").glob("[a-z]*.py"))]


@pytest.fixture
def complaint(capsys, monkeypatch):
    """complaint(script, words): the last line with which it refuses them."""

    def complaint(name, *words):
        monkeypatch.setattr("sys.argv", [name, *words])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        out, err = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        return err.splitlines()[-1]

    return complaint


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_wrong_option_is_refused(name, complaint):
    assert "--no-such-option" in complaint(name, "--no-such-option")


def test_your_own_study_is_checked(complaint, tmp_path):
    mine = tmp_path / "mine.toml"

    def said(text: str) -> str:
        mine.write_text(text)
        out = f"{tmp_path}/"
        return complaint("measure.py", "--studies", str(mine), "--prefix", out, "one")

    assert "no ladder named none" in said('[one]\nkind = "inspection"\nfamily = "none"\n')
    assert "Expected `int` >= 2" in said('[one]\nkind = "kernel"\nrounds = 1\n')
    mine.unlink()
    assert "mine.toml cannot be read" in complaint("measure.py", "--studies", str(mine))


def test_every_study_can_be_listed_and_an_unknown_one_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["measure.py", "--list"])
    assert measure.main() == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*study.load()]
    monkeypatch.setattr("sys.argv", ["measure.py", "no-such"])
    with pytest.raises(SystemExit) as caught:
        measure.main()
    assert caught.value.code == 2
    assert "no study is named no-such" in capsys.readouterr().err


def test_existing_results_are_not_measured_again(capsys, monkeypatch, tmp_path):
    (tmp_path / "kernel-cpu.json").touch()
    monkeypatch.setattr("sys.argv", ["measure.py", "--prefix", f"{tmp_path}/", "kernel-cpu"])
    assert measure.main() == 0
    assert "kernel-cpu.json already exists" in capsys.readouterr().out


def test_every_results_file_has_a_study_and_every_study_results():
    files = [file.stem.split("_", 2) for file in (ROOT / "results").glob("*_*_*.json")]
    tasks = {task for _, device, task in files if device != "published"}
    assert tasks == study.load().keys()


@pytest.mark.slow
def test_the_committed_pictures_are_current():
    drawn = plot_results.draw_documents(ROOT)
    there = {*(ROOT / "results" / "plots").iterdir()}
    assert plot_results.complaints(drawn, there) == []


def test_a_stale_missing_or_unshown_picture_is_named(tmp_path):
    stale, missing, unshown = (tmp_path / f"{name}.svg" for name in ("s", "m", "u"))
    stale.write_text("old")
    found = plot_results.complaints({stale: b"new", missing: b"new"}, {stale, unshown})
    assert found == ["stale: s.svg", "missing: m.svg", "not shown: u.svg"]


def test_the_documents_are_current(monkeypatch, capsys):
    cogapp = pytest.importorskip("cogapp")
    monkeypatch.chdir(ROOT)
    documents = ["README.md", *map(str, sorted(Path("docs").glob("*.md")))]
    assert cogapp.Cog().main(["cog", "--check", "-P", *documents]) == 0, capsys.readouterr().out
