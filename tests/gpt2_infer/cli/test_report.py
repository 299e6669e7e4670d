from __future__ import annotations

import os

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from gpt2_infer.cli import main
from tests.gpt2_infer.bench.common import kernels


def test_a_page_may_show_results_alone_and_bad_input_is_refused(tmp_path, capsys):
    results, page = tmp_path / "r.json", tmp_path / "page.html"
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    kernels().write(results)
    without = kernels()
    for row in without.rows:
        row.extra.clear()
    without.write(lacking := tmp_path / "lacking.json")
    assert main(["report", str(results), "--out", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {page}")
    assert "kernel-test, roofline" in page.read_text("utf-8")
    for words, reason in (
        ([], "nothing to report"),
        (["NAIVE_PYTORCH"], "no version file"),
        ([str(results), "--gpu", "v100"], "v100"),
        ([str(results), "--profile", "r.csv"], "--profile is compared with predictions: name"),
        (["CUSTOM_CUDA_VERSION_2", "--profile", "/nonexistent"], "/nonexistent: No such file"),
        ([str(page.with_suffix(".json"))], "cannot be read"),
        ([str(fifo)], "Not a regular file"),
        ([str(results), "--out", str(tmp_path / "no" / "page.html")], "there is no folder"),
        (["CUSTOM_CUDA_VERSION_2", "--out", "/"], "/ is a folder"),
        (
            [str(lacking)],
            "not as studies of kind kernel are: KeyError: 'precision'",
        ),
    ):
        assert main(["report", *words]) == 2
        assert reason in capsys.readouterr().err
