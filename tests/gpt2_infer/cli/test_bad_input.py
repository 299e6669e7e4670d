"""Bad input to a command is one line on standard error and exit status 2."""

from __future__ import annotations

import os
import shlex

import pytest
import torch

from attention_kernels.inspection.sass import predict
from attention_kernels.judge import suite
from gpt2_infer.cli import COMMANDS
from tests.gpt2_infer.bench.common import add, naive_attention
from tests.gpt2_infer.cli.program import run, unless

KERNEL = "compare --out TMP/r.json --task kernel --device cpu --seqlens 8"
DIVERGE = "diverge NAIVE_PYTORCH --model demo --device cpu"
EXPORT = "export CUSTOM_CUDA_VERSION_1 --out"
REFUSED = [  # without a command, options of generate
    ("nonsense", "Unused Tokens: ['nonsense']"),
    ("--model", "--model requires an argument"),
    ("--max-new-tokens 8 --max-new-tokens 9", "--max-new-tokens specified multiple times"),
    ("--dtype float8", '"float8" for --dtype. Choose from: "float32", "float16", "bfloat16"'),
    ("--device gpu", "device must be cuda or cpu, not 'gpu'"),
    ("batch x --out TMP/out --ray --device cuda:1", "device cuda:1: Ray itself chooses the GPU"),
    ("predict x.so --kernel k --grid 0 --block 1", "--grid: must be a size X, or X,Y or X,Y,Z"),
    ("batch x --out TMP/out --shard 1", "--shard: must be a shard such as 0/4, not '1'"),
    ("batch x --out TMP/out --shard 0/2 --ray", "--shard and --ray exclude each other"),
    ("batch x --out TMP/out --workers 2", "--workers needs --ray"),
    ("kernels --arch 90 v01_mine.cu", "--arch: must be an integer from 1"),
    ("--backend NAIVE_PYTORHC", "'NAIVE_PYTORHC': did you mean NAIVE_PYTORCH?\n"),
    ("--backend TMP/none.cu", "there is no file TMP/none.cu"),
    ("--max-new-tokens 1025", "this model has 1024"),
    ("--temperature -1", "temperature must be 0 (greedy) or 1e-06 or more, not -1.0"),
    ("--prompt-file TMP/none", "TMP/none: No such file or directory"),
    ("--prompt-file TMP/latin1", "is not UTF-8: byte 3"),
    ("--prompt-file TMP/empty", "contains no prompt"),
    ("--model /no/such/model", "'/no/such/model'"),
    ("--device cuda", "no such CUDA device"),
    ("--decode-backend NAIVE_PYTORCH", "--decode-backend needs --kv-cache"),
    ("--seed 3", "--seed needs a temperature above 0"),
    ("--prompt a\udcff", "the prompt is not valid text"),
    ("verify naive", "unknown attention backend 'naive'"),
    (f"{DIVERGE} PYTORCH_SDPA_CUDNN_ATTENTION", "is not available here"),
    (f"{DIVERGE} ONLY_FLOAT32 --dtype bfloat16", "dtype bfloat16 (it takes float32)"),
    (f"{DIVERGE} eager", "eager is an engine: diverge compares two of a kind"),
    ("verify custom-cuda-version-1 --dtypes float64 --device cpu", "dtype float64 (it takes"),
    ("perplexity --model demo --max-tokens 1", "the text has fewer than two tokens to predict"),
    ("batch TMP/fifo.jsonl --model demo --out TMP/out", "Not a regular file"),
    ("predict CUSTOM_CUDA_VERSION_1 --gpu voodoo2", "h200, h100, a100, t4, rtx4090"),
    ("kernels NAIVE_PYTORCH", "NAIVE_PYTORCH cannot take this call: it has no version file"),
    ("kernels FLASH_ATTENTION_1_CPU", "it is host code"),
    ("kernels CUSTOM_CUDA_VERSION_1 --family all", "--family selects a whole ladder"),
    ("kernels --family fp16", "no ladder named fp16, only fp32, "),
    ("compare --out TMP/r.json --seqlens 8", "--seqlens is not for --task generation"),
    (f"{EXPORT} TMP", "exists, and nothing is overwritten"),
    (f"{EXPORT} TMP/none/fast-rows", "there is no folder"),
    (f"{EXPORT} TMP/Fast", "must be lower-case words"),
    (f"{EXPORT} TMP/torch", "Python has a module torch already"),
    ("predict x.cubin --kernel k --grid 1", "--block requires an argument"),
    (
        "predict x.cubin --kernel k --grid 1 --block 1 --head-dim 64",
        "not the shape of an attention",
    ),
    ("predict CUSTOM_CUDA_VERSION_12 --dtype float16", "dtype float16 (it takes float32)"),
    # Cyclopts would read these words as None, the default.
    ("predict x --dtype none", 'Invalid value "none" for --dtype'),
    ("batch x --out TMP/out --shard none", "--shard: must be a shard such as 0/4, not 'none'"),
    (
        "verify x --device NULL",
        "--device: must be a device, cuda, cuda:1 or the like, or cpu, not 'NULL'",
    ),
    ("--seed NULL", "--seed: must be an integer from 0 to 2^63 - 1, not 'NULL'"),
    ("--max-new-tokens 0", "--max-new-tokens: must be a"),
    ("--max-new-tokens nan", "--max-new-tokens: must be a"),
    ("--top-k 1e400", "--top-k: must be a"),
    (f"--top-k {'9' * 5000}", "--top-k: must be a"),
    ("--seed 1.5", "--seed: must be a"),
    (f"--seed {'9' * 30}", "--seed: must be a"),
    ("batch x --out TMP/out --workers -1", "--workers: must be a"),
    ("verify x --timeout inf", "--timeout: must be a"),
    ("compare --out TMP/r.json --rounds ''", "--rounds: must be a"),
    ("compare --out TMP/r.json --seqlens 0", "--seqlens: must be a"),
    ("predict x --shared x", "--shared: must be a"),
    ("report", "nothing to report"),
    ("report CUSTOM_CUDA_VERSION_2 --gpu v100", "v100"),
    ("report CUSTOM_CUDA_VERSION_2 --out TMP/no/page.html", "there is no folder"),
    (f"{KERNEL} --model demo", "--model is not for --task kernel"),
    (f"{KERNEL} --families nvidia", "no family named nvidia"),
    (f"{KERNEL} --dtypes float16 --backends ONLY_FLOAT32", "takes float32, not float16"),
    (KERNEL.replace("TMP", "/no/such/folder"), "there is no folder /no/such/folder"),
]


@pytest.mark.parametrize(("words", "complaint"), REFUSED, ids=[words[:60] for words, _ in REFUSED])
def test_bad_input_is_one_line(words, complaint, capsys, tmp_path, monkeypatch, clean_registry):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(predict, "predict", None)  # bad input is refused first
    monkeypatch.setattr(suite, "checks_of", None)
    add("ONLY_FLOAT32", naive_attention)
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"\n \n")
    os.mkfifo(tmp_path / "fifo.jsonl")
    arguments = shlex.split(words.replace("TMP", str(tmp_path)))
    command = [] if arguments[0] in COMMANDS else unless(arguments)
    status, out, err = run(capsys, *command, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gpt2-infer: error: ")
    assert complaint.replace("TMP", str(tmp_path)) in err
    assert len(err) < 400
    assert not [*tmp_path.glob("r.json*")]
