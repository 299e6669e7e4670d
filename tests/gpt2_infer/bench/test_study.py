from __future__ import annotations

import pytest

from gpt2_infer.bench.record import KernelCell, ResultsError, Row
from gpt2_infer.bench.study import (
    Contender,
    Progress,
    RejectedError,
    Subject,
    interleave,
    time_cells,
)
from tests.gpt2_infer.bench.common import file_of, kernel, provenance

CELLS = [KernelCell(8), KernelCell(16)]


def test_rounds_are_interleaved_and_the_first_is_dropped():
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    figures = interleave({n: lambda n=n: run(n) for n in "abc"}, rounds=2)
    assert "".join(order) == "abcabcabc"
    assert figures == {"a": [4, 7], "b": [5, 8], "c": [6, 9]}


def test_a_rejected_contender_has_no_figures_and_does_not_run_again():
    calls: list[int] = []

    def reject() -> float:
        calls.append(1)
        if len(calls) == 3:
            raise RejectedError("wrong")
        return 1.0

    figures = interleave({"a": reject, "b": lambda: 2.0}, rounds=3)
    assert figures["b"] == [2.0, 2.0, 2.0]
    assert str(figures["a"]) == "wrong"
    assert len(calls) == 3


def subject(contenders=None, cells=CELLS, sources=None) -> Subject[KernelCell]:
    made = Subject[KernelCell]()
    made.cells, made.rounds, made.contenders = cells, 2, contenders
    made.sources = sources or {"A": "1"}
    return made


def progress(out, settings=(), cells=CELLS, sources=None, **changes) -> Progress:
    file = file_of("kernel", [], settings=settings, provenance=provenance(**changes))
    return Progress(out, file, subject(cells=cells, sources=sources))


def time(out, samples, **changes) -> list[Row]:
    def contenders(_):
        return [Contender(kernel("A", []), lambda: {"time": next(samples)})]

    return time_cells(subject(contenders), progress(out, **changes))


def interrupted():
    yield from (1.0, 2.0, 3.0, 4.0)  # the first cell, and a warm-up of the second
    raise KeyboardInterrupt


def test_an_interrupted_run_resumes_after_the_last_finished_cell(tmp_path):
    out = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        time(out, interrupted())
    found = time(out, iter((0.0, 5.0, 6.0)))
    assert [row.samples for row in found] == [[2.0, 3.0], [5.0, 6.0]]
    assert [row.kernel for row in found] == CELLS


def test_a_truncated_cell_is_measured_again(tmp_path):
    out = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        time(out, interrupted())
    partial = tmp_path / "r.json.partial"
    header, cell, _ = partial.read_bytes().split(b"\n")
    for rest, left in ((cell[:-9], 0), (cell, 0), (cell + b"\n", 1), (cell + b"\n" + cell[:9], 1)):
        partial.write_bytes(header + b"\n" + rest)
        assert len(progress(out).cells) == left
    partial.write_bytes(header[:-9])
    with pytest.raises(ResultsError, match=r"partial cannot be read, delete it: "):
        progress(out)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"commit": "def"}, "commit"),
        ({"source_digest": "456"}, "source digest"),
        ({"sources": {"A": "2"}}, "sources"),
        ({"cpu_threads": 8, "gpu": None}, "machine"),
        ({"build_flags": {"NVCC_APPEND_FLAGS": "-O1"}}, "build flags"),
        ({"prebuilt": ["A"]}, "prebuilt"),
        ({"settings": {"rounds": 9}}, "settings"),
        ({"cells": CELLS[:1]}, "settings"),
    ],
)
def test_another_commit_source_machine_or_plan_is_refused(changes, what, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        time(tmp_path / "r.json", interrupted())
    with pytest.raises(ResultsError, match=rf"belongs to another run \({what} differ\): delete it"):
        progress(tmp_path / "r.json", **changes)


def test_a_full_disk_is_one_sentence_and_loses_no_finished_cell(tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    kept = progress(out)
    kept.add(str(CELLS[0]), [kernel("A", [1.0, 2.0], cell=CELLS[0])])
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr("pathlib.Path.open", full)
        with pytest.raises(ResultsError) as caught:
            kept.add(str(CELLS[1]), [])
    assert "No space left on device (finished: 1); rerun to resume" in str(caught.value)
    assert [*progress(out).cells] == [str(CELLS[0])]


def test_a_failure_is_recorded_and_the_other_contenders_continue(tmp_path):
    def reject():
        raise RejectedError("no longer right")

    def contenders(_):
        for name in ("GOOD", "REJECTED", "WRONG_AFTERWARDS", "REFUSED"):
            row = kernel(name, [])
            if name == "REFUSED":
                row.status, row.reason = "refused", "not this"
                yield Contender(row)
            else:
                sample = reject if name == "REJECTED" else lambda: {"time": 1.23456789}
                recheck = reject if name == "WRONG_AFTERWARDS" else None
                yield Contender(row, sample, recheck)

    found = time_cells(subject(contenders, CELLS[:1]), progress(None))
    assert [(row.status, row.samples) for row in found] == [
        ("ok", [1.23457, 1.23457]),
        ("failed", []),
        ("failed", []),
        ("refused", []),
    ]
    assert found[1].reason == found[2].reason == "no longer right"
