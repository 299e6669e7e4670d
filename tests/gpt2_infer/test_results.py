from __future__ import annotations

import json

import pytest

from gpt2_infer import bench
from gpt2_infer.results import SCHEMA_FILE, Results, ResultsError, Series, read


def example() -> Results:
    series = [
        Series("a", {"mode": "recompute"}, "s", [3.0, 1.0, 2.0]),
        Series("b", {}, "s", status="failed", reason="it was wrong"),
    ]
    return Results("test-task", bench.provenance(), {"rounds": 3}, series)


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


def test_nothing_invalid_is_written(tmp_path):
    results = example()
    results.task = "No Such Task"
    with pytest.raises(ResultsError, match="does not fit the schema at task"):
        results.write(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_a_missing_file(tmp_path):
    with pytest.raises(ResultsError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")


def test_committed_results_fit_the_schema():
    files = [path for path in SCHEMA_FILE.parent.glob("*.json") if path != SCHEMA_FILE]
    for file in files:
        results = read(file)
        assert results.series, file
        assert results.task in file.name.replace("_", "-"), file
        assert not any("/work" in value for value in json.dumps(results.provenance).split('"'))


def test_rounds_are_interleaved():
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = bench.interleave({n: lambda n=n: run(n) for n in "abc"}, rounds=2, warm_up=1)
    assert "".join(order) == "abcabcabc"
    assert samples == {"a": [4.0, 7.0], "b": [5.0, 8.0], "c": [6.0, 9.0]}


def test_provenance_names_the_source():
    facts = bench.provenance()
    assert len(facts["source_digest"]) == 64
    assert facts["packages"]["torch"]
    assert facts["precision"]["matmul_allow_tf32"] is False
