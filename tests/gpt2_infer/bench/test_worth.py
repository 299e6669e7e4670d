"""The arithmetic of `worth`, on made-up rows; test_worth.py of cli/ runs it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from attention_kernels import registry
from attention_kernels.judge.plugins import Elsewhere
from gpt2_infer.bench import worth
from gpt2_infer.bench.record import File, Row
from gpt2_infer.bench.show import charts, figures, tables, worth_page
from tests.gpt2_infer.bench.common import provenance

NAMES = ("NAIVE_PYTORCH", "MINE_" * 9, "CUSTOM_CUDA_VERSION_36", "FREE_ATTENTION")
SECONDS = ([0.9, 0.92], [0.8, 0.81], [0.91, 0.93], [0.6, 0.61])


def row(name: str, samples: list[float], mode: str = "recompute", **fields) -> Row:
    cell = {"max_tokens": 512, "batch": 8, "dtype": "float32", "mode": mode, "new_tokens": 504}
    own = {"contender": name, "samples": samples, "metric": "generation", "unit": "s"}
    return Row(**{"cell": cell, "extra": {"precision": "ieee-fp32"}} | own | fields)


def made_up() -> File:
    """Every mode, each with every column."""
    rows = []
    shape = {"seqlen": 1024, "batch": 1, "num_heads": 12, "head_dim": 64, "is_causal": True}
    for name in NAMES[:3]:
        cell = shape | {"dtype": "float32"}
        rows.append(row(name, [1234.5, 1240.0], cell=cell, metric="time", unit="us"))
    for mode in worth.MODES:
        for name, samples in zip(NAMES, SECONDS, strict=True):
            rows.append(row(name, samples, mode))
            rows.append(row(name, [50.0], mode, metric="energy", unit="J"))
            rows[-2].extra |= {"diverges": "equal", "logits_difference": 1.2e-5}
    study = {"kind": "worth", "kernel": NAMES[1], "baseline": NAMES[0], "model": "gpt2"}
    return File(task="worth", study=study | {"rounds": 2}, provenance=provenance(), rows=rows)


def test_what_is_saved_of_what_could_be():
    rows = [*map(row, NAMES, SECONDS)]
    saved = [figures.saved_share(one, rows, NAMES[0]) for one in rows]
    assert saved[1] == pytest.approx((0.91 - 0.805) / (0.91 - 0.605))
    assert (saved[0], math.isnan(saved[2]), saved[3]) == (None, True, None)
    assert figures.saved_share(rows[1], rows[:3], NAMES[0]) is None


def test_the_table_fits_a_terminal_and_the_page_has_all_of_it():
    file = made_up()
    (table,) = tables.tables("", file)
    assert table.rows[4][2:6] == ("0.805 s", "5,009", "25%", "34%")
    assert table.rows[4][6:] == (f"{50 / 8 / 504:.3g}", "equal", "1e-05")
    lines = [*table.plain(100).splitlines(), *worth_page.remarks(file, table)]
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 100
    assert lines[5].startswith("recompute   MINE_MINE")
    page = worth_page.render(file, charts.render(file))
    assert page.count("<tr>") == 20
    assert page.count("data:image/svg+xml;base64,") == 2


def test_predicted_is_the_rest_of_the_model_plus_attention_of_every_layer_and_step(monkeypatch):
    def predicted(name, version, cells, gpu):
        rows = [Row(contender=name, metric="predicted time", unit="us") for _ in cells]
        for one, cell in zip(rows, cells, strict=True):
            one.samples = [float(cell.seqlen)]
        return rows

    monkeypatch.setattr(worth, "_predict", predicted)
    monkeypatch.setattr(worth, "_write_text", lambda *_: None)
    file = worth.answer(worth.Question("CUSTOM_CUDA_VERSION_2", device="cpu"))
    found = {(one.contender, one.cell.get("mode", "")): one for one in file.rows[:-1]}
    assert [name for name, mode in found if mode == "recompute"] == [
        *("NAIVE_PYTORCH", "CUSTOM_CUDA_VERSION_2", "CUSTOM_CUDA_VERSION_36", "FREE_ATTENTION")
    ]
    mine, free = (found[name, "recompute"] for name in ("CUSTOM_CUDA_VERSION_2", "FREE_ATTENTION"))
    steps = sum(-(-n // 32) * 32 for n in range(8, 512))
    assert mine.median == pytest.approx(free.median + 12 * steps / 1e6)
    assert found["CUSTOM_CUDA_VERSION_2", ""].samples == [1024.0]
    for mode in ("prefill", "kv-cache", "batch of 8"):
        why = found["CUSTOM_CUDA_VERSION_2", mode].reason
        assert why == "FREE_ATTENTION was measured with recompute only on H200 SXM"
    other = worth.answer(worth.Question("CUSTOM_CUDA_VERSION_2", device="cpu", model="demo"))
    assert {one.reason for one in other.rows if one.metric == "generation"} == {
        "no FREE_ATTENTION of this model and length was measured on H200 SXM"
    }


def test_the_predictor_knows_a_gpu_by_its_name_and_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cards = {("NVIDIA H200", 132): "h200", ("NVIDIA H100 PCIe", 114): None, ("Tesla T4", 40): "t4"}
    for (name, count), key in cards.items():
        card = SimpleNamespace(name=name, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        assert worth._present() == key


def test_without_a_version_file_there_is_a_reason():
    question = worth.Question("CUSTOM_CUDA_VERSION_2", device="cpu")
    (found,) = worth._predict("X", None, [question.cell], "h200")
    assert found.reason == "it has no version file of float32 to predict its time from"


def test_a_plug_in_that_the_judge_kept_out_is_imported_for_the_model(plugin):
    fields = "name='STRANGE', family='f', summary='s', precisions={'float32': 'ieee-fp32'}"
    plugin(f"register({fields})(lambda: Kernels(right))\n")
    assert isinstance(worth.Question("STRANGE", device="cpu").spec.loader, Elsewhere)
    registry.import_adopted()
    assert registry.get_backend("STRANGE").has_attention()


def test_no_plug_in_is_imported_while_the_judge_works(plugin, monkeypatch):
    plugin("")
    question = worth.Question("CUSTOM_CUDA_VERSION_2", device="cpu")
    question.device = "cuda"
    monkeypatch.setattr(worth.hf_models, "find", mock.Mock())  # another architecture's model
    for thread in worth.begin(question):
        thread.join()
    assert "strange_plugin" not in sys.modules
