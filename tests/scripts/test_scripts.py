from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from gpt2_infer.bench import study
from gpt2_infer.bench.show import charts
from scripts import measure, plot_results
from tests.conftest import ROOT

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
    assert "no study is named one" in said('[two]\nkind = "kernel"\n')
    mine.unlink()
    assert "mine.toml cannot be read" in complaint("measure.py", "--studies", str(mine))


def test_existing_results_are_not_measured_again(capsys, monkeypatch, tmp_path):
    (tmp_path / "kernel-cpu.json").touch()
    monkeypatch.setattr("sys.argv", ["measure.py", "--prefix", f"{tmp_path}/", "kernel-cpu"])
    assert measure.main() == 0
    assert "kernel-cpu.json already exists" in capsys.readouterr().out


def test_every_study_has_results():
    files = [file.stem.split("_", 2) for file in (ROOT / "results").glob("*_*_*.json")]
    assert study.load().keys() <= {task for _, _, task in files}


@pytest.mark.slow
def test_the_committed_pictures_are_current():
    drawn = plot_results.draw_documents()
    assert drawn.keys() == {*plot_results.PLOTS.iterdir()}
    for file, svg in drawn.items():
        assert charts.is_same(file.read_text("utf-8"), svg.decode()), file.name


def test_the_documents_are_current(monkeypatch, capsys):
    cogapp = pytest.importorskip("cogapp")
    monkeypatch.chdir(ROOT)
    documents = ["README.md", *map(str, sorted(Path("docs").glob("*.md")))]
    assert cogapp.Cog().main(["cog", "--check", "-P", *documents]) == 0, capsys.readouterr().out
