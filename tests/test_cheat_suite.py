"""The plugin of `make cheats`, and the outcome of its last run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2_infer.bench.record import read
from tests.attention_kernels.judge.cheats import CHEATS
from tests.attention_kernels.judge.corpora import CORPORA

LAST_RUN = Path(__file__).parents[1] / "results" / "cheats.json"


def test_the_corpora_name_rows_of_the_table():
    names = {cheat.name for cheat in CHEATS}
    for corpus in CORPORA:
        assert {row for rows in corpus["kinds"].values() for row in rows} <= names


@pytest.mark.skipif(not LAST_RUN.exists(), reason=f"{LAST_RUN.name} is not there: make cheats")
def test_no_cheat_passed_in_the_last_run_and_every_honest_kernel_did():
    results = read(LAST_RUN)
    assert [row for row in results.rows if row.status == "failed"] == []
    passed = [row for row in results.of("fate") if row.reason == "passed"]
    assert [row.contender for row in passed if not row.extra["is_harmless"]] == []
    honest = [row for row in results.of("honest") if row.status == "ok"]
    assert {row.reason for row in honest} == {"passed"}
    assert len({row.contender for row in honest}) >= 100
    assert results.provenance.dirty in (False, None)
