from __future__ import annotations

import functools
import json
import operator
from pathlib import Path

import pytest

from gpt2_infer.bench import environment, timing
from gpt2_infer.bench.results import (
    Results,
    ResultsError,
    Series,
    newest,
    read,
    read_finished,
)


def example() -> Results:
    series = [
        Series("a", {"mode": "recompute"}, "s", [3.0, 1.0, 2.0]),
        Series("b", {}, "s", status="failed", reason="it was wrong"),
    ]
    return Results("test-task", environment.provenance(), {"rounds": 3}, series)


def test_what_is_written_is_what_is_read(tmp_path):
    results = example()
    results.write(tmp_path / "r.json")
    back = read(tmp_path / "r.json")
    assert back == results
    assert back.series[0].median == 2.0
    assert back.series[0].spread == (1.0, 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "is truncated or not JSON"),
        (lambda text: "", "is truncated or not JSON"),
        (lambda text: "[]", "has schema version None, not 1"),
        (
            lambda text: text.replace('"schema_version": 1', '"schema_version": 0'),
            "version 0, not 1",
        ),
        (lambda text: text.replace('"samples"', '"sample"'), "does not fit the schema at series"),
        (
            lambda text: text.replace('"test-task"', '"Test Task"'),
            "does not fit the schema at task",
        ),
    ],
)
def test_a_file_that_is_not_whole_and_current_is_one_line(spoil, words, tmp_path):
    file = tmp_path / "r.json"
    example().write(file)
    file.write_text(spoil(file.read_text()))
    with pytest.raises(ResultsError) as caught:
        read(file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


RESULTS = Path(__file__).parents[3] / "results"
# Files as they are committed, of whatever date: one of each kind.
NAMES = {task: path.name for task, (path, _) in newest(RESULTS).items()}
KERNEL, GENERATION = NAMES["kernel-cpu"], NAMES["generation-kv"]
INSPECTION, PROFILE = NAMES["inspect-wmma"], NAMES["profile-wmma"]
BESIDE, PUBLISHED = NAMES["generation-cpu"], NAMES["case-study"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, ("provenance", "gpu")) for name in (KERNEL, GENERATION, INSPECTION, BESIDE)),
        *((name, ("provenance", "cpu_threads")) for name in (KERNEL, PROFILE, BESIDE)),
        *((name, ("provenance", "packages", "torch")) for name in (KERNEL, INSPECTION, BESIDE)),
        (BESIDE, ("provenance", "packages", "transformers")),
        (GENERATION, ("provenance", "gpu", "name")),
        *((name, ("provenance", "source_digest")) for name in (KERNEL, GENERATION)),
        *((name, ("settings", "rounds")) for name in (KERNEL, GENERATION, BESIDE)),
        *((name, ("settings", "baseline")) for name in (KERNEL, GENERATION)),
        *((name, ("settings", "cells")) for name in (KERNEL, GENERATION)),
        *((name, ("settings", "prompt_tokens")) for name in (GENERATION, BESIDE)),
        *((name, ("settings", "heads")) for name in (INSPECTION, PROFILE)),
        (INSPECTION, ("settings", "nvcc")),
        (PUBLISHED, ("settings", "note")),
        *(
            (KERNEL, ("series", 0, "labels", label))
            for label in ("precision", "family", "seqlen", "head_dim", "is_causal")
        ),
        *(
            (GENERATION, ("series", 0, "labels", label))
            for label in ("precision", "family", "max_tokens", "mode")
        ),
        (PROFILE, ("series", 0, "labels", "metric")),
        (INSPECTION, ("series", 0, "labels", "change")),
        (INSPECTION, ("series", 0, "labels", "metric")),
        (BESIDE, ("series", 0, "labels", "program")),
        (PUBLISHED, ("series", 0, "labels", "gpu")),
        (KERNEL, ("series", 0, "facts")),
        *(
            (KERNEL, ("series", 0, "facts", fact))
            for fact in ("error", "budget", "naive_error", "relative_error", "workspace_bytes")
        ),
    ],
)
def test_what_a_table_or_a_plot_needs_is_in_the_schema(name, path, tmp_path):
    value = json.loads((RESULTS / name).read_text("utf-8"))
    *folders, missing = path
    del functools.reduce(operator.getitem, folders, value)[missing]
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(ResultsError) as caught:
        read(tmp_path / name)
    place = ".".join(map(str, folders))
    assert str(caught.value).endswith(f"schema at {place}: '{missing}' is a required property")


def test_what_was_not_timed_needs_no_facts(tmp_path):
    value = json.loads((RESULTS / KERNEL).read_text("utf-8"))
    first = value["series"][0]
    first |= {"samples": [], "status": "refused", "reason": "it does not take this", "facts": {}}
    (tmp_path / KERNEL).write_text(json.dumps(value))
    assert read_finished(tmp_path / KERNEL).series[0].facts == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda results: results.series.clear(), "it has no series"),
        (
            lambda results: results.series[0].samples.pop(),
            "1 of its 2 series have fewer samples than its 3 rounds",
        ),
        (
            lambda results: (results.settings.clear(), results.series[0].samples.clear()),
            "1 of its 2 series have no samples",
        ),
    ],
)
def test_a_run_that_is_not_finished_is_read_only_to_go_on(change, words, tmp_path):
    file = tmp_path / "r.json"
    results = example()
    results.write(file)
    assert read_finished(file) == results
    change(results)
    results.write(file)
    assert read(file) == results
    for use in (read_finished, lambda file: newest(file.parent)):
        with pytest.raises(ResultsError, match=f"r.json is of a run that is not finished: {words}"):
            use(file)


def test_nothing_invalid_is_written(tmp_path):
    results = example()
    results.task = "No Such Task"
    with pytest.raises(ResultsError, match="does not fit the schema at task"):
        results.write(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_a_missing_file(tmp_path):
    with pytest.raises(ResultsError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")


def test_the_newest_results_of_a_task_are_used(tmp_path):
    for name, date in (("a", "2026-01-02"), ("b", "2026-01-03"), ("c", "2026-01-01")):
        results = example()
        results.provenance["date"] = f"{date}T00:00:00+00:00"
        results.write(tmp_path / f"{name}.json")
    found = newest(tmp_path)
    assert {task: path.name for task, (path, _) in found.items()} == {"test-task": "b.json"}


def test_committed_results_fit_the_schema():
    files = RESULTS.glob("*.json")
    for file in files:
        results = read_finished(file)
        assert results.task in file.name.replace("_", "-"), file
        assert not any("/work" in value for value in json.dumps(results.provenance).split('"'))


def test_rounds_are_interleaved():
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = timing.interleave({n: lambda n=n: run(n) for n in "abc"}, rounds=2, warm_up=1)
    assert "".join(order) == "abcabcabc"
    assert samples == {"a": [4.0, 7.0], "b": [5.0, 8.0], "c": [6.0, 9.0]}


def test_what_is_rejected_has_no_sample_and_is_not_run_again():
    calls: list[int] = []

    def reject() -> float:
        calls.append(1)
        if len(calls) == 3:
            raise timing.Rejected("wrong")
        return 1.0

    rejected: list[str] = []
    samples = timing.interleave(
        {"a": reject, "b": lambda: 2.0},
        rounds=3,
        on_rejected=lambda name, error: rejected.append(f"{name}: {error}"),
    )
    assert samples == {"a": [], "b": [2.0, 2.0, 2.0]}
    assert rejected == ["a: wrong"]
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["registry.py", "csrc/fp32/v01_a.cu", "csrc/common.cuh"])
def test_any_changed_source_is_another_digest(name, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    file = tmp_path / "attention_kernels" / name
    file.parent.mkdir(parents=True)
    digests = set()
    for text in ("one", "two"):
        file.write_text(text)
        digests.add(environment.source_digest())
    file.rename(file.with_name(f"v02_b{file.suffix}"))
    digests.add(environment.source_digest())
    assert len(digests) == 3


@pytest.mark.parametrize(("status", "dirty"), [(" M x.py", True), ("", False), (None, None)])
def test_a_changed_checkout_is_told(status, dirty, monkeypatch):
    monkeypatch.setattr(environment, "_git", lambda *words: status if "status" in words else "abc")
    facts = environment.provenance()
    assert (facts["commit"], facts["dirty"]) == ("abc", dirty)


def test_the_command_is_without_somebodys_folders(monkeypatch):
    out = str(RESULTS / "r.json")
    monkeypatch.setattr("sys.argv", ["/some/where/script.py", "--rounds", "3", "--out", out])
    expected = "python script.py --rounds 3 --out results/r.json"
    assert environment.provenance()["command"] == expected


def test_any_changed_token_is_another_digest():
    digests = {
        environment.token_digest(rows) for rows in ([[1], [2]], [[1], [3]], [[1, 2]], [[4], [2]])
    }
    assert len(digests) == 4


def test_provenance_names_the_source():
    facts = environment.provenance()
    assert len(facts["source_digest"]) == 64
    assert facts["packages"]["torch"]
    assert facts["precision"]["matmul_allow_tf32"] is False
