"""--entry: every command takes somebody else's kernel."""

from __future__ import annotations

import pytest

from tests.attention_kernels.inspection.test_resources import needs_nvcc
from tests.attention_kernels.ladder.test_entry import ENTRIES, STRANGERS
from tests.gpt2_infer.cli.program import DEMO, run

FILE = str(STRANGERS / "bhnd.cu")
ENTRY = ["--entry", f"{ENTRIES['bhnd']} | Only: causal && default_scale"]
NO_MASK = str(STRANGERS / "early_flash.cu"), "--entry", ENTRIES["early_flash"]


@pytest.mark.slow
def test_verify_takes_an_entry(capsys):
    status, out, _ = run(
        capsys, "verify", FILE, *ENTRY, "--device", "cpu", "--quick", "--seed", "1"
    )
    assert (status, out.splitlines()[-1]) == (0, "PASSED")
    assert out.startswith("BHND on cpu, emulated: ")
    assert "\n  only calls with `causal && default_scale` were tried, as it declares\n" in out
    assert "refused" not in out


@pytest.mark.slow
def test_accesses_are_of_the_lines_of_the_strangers_file(capsys):
    status, out, _ = run(capsys, "accesses", FILE, *ENTRY, "--seqlen", "8")
    assert (status, out.splitlines()[0]) == (0, "bhnd.cu, emulated: N=8 B=1 H=1 head_dim=64 causal")
    *_, last = out.splitlines()
    assert "global store" in last
    assert last.endswith("acc[i] / l;")


@needs_nvcc
def test_predict_counts_the_copies(capsys):
    status, out, _ = run(
        capsys, "predict", FILE, *ENTRY, "--seqlen", "64", "--heads", "1", "--json"
    )
    assert status == 0
    assert '"launches": 5' in out
    status, _, err = run(capsys, "predict", *NO_MASK, "--seqlen", "64")
    assert (status, "it takes only calls with `!causal`" in err) == (2, True)


@pytest.mark.slow
def test_the_model_writes_with_it_and_compare_checks_it(capsys, tmp_path):
    words = ["--prompt", "The old", "--ignore-eos", "--json", "--backend"]
    texts = [
        run(capsys, *DEMO[:4], "--max-new-tokens", "3", *words, *more)[1].split('"results"')[1]
        for more in ([FILE, *ENTRY], ["NAIVE_PYTORCH"])
    ]
    assert texts[0] == texts[1]
    out = str(tmp_path / "results.json")
    options = ["--task", "kernel", "--device", "cpu", "--seqlens", "64", "--out", out]
    status, table, _ = run(capsys, "compare", *options, "--backends", FILE, *ENTRY)
    assert (status, "BHND" in table) == (0, True)


@pytest.mark.parametrize("names", [[], [FILE, FILE]])
def test_an_entry_is_about_one_file(capsys, names):
    status, _, err = run(capsys, "report", *names, *ENTRY)
    said = ", ".join(names) or "none"
    expected = f"gpt2-infer: error: --entry says how to call one file, *.cu, but here: {said}\n"
    assert (status, err) == (2, expected)
