from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gpt2_infer import RequestError
from gpt2_infer.bench import environment
from gpt2_infer.bench.record import SCHEMA, File, ResultsError, check_output, encode, read
from tests.conftest import ROOT, python
from tests.gpt2_infer.bench.common import full_disk, kernels

RESULTS = ROOT / "results"


def test_a_written_file_reads_back_the_same(tmp_path):
    kernels().write(tmp_path / "r.json")
    assert read(tmp_path / "r.json") == kernels()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("study", None, "is not a results file: Object missing required field `study`"),
        ("study.kind", None, "its study has no kind"),
        ("task", "Test Task", "matching regex"),
        ("rows.0.more", 1, "contains unknown field `more`"),
        ("rows.0.cell.seqlen", [1], "Expected `bool | int | str`, got `array`"),
        ("rows.0.cell.seqlen", -8, "Expected `int` >= 1"),
        ("rows", [], "it has no rows"),
        ("rows.0.samples", [1.0, 0.0, 1.0], "a time is not positive"),
        ("rows.0.samples", [], "a row has neither samples nor a reason"),
    ],
)
def test_an_invalid_file_is_one_line(place, value, words, tmp_path):
    file = tmp_path / "r.json"
    content = changed = json.loads(encode(kernels()))
    *folders, last = place.split(".")
    for folder in folders:
        changed = changed[int(folder) if folder.isdigit() else folder]
    changed[last] = value
    if value is None:
        del changed[last]
    file.write_text(json.dumps(content))
    with pytest.raises(ResultsError) as caught:
        read(file)
    assert str(caught.value).startswith(str(file))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_or_missing_file_is_one_line(tmp_path):
    for text in ("", "{", '{"task": "kernel"'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ResultsError, match=r"r.json is truncated or not JSON: "):
            read(tmp_path / "r.json")
    with pytest.raises(ResultsError, match=r"none.json cannot be read: No such file"):
        read(tmp_path / "none.json")


def test_nothing_invalid_is_written_and_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ResultsError, match="not valid"):
        kernels(task="No Such Task").write(tmp_path / "r.json")
    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(ResultsError, match=r"r.json cannot be written: No space left on device$"):
        kernels().write(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_an_unusable_output_is_refused_before_the_run(tmp_path):
    file = tmp_path / "r.json"
    check_output(file)
    assert not list(tmp_path.iterdir())
    file.touch()
    with pytest.raises(ResultsError, match="exists: name another file"):
        check_output(file)
    with pytest.raises(RequestError, match="cannot be written"):
        check_output(Path("/proc/r.json"))


def test_the_committed_results_are_valid_and_name_commits_in_the_history():
    history = environment._git("rev-list", "HEAD")
    is_whole = environment._git("rev-parse", "--is-shallow-repository") == "false"
    commits = {*history.split(), None} if history and is_whole else None
    for file in RESULTS.glob("*.json"):
        results = read(file)
        assert results.task in file.name.replace("_", "-"), file
        words = msgspec.json.encode(results.provenance).decode().split('"')
        assert not any(word.startswith("/") for word in words), file
        # None: published by others
        assert commits is None or results.provenance.commit in commits, file


def test_readers_of_results_import_neither_torch_nor_the_model():
    pytest.importorskip("matplotlib")
    code = (
        "import sys; from gpt2_infer.bench import record, study; "
        "from gpt2_infer.bench.show import charts, tables; "
        "tables.render('f', record.read(__import__('pathlib').Path(sys.argv[1]))); "
        "print({'torch', 'transformers', 'gpt2_infer.model'} & {*sys.modules})"
    )
    file = min(RESULTS.glob("*generation-fp32.json"))
    done = python("-c", code, file)
    assert done.stdout == "set()\n", done.stderr


def test_the_schema_in_the_package_is_that_of_a_file():
    assert SCHEMA.read_text("utf-8") == json.dumps(msgspec.json.schema(File), indent=1) + "\n"
