from __future__ import annotations

import io
import json
import re
import sys

import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.ladder import header
from gpt2_infer import Sampling
from gpt2_infer.cli.summary import format_report
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.cli.program import DEMO, run


def test_text_on_stdout_and_report_on_stderr(capsys):
    status, out, err = run(capsys, *DEMO, "--prompt", "Once upon a time")
    assert status == 0
    assert out.startswith("Once upon a time")
    assert out.endswith("\n")
    report = dict(re.findall(r"^ +(\S.*?)  (.*)$", err, re.MULTILINE))
    assert [*report] == [
        *("model", "attention", "device", "dtype", "mode", "prompt tokens", "new tokens", "load"),
        *("warm-up", "prefill", "generation", "speed", "between tokens", "peak memory"),
    ]
    assert report["attention"] == "PYTORCH_SDPA_FLASH_ATTENTION"
    assert report["mode"].startswith("recompute, eager engine")
    assert report["new tokens"] == "8, ended by length"


def test_json_for_machines(capsys):
    status, out, err = run(
        capsys,
        *DEMO,
        "--json",
        "--prompt",
        "The",
        "--prompt",
        "A",
        "--kv-cache",
        "--engine",
        "eager",
    )
    assert status == 0
    assert not err
    value = json.loads(out)
    assert [row["prompt"] for row in value["results"]] == ["The", "A"]
    assert all(len(row["tokens"]) == 8 for row in value["results"])
    assert value["report"]["decode_attention"] == "PYTORCH_SDPA_FLASH_ATTENTION"
    assert value["report"]["mode"] == "kv-cache"
    assert value["report"]["tokens_per_second"] > 0


@pytest.mark.parametrize("tokens", ["1", "2", "3"])
def test_a_text_of_few_tokens_has_a_report(capsys, tokens):
    arguments = ["--model", "demo", "--device", "cpu", "--kv-cache", "--max-new-tokens", tokens]
    status, _, err = run(capsys, *arguments)
    assert status == 0
    assert f"new tokens  {tokens}, ended by length" in err


def test_the_report_compares_the_speed_with_the_bandwidth(capsys, demo):
    _, out, _ = run(capsys, *DEMO, "--json", "--kv-cache")
    report = json.loads(out)["report"]
    weights = sum(p.nbytes for p in demo.parameters()) - demo.wpe.weight.nbytes
    assert report["step_bytes"] == weights
    speed = report["weights_gb_s"]
    assert speed == pytest.approx(weights / report["interval_p50_s"] / 1e9, rel=0.01, abs=0.1)
    assert "read_gb_s" not in report  # a CPU's caches may be faster than its memory
    line = f"weights  {weights / 1e6:.1f} MB per step, read at {speed:.0f} GB/s"
    assert f"{line}\n" in format_report(report)
    assert f"{line}, 50 % of the " in format_report(report | {"read_gb_s": 2 * speed})
    assert f"{line}; no memory was left" in format_report(report | {"read_gb_s": None})
    prebuilt = format_report(report | {"prebuilt_backends": [report["attention"]]})
    assert f"{report['attention']} (prebuilt)\n" in prebuilt


@pytest.mark.gpu
def test_the_gpus_bandwidth_is_measured(capsys):
    arguments = ["--model", "demo", "--device", "cuda", "--kv-cache", "--json"]
    _, out, _ = run(capsys, *arguments, "--max-new-tokens", "8")
    report = json.loads(out)["report"]
    assert report["read_gb_s"] > report["weights_gb_s"] > 0


def test_prompts_from_files_and_standard_input(capsys, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    text = "\ufeffThe dog\n\nThe café\u2028still this one\r\ntwo\x0bstill two\rthree\n"
    file.write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A cat\n")))
    arguments = ["--json", "--prompt", "One", "--prompt-file", str(file), "--prompt-file", "-"]
    status, out, _ = run(capsys, *DEMO, *arguments)
    assert status == 0
    prompts = [row["prompt"] for row in json.loads(out)["results"]]
    lines = ["The dog", "The café\u2028still this one", "two\x0bstill two", "three"]
    assert prompts == ["One", *lines, "A cat"]


def test_random_weights_are_labelled(capsys):
    status, _, err = run(capsys, *DEMO, "--random-weights")
    assert status == 0
    assert "demo (random weights: the text means nothing)" in err


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


def test_the_generate_command_may_be_named(capsys):
    _, named, _ = run(capsys, "generate", *DEMO, "--prompt", "The")
    assert (0, named) == run(capsys, *DEMO, "--prompt", "The")[:2]


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


def raise_key_error(*_):
    raise KeyError("no tile")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (lambda q, *_: q * torch.nan, r"TEST in float32 the logits at position 1 of prompt 1"),
        (raise_key_error, r"TEST raised KeyError: 'no tile' \(test_generate.py:.*; --debug shows"),
    ],
)
def test_a_kernel_that_fails_writes_no_text(attention, message, capsys, clean_registry):
    add("TEST", attention)
    status, out, err = run(capsys, *DEMO, "--backend", "test", "--prompt", "Hi")
    assert (status, out, err.count("\n")) == (2, "Hi\n", 1)
    assert re.search(message, err)


def test_an_emulated_decode_kernel_gives_no_timing(capsys, clean_registry):
    kernels = get_backend("PYTORCH_SDPA_FLASH_ATTENTION").load()
    add("TEST_EMULATED", kernels.attention, kernels.decode, emulated_on=("cpu",))
    status, _, err = run(capsys, *DEMO, "--kv-cache", "--decode-backend", "test-emulated")
    assert status == 0
    assert "decode attention  TEST_EMULATED (emulated on the CPU)\n" in err
    assert " attention  PYTORCH_SDPA_FLASH_ATTENTION\n" in err
    assert "tokens/s" not in err


def test_a_cuda_kernel_writes_text_without_a_gpu_and_quotes_no_timing(capsys):
    reason = get_backend("CUSTOM_CUDA_VERSION_1").unavailable_reason("cpu")
    if reason:
        pytest.skip(reason)
    file = str(header.version_files(header.CSRC / "fp32")[0])
    arguments = [*DEMO, "--prompt", "The king", "--backend"]
    status, emulated, err = run(capsys, *arguments, file)
    assert status == 0
    assert "V01_NAIVE_FLASH (emulated on the CPU)" in err
    assert "timing  none" in err
    assert "tokens/s" not in err
    _, plain, _ = run(capsys, *arguments, "NAIVE_PYTORCH")
    assert emulated == plain
    _, out, _ = run(capsys, *arguments, "custom-cuda", "--json")
    report = json.loads(out)["report"]
    assert re.fullmatch(r"CUSTOM_CUDA_VERSION_\d+", report["attention"])
    assert report["emulated"] is True
    assert "tokens_per_second" not in report
