from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from attention_kernels import UnknownBackendError
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import RequestError, Sampling, batch, generate
from gpt2_infer.batch import job as jobs
from tests.conftest import rewrite
from tests.gpt2_infer.batch.common import contents, make_settings, write_input
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.cli.program import run


@pytest.fixture
def settings(save_checkpoint) -> batch.Settings:
    return make_settings(save_checkpoint()[0])


def rows_of(out: Path) -> dict[str, dict]:
    lines = b"".join(file.read_bytes() for file in sorted(out.glob("*.jsonl"))).splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_row_is_what_generate_writes(settings, tmp_path):
    file, out = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    assert len(batch.run([file], out, settings, device="cpu")) == 4
    model, rows = jobs.load(settings, torch.device("cpu")), rows_of(out)
    options = {"max_new_tokens": 5, "mode": "kv-cache", "ignore_eos": True}
    for i in range(40):
        row = rows[f"row-{i}"]
        assert row["input"] == {"id": f"row-{i}", "prompt": "a b c " * (i % 7), "tag": i}
        assert (row["seed"], row["error"], row["engine"]) == (11 + i, None, "eager")
        sampling = Sampling(1.0, seed=11 + i)
        alone = generate(model, row["input"]["prompt"], sampling=sampling, **options)
        assert (row["tokens"], row["text"]) == (alone.tokens[0], alone.texts[0])
        assert row["decode_backend"] == alone.decode_attention == "NAIVE_PYTORCH"


def test_rows_that_cannot_be_completed_say_why(settings, tmp_path):
    lines = [
        ("7", '{"prompt": "a", "id": 7}', ""),
        ("in.jsonl:3", '{"prompt": "a", "id"', "it cannot be read as JSON: "),
        ("in.jsonl:5", "[1]", "it is not a JSON object"),
        ("none", '{"id": "none"}', "it has no prompt"),
        ("in.jsonl:9", '{"prompt": "a", "id": [1]}', "its id is neither a text nor an integer"),
        ("in.jsonl:11", '{"prompt": "a", "e": 1e999}', "Number out of range"),
        ("x", '{"prompt": [true], "id": "x"}', "a prompt must be a text or a list of token ids"),
        ("z", '{"prompt": [9999], "id": "z"}', "outside the vocabulary of 8192"),
        ("l", json.dumps({"prompt": [1] * 61, "id": "l"}), "61 prompt tokens and 5 new ones need"),
        ("in.jsonl:19", '{"prompt": "a", "deep": ' + "[" * 200_000, "recursion depth"),
    ]
    inputs = [tmp_path / "in.jsonl", tmp_path / "in.txt"]
    inputs[0].write_text("\n\n".join(line for _, line, _ in lines))
    inputs[1].write_bytes(b"\xef\xbb\xbfa b\r\n\xff\r\n")
    batch.run(inputs, tmp_path / "out", settings, device="cpu")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(lines) + 2
    for name, _, error in lines:
        assert error in (rows[name]["error"] or "")
        assert (rows[name]["tokens"] is None) is bool(error)
    assert rows["in.txt:1"]["input"] == {"prompt": "a b"}
    assert rows["in.txt:2"]["error"] == "it is not UTF-8: byte 0 is not valid"


@pytest.mark.parametrize(
    ("backend", "error"),
    [("NAIVE_PYTORCH", "the logits are not finite"), ("PICKY", "PICKY raised ValueError: NaN")],
)
def test_a_poisoned_row_is_one_error_row(backend, error, save_checkpoint, tmp_path, clean_registry):
    def picky(q, k, v, softmax_scale, is_causal):
        if q.isnan().any():
            raise ValueError("NaN")
        return naive_attention(q, k, v, softmax_scale, is_causal)

    def poison(tensors):
        tensors["transformer.wte.weight"][777] = float("nan")
        return tensors

    add("PICKY", picky)
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


def test_only_damaged_parts_are_completed_again(settings, tmp_path):
    file, out = write_input(tmp_path / "in.jsonl"), tmp_path / "out"
    batch.run([file], out, settings, device="cpu")
    expected = contents(out)
    with pytest.raises(RequestError, match="has a job: --resume completes it"):
        batch.run([file], out, settings, device="cpu")
    other = dataclasses.replace(settings, max_new_tokens=6)
    with pytest.raises(RequestError, match="differs in max_new_tokens"):
        batch.run([file], out, other, device="cpu", resume=True)
    (out / ".part-00001.jsonl.writing").write_text("half")
    (out / "part-00000.jsonl").write_bytes(expected["part-00000.jsonl"][:-1])
    (out / "_manifest/00002.json").unlink()
    redone = [json.loads(expected[f"_manifest/0000{part}.json"])["rows"] for part in (0, 2)]
    settings = dataclasses.replace(settings, batch_size=None)  # need not be repeated
    for completed in (sum(redone), 0):
        numbers: list[int] = []
        batch.run([file], out, settings, device="cpu", resume=True, on_rows=numbers.append)
        assert sum(numbers) == completed
        assert contents(out) == expected
    rewrite(Path(settings.model), lambda tensors: {k: 2 * v for k, v in tensors.items()})
    with pytest.raises(RequestError, match="differs in weights"):
        batch.run([file], out, settings, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("_job.json", b'"\xff"'),
        ("_job.json", lambda job: job | {"settings": job["settings"] | {"part_rows": 0}}),
        ("_manifest/00000.json", lambda entry: entry | {"rows": -1}),
    ],
)
def test_a_damaged_folder_is_called_damaged(name, damage, settings, tmp_path):
    file, out = write_input(tmp_path / "in.jsonl", 2), tmp_path / "out"
    batch.run([file], out, settings, device="cpu")
    path = out / name
    before = json.loads(path.read_bytes())
    path.write_bytes(json.dumps(damage(before)).encode() if callable(damage) else damage)
    with pytest.raises(RequestError, match=f"{re.escape(str(path))} is damaged: "):
        batch.run([file], out, settings, device="cpu", resume=True)


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


def test_threads_change_no_bit(tmp_path):
    file, threads = tmp_path / "in.jsonl", torch.get_num_threads()
    file.write_text("\n".join(json.dumps({"prompt": [300 + 17 * i, 40 * i]}) for i in range(12)))
    settings = batch.Settings(model="demo", max_new_tokens=3, ignore_eos=True, batch_size=8)
    for count in (1, 2):
        torch.set_num_threads(count)
        batch.run([file], tmp_path / str(count), settings, device="cpu")
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.csv", "a", r"must end in \.jsonl, \.parquet, \.txt"),
        ("in.jsonl", '{"id": 5}\n{"id": "5"}', "two rows have the id '5'"),
        ("in.txt", "\n", "the inputs have no rows"),
        ("in.parquet", "no", r"in\.parquet cannot be read as Parquet"),
        ("missing.txt", None, "missing.txt cannot be read: No such file"),
    ],
)
def test_invalid_inputs_are_refused(settings, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=message):
        batch.run([tmp_path / name], tmp_path / "out", settings, device="cpu")


def test_invalid_settings_are_refused(settings, tmp_path):
    file = write_input(tmp_path / "in.jsonl")
    for wrong in ({"part_rows": 0}, {"batch_size": 99999999999999}, {"format": "xml"}):
        with pytest.raises(RequestError, match="must be"):
            dataclasses.replace(settings, **wrong)
    for wrong in ({"max_new_tokens": 65}, {"engine": "graph"}, {"backend": "UNKNOWN"}):
        asked = dataclasses.replace(settings, **wrong)
        with pytest.raises((RequestError, UnknownBackendError)):
            batch.run([file], tmp_path / "out", asked, device="cpu")


def test_the_command_counts_rows_and_errors(settings, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    for status, good, text in ((0, 1, '{"prompt": "a b"}\nx\n'), (3, 0, "x\n")):
        file.write_text(text)
        out = tmp_path / str(status)
        words = ["--device", "cpu", "--model", settings.model, "--max-new-tokens", "3"]
        counts = f"rows: {good + 1}, errors: 1, files: 1, in {out}\n"
        assert run(capsys, "batch", str(file), "--out", str(out), *words)[:2] == (status, counts)
