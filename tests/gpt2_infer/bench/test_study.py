from __future__ import annotations

import itertools

import pytest

from attention_kernels.errors import RejectedTimeError
from gpt2_infer.bench.record import KernelCell, ResultsError, Row
from gpt2_infer.bench.study import Contender, Progress, Subject, time_cells
from tests.gpt2_infer.bench.common import file_of, full_disk, kernel, provenance

CELLS = [KernelCell(8), KernelCell(16)]


def subject(contenders=None, cells=CELLS, sources=None) -> Subject[KernelCell]:
    made = Subject[KernelCell]()
    made.cells, made.rounds, made.contenders = cells, 2, contenders
    made.sources = sources or {"A": "1"}
    return made


def progress(out, settings=(), cells=CELLS, sources=None, **changes) -> Progress:
    file = file_of("kernel", [], settings=settings, provenance=provenance(**changes))
    return Progress(out, file, subject(cells=cells, sources=sources))


def test_rounds_are_interleaved_the_first_is_dropped_and_a_failure_stops_no_other():
    order, failing = [], ["REJECTED", "LATE"]

    def sample(name: str) -> dict[str, float]:
        order.append(name)
        if name == "REJECTED" or (name == "LATE" and order.count("LATE") == 3):
            raise RejectedTimeError("no longer right")
        return {"time": 1.23456789 + len(order), "call": 9.0}

    def reject() -> None:
        raise RejectedTimeError("no longer right")

    def contenders(_):
        for name in ("GOOD", "REJECTED", "LATE", "WRONG_AFTERWARDS"):
            recheck = reject if name == "WRONG_AFTERWARDS" else None
            yield Contender(kernel(name, []), lambda name=name: sample(name), recheck)
        yield Contender(kernel("REFUSED", [], status="refused", reason="not this"))

    good, call, *others = time_cells(subject(contenders, CELLS[:1]))
    kept = ["GOOD", "LATE", "WRONG_AFTERWARDS"]
    assert order == ["GOOD", "REJECTED", "LATE", "WRONG_AFTERWARDS", *kept, *kept]
    assert (good.status, good.samples) == ("ok", [6.23457, 9.23457])
    assert (call.metric, call.samples) == ("call", [9.0, 9.0])
    assert [(row.contender, row.status, row.samples, row.reason) for row in others] == [
        *((name, "failed", [], "no longer right") for name in (*failing, "WRONG_AFTERWARDS")),
        ("REFUSED", "refused", [], "not this"),
    ]


def time(out, samples) -> list[Row]:
    def contenders(_):
        return [Contender(kernel("A", []), lambda: {"time": next(samples)})]

    return time_cells(subject(contenders), progress(out))


@pytest.fixture
def interrupted(tmp_path):
    """The results file of a run that was interrupted in its second cell."""

    def samples():
        yield from (1.0, 2.0, 3.0, 4.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time(tmp_path / "r.json", samples())
    return tmp_path / "r.json"


def test_an_interrupted_run_resumes_after_the_last_finished_cell(interrupted):
    found = time(interrupted, itertools.count(5.0))
    assert [row.samples for row in found] == [[2.0, 3.0], [6.0, 7.0]]
    assert [row.kernel for row in found] == CELLS


def test_a_truncated_cell_is_measured_again(interrupted):
    partial = interrupted.with_name("r.json.partial")
    header, cell, _ = partial.read_bytes().split(b"\n")
    for rest, left in ((cell[:-9], 0), (cell, 0), (cell + b"\n", 1), (cell + b"\n" + cell[:9], 1)):
        partial.write_bytes(header + b"\n" + rest)
        assert len(progress(interrupted).cells) == left
    partial.write_bytes(header[:-9])
    with pytest.raises(ResultsError, match=r"partial cannot be read, delete it: "):
        progress(interrupted)


def test_another_commit_source_machine_or_plan_is_refused(interrupted):
    for changes, what in (
        ({"commit": "def"}, "commit"),
        ({"source_digest": "456"}, "source digest"),
        ({"sources": {"A": "2"}}, "sources"),
        ({"cpu_threads": 8, "gpu": None}, "machine"),
        ({"build_flags": {"NVCC_APPEND_FLAGS": "-O1"}}, "build flags"),
        ({"prebuilt": ["A"]}, "prebuilt"),
        ({"settings": {"rounds": 9}}, "settings"),
        ({"cells": CELLS[:1]}, "settings"),
    ):
        with pytest.raises(ResultsError, match=rf"another run \({what} differ\): delete it"):
            progress(interrupted, **changes)


def test_a_full_disk_is_one_sentence_and_loses_no_finished_cell(interrupted, monkeypatch):
    kept = progress(interrupted)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", full_disk)
        with pytest.raises(ResultsError, match="No space left on device; rerun to resume"):
            kept.add(str(CELLS[1]), [])
    assert [*progress(interrupted).cells] == [str(CELLS[0])]
