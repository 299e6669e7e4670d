from __future__ import annotations

import dataclasses
import json
import os
import re
import weakref
from pathlib import Path

import pytest
import torch

from attention_kernels import UnknownBackendError, UnsupportedError
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import RequestError, Sampling, batch, generate
from gpt2_infer.batch import job as jobs
from gpt2_infer.engines import continuous
from tests.conftest import rewrite
from tests.gpt2_infer.batch.common import contents, make_settings, write_input
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.cli.program import run


@pytest.fixture
def settings(save_checkpoint) -> batch.Settings:
    folder, _ = save_checkpoint()
    return make_settings(folder)


def rows_of(out: Path) -> dict[str, dict]:
    lines = b"".join(file.read_bytes() for file in sorted(out.glob("*.jsonl"))).splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_row_is_what_generate_writes(settings, tmp_path):
    file, out = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    entries = batch.run([file], out, settings, device="cpu")
    model = jobs.load(settings, torch.device("cpu"))
    rows = rows_of(out)
    assert list(rows) != [f"row-{i}" for i in range(40)]
    assert len(entries) == 4
    for i in range(40):
        row = rows[f"row-{i}"]
        assert row["input"] == {"id": f"row-{i}", "prompt": "a b c " * (i % 7), "tag": i}
        assert (row["seed"], row["error"], row["engine"]) == (11 + i, None, "eager")
        sampling = Sampling(1.0, seed=11 + i)
        alone = generate(
            model,
            row["input"]["prompt"],
            max_new_tokens=5,
            mode="kv-cache",
            sampling=sampling,
            ignore_eos=True,
        )
        assert (row["tokens"], row["text"]) == (alone.tokens[0], alone.texts[0])
        assert row["decode_backend"] == alone.decode_attention == "NAIVE_PYTORCH"


def test_rows_that_cannot_be_completed_say_why(settings, tmp_path):
    lines = {
        '{"prompt": "a", "id": 7}': None,
        '{"prompt": "a", "id"': "it cannot be read as JSON: ",
        "[1]": "it is not a JSON object",
        '{"id": "none"}': "it has no prompt",
        '{"prompt": "a", "id": [1]}': "its id is neither a text nor an integer",
        '{"prompt": "a", "id": "\\ud800"}': "it cannot be read as JSON: ",
        '{"prompt": "a", "e": 1e999}': "it cannot be read as JSON: Number out of range",
        '{"prompt": [true], "id": "x"}': "a prompt must be a text or a list of token ids",
        '{"prompt": [], "id": "e"}': "a list of token ids must not be empty",
        '{"prompt": {"a": 1}, "id": "y"}': "a prompt must be a text or a list of token ids",
        '{"prompt": [9999], "id": "z"}': "outside the vocabulary of 8192",
        json.dumps({"prompt": [1] * 61, "id": "long"}): "61 prompt tokens and 5 new ones need 65",
        '{"id": null, "prompt": "a", "deep": ' + "[" * 200_000: "recursion depth",
    }
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfa b\r\n\xff\r\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "in.txt").write_text("a b")
    inputs = [tmp_path / "in.jsonl", tmp_path / "in.txt", tmp_path / "more" / "in.txt"]
    batch.run(inputs, tmp_path / "out", settings, device="cpu")
    rows = rows_of(tmp_path / "out")
    ids = ["7", *(f"in.jsonl:{n}" for n in (3, 5)), "none", *(f"in.jsonl:{n}" for n in (9, 11))]
    ids += ["in.jsonl:13", "x", "e", "y", "z", "long", "in.jsonl:25"]
    for row_id, error in zip(ids, lines.values(), strict=True):
        assert (error or "") in (rows[row_id]["error"] or "")
        assert (rows[row_id]["tokens"] is None) is (error is not None)
    for text in inputs[1:]:  # two files with the same name
        assert rows[f"{text}:1"]["input"] == {"prompt": "a b"}
    assert rows[f"{inputs[1]}:2"]["error"] == "it is not UTF-8: byte 0 is not valid"
    assert len(rows) == 16
    with pytest.raises(batch.BatchError, match="row "):
        batch.run(inputs, tmp_path / "strict", settings, device="cpu", strict=True)


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("NAIVE_PYTORCH", "the logits are not finite"),
        ("PICKY", "PICKY raised ValueError: NaN"),
        ("REFUSING", "REFUSING cannot take this call: NaN"),
    ],
)
def test_a_poisoned_row_is_one_error_row(
    backend, error, save_checkpoint, tmp_path, clean_registry, monkeypatch
):
    alive = weakref.WeakSet()

    class Slots(continuous.Slots):
        def __init__(self, *arguments):
            assert not alive  # only one cache may exist at a time
            alive.add(self)
            super().__init__(*arguments)

    def picky(q, k, v, softmax_scale, is_causal):
        if q.isnan().any():
            raise ValueError("NaN") if backend == "PICKY" else UnsupportedError(backend, ["NaN"])
        return naive_attention(q, k, v, softmax_scale, is_causal)

    def poison(tensors):
        tensors["transformer.wte.weight"][777] = float("nan")
        return tensors

    monkeypatch.setattr(continuous, "Slots", Slots)
    if backend != "NAIVE_PYTORCH":
        add(backend, picky)
    folder, _ = save_checkpoint(tie_word_embeddings=False)
    rewrite(folder, poison)
    settings = dataclasses.replace(make_settings(folder), backend=backend)
    rows = [{"id": str(i), "prompt": [1 + i] * (i % 9 + 1)} for i in range(20)]
    outs = []
    for name, prompt in (("healthy", rows[5]["prompt"]), ("poisoned", [3, 777, 4])):
        rows[5]["prompt"] = prompt
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        batch.run([file], tmp_path / name, settings, device="cpu")
        outs.append(rows_of(tmp_path / name))
    healthy, poisoned = outs
    assert error in poisoned.pop("5")["error"]
    del healthy["5"]
    assert poisoned == healthy
    assert not any(row["error"] for row in healthy.values())


def test_a_stopped_job_resumes_byte_for_byte(settings, tmp_path, monkeypatch):
    file, expected, out = write_input(tmp_path / "in.jsonl"), tmp_path / "a", tmp_path / "b"
    batch.run([file], expected, settings, device="cpu")
    original, calls = jobs.folder.write, []

    def failing(path, data):
        calls.append(path)
        if len(calls) == 5:  # written: _job.json, a part, its entry and another part
            raise batch.BatchError("no room")
        original(path, data)

    monkeypatch.setattr(jobs.folder, "write", failing)
    with pytest.raises(batch.BatchError, match="no room"):
        batch.run([file], out, settings, device="cpu")
    monkeypatch.undo()
    with pytest.raises(RequestError, match="has a job: --resume completes it"):
        batch.run([file], out, settings, device="cpu")
    other = dataclasses.replace(settings, max_new_tokens=6)
    with pytest.raises(RequestError, match="differs in max_new_tokens"):
        batch.run([file], out, other, device="cpu", resume=True)
    (out / ".part-00001.jsonl.writing").write_text("half")
    done = out / "part-00000.jsonl"
    done.write_bytes(done.read_bytes()[:-1])  # no longer what the manifest says
    for completed in (40, 0):
        numbers: list[int] = []
        entries = batch.run(
            [file], out, settings, device="cpu", resume=True, on_rows=numbers.append
        )
        assert (sum(numbers), sum(entry.rows for entry in entries)) == (completed, 40)
        assert contents(out) == contents(expected)


JOB, ENTRY = "_job.json", "_manifest/00000.json"
DAMAGE = [  # new content, a function that changes the content, or None for a named pipe
    (JOB, b""),
    (JOB, b"{"),
    (JOB, b"[1]"),
    (JOB, b"{}"),
    (JOB, b'"\xff"'),
    (JOB, b"[" * 200_000),
    (JOB, lambda job: job | {"batch_size": "4"}),
    (JOB, lambda job: job | {"batch_size": -1}),
    (JOB, lambda job: job | {"settings": job["settings"] | {"part_rows": 0}}),
    (JOB, None),
    (ENTRY, b""),
    (ENTRY, b'{"file": "x"}'),
    (ENTRY, lambda entry: entry | {"rows": -1}),
    (ENTRY, None),
]


def test_a_damaged_folder_is_called_damaged(small_job):
    file, out, settings = small_job
    for name, damage in DAMAGE:
        path = out / name
        before = path.read_bytes()
        path.unlink()
        if damage is None:
            os.mkfifo(path)
        else:
            data = damage if isinstance(damage, bytes) else damage(json.loads(before))
            path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        with pytest.raises(RequestError, match=f"{re.escape(str(path))} is damaged: "):
            batch.run([file], out, settings, device="cpu", resume=True)
        path.unlink()
        path.write_bytes(before)
    batch.run([file], out, settings, device="cpu", resume=True)


@pytest.fixture
def small_job(settings, tmp_path):
    """A finished job of two rows: its input, its folder and its settings."""
    file, out = write_input(tmp_path / "in.jsonl", 2), tmp_path / "out"
    settings = dataclasses.replace(settings, max_new_tokens=1)
    batch.run([file], out, settings, device="cpu")
    return file, out, settings


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", ["part-00000.jsonl", "_manifest/00000.json", "notes.txt"])
def test_a_folder_with_other_files_is_refused_and_left_alone(settings, tmp_path, left, resume):
    out = tmp_path / "out"
    (out / left).parent.mkdir(parents=True)
    (out / left).write_text('{"prompt": "a"}')
    file = out / left if left.endswith(".jsonl") else write_input(tmp_path / "in.jsonl", 2)
    before = contents(out)
    with pytest.raises(RequestError, match=f"holds {Path(left).name}, which belongs to no job"):
        batch.run([file], out, settings, device="cpu", resume=resume)
    assert contents(out) == before


def test_a_batch_size_need_not_be_repeated(small_job):
    file, out, settings = small_job
    settings = dataclasses.replace(settings, batch_size=None)
    batch.run([file], out, settings, device="cpu", resume=True)


def test_parquet_holds_the_same_rows(settings, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    file = write_input(tmp_path / "in.jsonl", 12)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    batch.run([file], tmp_path / "a", settings, device="cpu")
    parquet = dataclasses.replace(settings, format="parquet")
    batch.run([tmp_path / "in.parquet"], tmp_path / "b", parquet, device="cpu")
    written = pq.read_table(tmp_path / "b").to_pylist()
    got = {row["id"]: row | {"input": json.loads(row["input"])} for row in written}
    assert got == rows_of(tmp_path / "a")
    columns = {"id": pa.array([b"x", b"y"], pa.binary()), "prompt": [b"a", b"\xff"]}
    text = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table(columns | {"text": text}), tmp_path / "binary.parquet")
    batch.run([tmp_path / "binary.parquet"], tmp_path / "d", settings, device="cpu")
    bytes_rows = rows_of(tmp_path / "d")
    assert bytes_rows["x"]["input"]["prompt"] == "a"
    assert bytes_rows["binary.parquet:2"]["error"].startswith("it cannot be read: ")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(RequestError, match=r"bad\.parquet cannot be read as Parquet"):
        batch.run([tmp_path / "bad.parquet"], tmp_path / "c", settings, device="cpu")


def test_threads_change_no_bit(tmp_path):
    rows = [{"id": str(i), "prompt": [300 + 17 * i, 40 * i + 5]} for i in range(12)]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = batch.Settings(model="demo", max_new_tokens=3, ignore_eos=True, batch_size=8)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            batch.run([file], tmp_path / str(count), settings, device="cpu")
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_other_weights_are_refused(settings, tmp_path):
    file = write_input(tmp_path / "in.jsonl", 4)
    batch.run([file], tmp_path / "out", settings, device="cpu")
    rewrite(Path(settings.model), lambda tensors: {k: 2 * v for k, v in tensors.items()})
    with pytest.raises(RequestError, match="differs in weights"):
        batch.run([file], tmp_path / "out", settings, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.csv", "a", r"must end in \.jsonl, \.parquet, \.txt"),
        ("in.jsonl", '{"id": 5}\n{"id": "5"}', "two rows have the id '5'"),
        ("in.txt", "\n", "the inputs have no rows"),
        ("missing.txt", None, "missing.txt cannot be read: No such file"),
    ],
)
def test_invalid_inputs_are_refused(settings, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=message):
        batch.run([tmp_path / name], tmp_path / "out", settings, device="cpu")


def test_ids_do_not_depend_on_how_a_path_is_written(settings, tmp_path, monkeypatch):
    files = [tmp_path / "a" / "in.txt", tmp_path / "b" / "in.txt"]
    for file in files:
        file.parent.mkdir()
        file.write_text("a b\n")
    batch.run(files, tmp_path / "out", settings, device="cpu")
    monkeypatch.chdir(tmp_path)
    batch.run(["a/in.txt", "b/in.txt"], tmp_path / "relative", settings, device="cpu")
    assert contents(tmp_path / "relative") == contents(tmp_path / "out")


def test_invalid_settings_are_refused_at_once(settings, tmp_path):
    file = write_input(tmp_path / "in.jsonl")
    for field, value in (
        ("part_rows", 0),
        ("batch_size", 0),
        ("batch_size", 99999999999999),
        ("format", "xml"),
        ("sampling", 0.7),
        ("stop", "a"),
    ):
        with pytest.raises(RequestError, match="must be "):
            dataclasses.replace(settings, **{field: value})
    for field, value in (("max_new_tokens", 65), ("stop", ("",))):
        other = dataclasses.replace(settings, **{field: value})
        with pytest.raises(RequestError):
            batch.run([file], tmp_path / "out", other, device="cpu")
    other = dataclasses.replace(settings, backend="UNKNOWN")
    with pytest.raises(UnknownBackendError):
        batch.run([file], tmp_path / "out", other, device="cpu")
    assert not (tmp_path / "out" / "_job.json").exists()


def test_a_folder_without_rows_can_be_used_again(settings, tmp_path):
    file, out = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    refused = dataclasses.replace(settings, engine="graph")
    with pytest.raises(RequestError, match="needs a CUDA device"):
        batch.run([file], out, refused, device="cpu")
    assert (out / "_job.json").exists()
    assert len(batch.run([file], out, settings, device="cpu")) == 4
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="file cannot be written: File exists"):
        batch.run([file], tmp_path / "file", settings, device="cpu")


def test_the_command_counts_rows_and_errors(settings, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a b"}\nx\n')
    words = ["batch", str(file), "--out", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--model", settings.model, "--max-new-tokens", "3"]
    status, out, err = run(capsys, *words)
    assert (status, out) == (0, f"rows: 2, errors: 1, files: 1, in {tmp_path / 'out'}\n")
    assert run(capsys, *words)[0] == 2
    assert run(capsys, *words, "--resume")[:2] == (0, out)
    file.write_text("x\n")
    words[3] = str(tmp_path / "none")
    status, out, err = run(capsys, *words)
    assert (status, out) == (3, f"rows: 1, errors: 1, files: 1, in {tmp_path / 'none'}\n")
    assert "no row could be completed" in err
