"""Stalls next to the profiler's, and what-ifs next to the versions that followed."""

from __future__ import annotations

import pytest

from gpt2_infer.bench.record import Row
from gpt2_infer.bench.show import explained
from gpt2_infer.bench.show.pivot import pivot
from tests.gpt2_infer.bench.common import file_of

CELL = {"seqlen": 1024, "batch": 1, "num_heads": 12, "head_dim": 64, "is_causal": True}


def explanation(*, found: float, correlation: float):
    figures = {"worst found": found, "worst": 5.0, "rank correlation": correlation}
    rows = [
        Row(contender="A", metric=metric, unit="1", samples=[value], cell=CELL)
        for metric, value in figures.items()
    ]
    return file_of("stalls", rows, settings={"gpu": "H200 SXM"})


def test_an_earlier_model_is_shown_next_to_the_present_one():
    earlier, now = explanation(found=2, correlation=0.5), explanation(found=4, correlation=0.9)
    now.rows.append(Row(contender="B", metric="samples", unit="1", samples=[9.0], cell=CELL))
    (table,) = pivot("FILE", now, explained.compared(earlier))
    found = dict(zip(table.head, table.rows[0], strict=True))
    assert (found["worst lines found, first"], found["worst lines found, now"]) == (
        "2 of 5",
        "4 of 5",
    )
    assert (found["rank correlation, first"], found["rank correlation, now"]) == ("0.50", "0.90")
    assert table.rows[1] == ("`B`", "9", *[""] * 4)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("conflicts", ("line 9 without conflicts", "100.0 -> 40.0 (-60%)", "1.20")),
        ("uneven", ("", "", "")),
    ],
)
def test_the_best_what_if_of_a_cause_is_compared_with_the_next_version(cause, expected):
    what_ifs = [
        {"cause": "conflicts", "line": line, "change": "without conflicts", "time_us": us}
        for line, us in ((7, 70.0), (9, 40.0))
    ]
    row = Row(contender="A", metric="predicted time", unit="us", samples=[100.0], cell=CELL)
    row.extra["what_ifs"] = what_ifs
    timed = [
        Row(contender=name, metric="time", unit="us", samples=[us], cell=CELL | {"dtype": "x"})
        for name, us in (("A", 80.0), ("B", 40.0))
    ]
    one = explained.Step("A", "B", "pad the rows", cause)
    _, following, place, predicted, measured, ratio = explained.step(
        one, file_of("stalls", [row]), timed
    )
    assert following == "`B`: pad the rows"
    assert measured == "80.0 -> 40.0 (-50%)"
    assert (place, predicted, ratio) == expected
