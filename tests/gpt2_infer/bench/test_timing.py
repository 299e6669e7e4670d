"""interleave() and its progress bar; what else bench has is tested in test_results.py."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from gpt2_infer.bench import timing


@pytest.mark.parametrize("own", [True, False])
def test_the_bar_tells_of_runs_that_are_over(own, monkeypatch):
    bar = tqdm(total=9, file=io.StringIO())
    if own:
        monkeypatch.setattr(timing, "tqdm", lambda **options: bar)
    at = []

    def run() -> float:
        at.append(bar.n)
        return 1.0

    runs = dict.fromkeys("abc", run)
    timing.interleave(runs, rounds=2, bar=None if own else bar)
    assert at == [*range(9)]
    assert (bar.n, bar.total) == (9, 9)
    assert bar.disable is own  # closed by whom it belongs to
    bar.close()


def test_runs_that_are_left_out_are_not_waited_for():
    bar = tqdm(total=8, file=io.StringIO())

    def reject() -> float:
        raise timing.Rejected

    runs = {"a": reject, "b": lambda: 1.0}
    timing.interleave(runs, rounds=3, bar=bar, on_rejected=lambda *_: None)
    assert (bar.n, bar.total) == (5, 5)  # a's one and b's four
    bar.close()
