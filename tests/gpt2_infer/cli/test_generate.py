from __future__ import annotations

import io
import json
import re
import sys

import pytest
import torch

from attention_kernels.ladder import header
from gpt2_infer import Sampling
from tests.conftest import usable
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.cli.program import DEMO, run


def test_text_on_stdout_and_report_on_stderr(capsys):
    status, out, err = run(capsys, *DEMO, "--prompt", "Once upon a time")
    assert status == 0
    assert out.startswith("Once upon a time")
    assert out.endswith("\n")
    report = dict(re.findall(r"^ +(\S.*?)  (.*)$", err, re.MULTILINE))
    assert report["attention"] == "PYTORCH_SDPA_FLASH_ATTENTION"
    assert report["mode"] == "recompute, eager engine"
    assert report["new tokens"] == "8, ended by length"
    assert {"prefill", "speed", "between tokens"} <= {*report}
    assert run(capsys, "generate", *DEMO, "--prompt", "Once upon a time")[1] == out


def test_a_text_of_one_token_has_a_report(capsys):
    arguments = ["--model", "demo", "--device", "cpu", "--kv-cache", "--max-new-tokens", "1"]
    status, _, err = run(capsys, *arguments, "--random-weights")
    assert status == 0
    assert "new tokens  1, ended by length" in err
    assert "demo (random weights: the text means nothing)" in err


def test_json_has_the_prompts_of_files_and_standard_input_and_the_speed(
    capsys, tmp_path, monkeypatch, demo
):
    file = tmp_path / "prompts.txt"
    text = "\ufeffThe dog\n\nThe café\u2028still this one\r\ntwo\x0bstill two\rthree\n"
    file.write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A cat\n")))
    arguments = ["--prompt", "One", "--prompt-file", str(file), "--prompt-file", "-", "--kv-cache"]
    status, out, err = run(capsys, *DEMO, *arguments, "--engine", "eager", "--json")
    assert (status, err) == (0, "")
    value = json.loads(out)
    lines = ["The dog", "The café\u2028still this one", "two\x0bstill two", "three"]
    assert [row["prompt"] for row in value["results"]] == ["One", *lines, "A cat"]
    assert all(len(row["tokens"]) == 8 for row in value["results"])
    report = value["report"]
    assert report["decode_attention"] == "PYTORCH_SDPA_FLASH_ATTENTION"
    weights = sum(p.nbytes for p in demo.parameters()) - demo.wpe.weight.nbytes
    assert report["step_bytes"] == weights
    speed = weights / report["interval_p50_s"] / 1e9
    assert report["weights_gb_s"] == pytest.approx(speed, rel=0.01, abs=0.1)


def test_ctrl_c_prints_the_text_so_far_and_ends_with_130(capsys, monkeypatch):
    calls = []
    original = Sampling.choose

    def interrupt(self, logits, uniform):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(self, logits, uniform)

    monkeypatch.setattr(Sampling, "choose", interrupt)
    status, out, err = run(capsys, *DEMO, "--prompt", "Once upon")
    assert status == 130
    assert len(out.strip()) > len("Once upon")
    assert "new tokens  4, ended by interrupted" in err


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_checkpoints_code_is_never_run(file, capsys, tmp_path, save_checkpoint):
    folder, _ = save_checkpoint()
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    raw = json.loads((folder / file).read_text())
    raw |= {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}}
    (folder / file).write_text(json.dumps(raw))
    capsys.readouterr()  # transformers' progress bar
    status, out, err = run(capsys, "--model", str(folder), "--device", "cpu")
    assert (status, out) == (2, "")
    assert "auto_map is set: a checkpoint's own code is never run" in err
    assert not marker.exists()


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (lambda q, *_: q * torch.nan, r"TEST in float32 the logits at position 1 of prompt 1"),
        (lambda *_: {}["no tile"], r"KeyError: 'no tile' \(test_generate.py:.*; --debug shows"),
    ],
)
def test_a_kernel_that_fails_writes_no_text(attention, message, capsys, clean_registry):
    add("TEST", attention)
    status, out, err = run(capsys, *DEMO, "--backend", "test", "--prompt", "Hi")
    assert (status, out, err.count("\n")) == (2, "Hi\n", 1)
    assert re.search(message, err)


def test_a_cuda_kernel_writes_text_without_a_gpu_and_quotes_no_timing(capsys):
    usable("CUSTOM_CUDA_VERSION_1", "cpu")
    file = str(header.version_files(header.CSRC / "fp32")[0])
    arguments = [*DEMO, "--prompt", "The king", "--backend"]
    status, emulated, err = run(capsys, *arguments, file)
    assert status == 0
    assert "V01_NAIVE_FLASH (emulated on the CPU)" in err
    assert "timing  none" in err
    assert "tokens/s" not in err
    assert run(capsys, *arguments, "NAIVE_PYTORCH")[1] == emulated
    _, out, _ = run(capsys, *arguments, "custom-cuda", "--json")
    report = json.loads(out)["report"]
    assert re.fullmatch(r"CUSTOM_CUDA_VERSION_\d+", report["attention"])
    assert report["emulated_backends"] == [report["attention"]]
    assert "tokens_per_second" not in report
