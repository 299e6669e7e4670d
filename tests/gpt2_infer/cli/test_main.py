from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpt2_infer
from attention_kernels import ladder
from attention_kernels.ladder import compilers, header
from gpt2_infer.cli import COMMANDS, main
from tests.conftest import rewrite

DEMO = ["--model", "demo", "--device", "cpu", "--max-new-tokens", "8"]
ROOT = Path(__file__).parents[3]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def test_text_on_stdout_and_report_on_stderr(capsys):
    status, out, err = run(capsys, *DEMO, "--prompt", "Once upon a time")
    assert status == 0
    assert out.startswith("Once upon a time")
    assert out.count("\n") >= 1
    for label in (
        "model  demo",
        "attention  PYTORCH_SDPA_FLASH_ATTENTION",
        "device  cpu",
        "dtype  float32",
        "mode  recompute",
        "prompt tokens  ",
        "new tokens  8, ended by length",
        "load  ",
        "warm-up  ",
        "prefill  ",
        "generation  ",
        "speed  ",
        "peak memory  ",
    ):
        assert label in err, label


def test_json_for_machines(capsys):
    status, out, err = run(
        capsys, *DEMO, "--json", "--prompt", "The", "--prompt", "A", "--kv-cache"
    )
    assert status == 0
    assert not err
    value = json.loads(out)
    assert [row["prompt"] for row in value["results"]] == ["The", "A"]
    assert all(len(row["tokens"]) == 8 for row in value["results"])
    assert value["report"]["decode_attention"] == "PYTORCH_SDPA_FLASH_ATTENTION"
    assert value["report"]["mode"] == "kv-cache"
    assert value["report"]["tokens_per_second"] > 0


def test_prompts_from_files_and_standard_input(capsys, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffThe dog\n\nThe café\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A cat\n")))
    arguments = ["--json", "--prompt", "One", "--prompt-file", str(file), "--prompt-file", "-"]
    status, out, _ = run(capsys, *DEMO, *arguments)
    assert status == 0
    prompts = [row["prompt"] for row in json.loads(out)["results"]]
    assert prompts == ["One", "The dog", "The café", "A cat"]


def test_random_weights_are_labelled(capsys):
    status, _, err = run(capsys, *DEMO, "--random-weights")
    assert status == 0
    assert "demo (random weights: the text means nothing)" in err


BAD = [
    (["--backend", "NAIVE_PYTORHC"], ["'NAIVE_PYTORHC': did you mean NAIVE_PYTORCH?\n"]),
    (["--backend", "{folder}/none.cu"], ["there is no file ", "none.cu"]),
    (["--backend", "?"], ["unknown attention backend '?'; see `gpt2-infer backends`\n"]),
    (["--backend", "PYTORCH_SDPA_CUDNN_ATTENTION"], ["is not available here", "not on cpu"]),
    (["--max-new-tokens", "1024"], ["this model has 1024 positions"]),
    (["--max-new-tokens", "0"], ["max-new-tokens must be 1 or more"]),
    (["--temperature", "-1"], ["temperature must be a number of 0 or more, not -1.0"]),
    (["--temperature", "nan"], ["temperature must be"]),
    (["--temperature", "1", "--top-p", "nan"], ["top-p must be"]),
    (["--temperature", "1", "--top-k", "-3"], ["top-k must be"]),
    (["--top-k", "3"], ["need a temperature"]),
    (["--temperature", "1", "--seed", "-1"], ["the seed must be"]),
    (["--prompt-file", "/no/such/file"], ["/no/such/file cannot be read: No such file"]),
    (["--prompt-file", "{latin1}"], ["is not UTF-8: byte 3"]),
    (["--prompt-file", "{empty}"], ["holds no prompt"]),
    (["--prompt-file", "{folder}"], ["cannot be read: Is a directory"]),
    (["--model", "{corrupt}"], ["model.safetensors is truncated or corrupt"]),
    (["--model", "/no/such/model"], ["there is no folder '/no/such/model'"]),
    (["--model", "someone/unknown"], ["could not be fetched", "--model demo"]),
    (["--revision", "main"], ["is a local folder"]),
    (["--decode-backend", "NAIVE_PYTORCH"], ["--decode-backend is for --kv-cache"]),
    (["--stop", ""], ["a stop string must not be empty"]),
    (["--seed", "3"], ["--seed needs a temperature above 0"]),
    (["--temperature", "1e-40"], ["temperature must be 0 (greedy) or 1e-06 and more"]),
    (["--prompt", "a\udcff"], ["the prompt is not valid text"]),
    (["--model", "~nobody-of-that-name/x"], ["cannot be a model"]),
    (["--model", "x" * 300], ["cannot be a model"]),
    (["--model", "{latin1}"], ["is a file: name the folder it is in"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_clear_line_and_status_2(
    arguments, words, capsys, tmp_path, save_checkpoint
):
    places = {name: str(tmp_path / name) for name in ("latin1", "empty", "folder")}
    Path(places["latin1"]).write_bytes(b"caf\xe9")
    Path(places["empty"]).write_bytes(b"\n \n")
    Path(places["folder"]).mkdir()
    if "{corrupt}" in arguments:
        corrupt, _ = save_checkpoint(vocab_size=8192)
        (corrupt / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
        places["corrupt"] = str(corrupt)
        capsys.readouterr()  # transformers' own progress bar
    status, out, err = run(capsys, *DEMO, *(text.format(**places) for text in arguments))
    assert status == 2
    assert not out
    assert err.startswith("gpt2-infer: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_no_cuda_device_is_told(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = run(capsys, "--model", "demo", "--device", "cuda")
    assert status == 2
    assert "no CUDA device" in err


def test_debug_shows_the_traceback():
    with pytest.raises(LookupError):
        main([*DEMO, "--debug", "--backend", "nothing"])


def test_ctrl_c_prints_what_there_is_and_ends_with_130(capsys, monkeypatch):
    from gpt2_infer import Sampling

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
    assert "new tokens  3, ended by interrupted" in err


def test_backends_lists_every_backend(capsys):
    from attention_kernels import list_backends

    status, out, _ = run(capsys, "backends")
    assert status == 0
    status, machine, _ = run(capsys, "backends", "--json")
    assert status == 0
    rows = {row["name"]: row for row in json.loads(machine)}
    assert list(rows) == [spec.name for spec in list_backends()]
    assert all(name in out for name in rows)
    assert out.startswith("pytorch\n  NAIVE_PYTORCH ")
    assert "\n\ncustom-cuda\n" in out
    assert rows["NAIVE_PYTORCH"]["unavailable"]["cpu"] is None
    assert rows["PYTORCH_SDPA_EFFICIENT_ATTENTION"]["precisions"]["float32"] == "3xtf32"
    assert rows["CUSTOM_CUDA_VERSION_1"]["emulated_on"] == ["cpu"]
    assert "cpu (emulated)" in out or rows["CUSTOM_CUDA_VERSION_1"]["unavailable"]["cpu"]
    assert "needs a CUDA device" in out or rows["NAIVE_PYTORCH"]["unavailable"]["cuda"] is None


def test_help_needs_no_torch():
    code = (
        "import sys\n"
        "from gpt2_infer.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    status = end.code\n"
        "print(status, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"


def help_of(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_every_command_is_listed_and_says_what_it_is_for(capsys):
    listing = help_of(capsys)
    for name, what in COMMANDS.items():
        assert f"  {name:<10}{what}\n" in listing or name == "generate"
        assert f"{what[1:]}.\n" in help_of(capsys, name)


def test_generate_may_be_named(capsys):
    _, named, _ = run(capsys, "generate", *DEMO, "--prompt", "The")
    assert (0, named) == run(capsys, *DEMO, "--prompt", "The")[:2]


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"gpt2-infer {gpt2_infer.__version__}\n"


def test_dir_lists_the_public_names():
    assert {*gpt2_infer.__all__} <= {*dir(gpt2_infer)}


def test_python_dash_m_is_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "gpt2_infer", "--prompt-file", "/nope"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-new-tokens", "x"],
        ["nonsense"],
        ["--no-such-option"],
        ["backends", "x"],
        ["--json", "verify", "X"],
    ],
)
def test_what_cannot_be_parsed_is_one_line_too(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("gpt2-infer")
    assert err.count("\n") == 1


def test_debug_may_stand_before_the_command():
    with pytest.raises(LookupError):
        main(["--debug", "verify", "nothing"])


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m gpt2_infer --model demo --device cpu --max-new-tokens 4"
    return subprocess.run(
        ["bash", "-c", command.format(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("{} >&-", 0, "new tokens  4"),
        ("{} --prompt-file - <&-", 2, "error: --prompt-file -: standard input is closed"),
        ("{} >/dev/full", 2, "error: standard output cannot be written: No space left on device"),
        ("{0} --json >/dev/full", 2, "error: standard output cannot be written: No space left"),
        ("set -o pipefail; {} --json | true", 0, ""),
    ],
)
def test_closed_and_full_streams(command, status, words):
    done = shell(command)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tensors_name_cannot_write_to_the_terminal(capsys, save_checkpoint):
    folder, _ = save_checkpoint()
    rewrite(folder, lambda tensors: tensors | {"\x1b[31mred\x9b": torch.zeros(1)})
    capsys.readouterr()  # transformers' progress bar
    status, _, err = run(capsys, *DEMO, "--model", str(folder))
    assert status == 2
    assert "surplus \\x1b[31mred\\x9b" in err
    assert not {"\x1b", "\x9b"} & {*err}


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_checkpoints_code_is_never_run(file, capsys, tmp_path, monkeypatch, save_checkpoint):
    folder, _ = save_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    raw = json.loads((folder / file).read_text())
    raw |= {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}}
    (folder / file).write_text(json.dumps(raw))
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    capsys.readouterr()  # transformers' progress bar
    status, out, err = run(capsys, "--model", str(folder), "--device", "cpu")
    assert status == 2
    assert not out
    assert "auto_map is set: a checkpoint's own code is never run" in err
    assert not marker.exists()
    assert sys.stdin.tell() == 0


def test_a_kernel_that_returns_nan_writes_no_text(capsys, clean_registry):
    from attention_kernels import register
    from attention_kernels.contract import Kernels

    fields = {"family": "test", "summary": "NaN.", "precisions": {"float32": "ieee-fp32"}}
    register(name="TEST_NAN", **fields)(lambda: Kernels(lambda q, *_: q * torch.nan))
    status, out, err = run(capsys, *DEMO, "--backend", "test-nan", "--prompt", "Hi")
    assert status == 2
    assert not out
    assert "with attention backend TEST_NAN in float32 the logits at position 1 of prompt 1" in err


def test_a_terminal_shows_what_is_under_way(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, err = run(capsys, *DEMO, "--prompt", "The")
    before = err[: err.index("\n")]
    assert before == ("loading demo ...\r\x1b[Kwarming up PYTORCH_SDPA_FLASH_ATTENTION ...\r\x1b[K")


def test_an_error_of_another_file_is_not_standard_outputs(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpt2_infer.checkpoint.open_checkpoint", full)
    status, _, err = run(capsys, *DEMO)
    assert status == 2
    assert err == "gpt2-infer: error: [Errno 28] No space left on device\n"


def test_json_is_whole_whatever_the_encoding(demo):
    done = shell("PYTHONIOENCODING=latin-1 {} --json --prompt 'The café “x” 🦜'")
    assert json.loads(done.stdout)["results"][0]["prompt"] == "The café “x” 🦜"


def test_only_line_ends_separate_the_prompts_of_a_file(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\u2028still one\r\ntwo\x0bstill two\rthree\n".encode())
    status, out, _ = run(capsys, *DEMO, "--json", "--prompt-file", str(file))
    assert status == 0
    prompts = [row["prompt"] for row in json.loads(out)["results"]]
    assert prompts == ["one\u2028still one", "two\x0bstill two", "three"]


def test_every_option_of_generating_is_documented(capsys):
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    documented = {*re.findall(r"--[a-z-]+", "".join(f.read_text("utf-8") for f in documents))}
    assert {*re.findall(r"--[a-z-]+", help_of(capsys))} <= documented | {
        "--help",
        "--debug",
        "--version",
    }


def test_a_cuda_kernel_writes_text_without_a_gpu_and_quotes_no_timing(capsys):
    from attention_kernels import get_backend

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
    _, out, _ = run(capsys, *arguments, file, "--json")
    report = json.loads(out)["report"]
    assert report["emulated"] is True
    assert "tokens_per_second" not in report


@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_kernels_shows_one_ladder_or_all(capsys):
    only = ["--arch", "90", "--head-dim", "64"]
    assert main(["kernels", *only, "--json", "--family", "wmma-fa2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["version"] for row in rows} == {v.op for v in ladder.versions("wmma-fa2").values()}
    assert all(row["blocks"] > 0 == row["spill_stores"] for row in rows)
    assert main(["kernels", *only]) == 0
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert shown == {version.name for version in header.versions()}
    assert main(["kernels", "--family", "fp32"]) == 2
    assert "there is no ladder fp32: there are custom-cuda, " in capsys.readouterr().err
    assert main(["kernels", "--head-dim", "64", "7"]) == 2
    assert "no version of custom-cuda takes head_dim 7" in capsys.readouterr().err


@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_kernels_takes_backends_and_version_files(capsys, tmp_path):
    file = tmp_path / "v13_mine.cu"
    right = (header.CSRC / "fp32" / "v08_o_in_shared.cu").read_text()
    file.write_text(right.replace("// v08 - ", "// v13 - "))
    only = ["--arch", "90", "--head-dim", "64", "--json"]
    assert main(["kernels", str(file), "custom-cuda-version-8", *only]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row.pop("version").split("_")[-1] for row in rows] == ["v13", "v08"]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["NAIVE_PYTORCH"], "NAIVE_PYTORCH cannot take this call: it has no version file"),
        (["FLASH_ATTENTION_1_CPU"], "it is host code"),
        (["CUSTOM_CUDA_VERSION_1", "--family", "all"], "--family is for all of a ladder"),
        (["CUSTOM_CUDA_VERSION_1", "--head-dim", "7"], "VERSION_1 takes head_dim 7"),
        (["{0}/my kernel.cu"], "mv '{0}/my kernel.cu' {0}/v01_my_kernel.cu\n"),
    ],
)
def test_what_kernels_does_not_take_is_one_line(words, complaint, capsys, tmp_path):
    (tmp_path / "my kernel.cu").write_text("")
    assert main(["kernels", *(word.format(tmp_path) for word in words)]) == 2
    err = capsys.readouterr().err
    assert complaint.format(tmp_path) in err
    assert err.count("\n") == 1


def test_accesses_shows_what_each_source_line_asks_of_memory(capsys):
    command = ["accesses", "CUSTOM_CUDA_VERSION_1", "--seqlen", "33", "--head-dim", "32", "--full"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    conflicts = [access for access in found if access["conflicts"]]
    assert [access["source"][:4] for access in conflicts] == ["s +="]
    assert main(command) == 0
    title, _, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "v01_naive_flash.cu, emulated: B=1 H=1 N=33 head_dim=32 full"
    assert head.split()[:4] == ["line", "access", "bytes", "requests"]
    assert len(rows) == len(found)
    assert sum("(32-way)" in row for row in rows) == 1
    for name, words in (
        ("NAIVE_PYTORCH", "no version file"),
        ("CUSTOM_CUDA_VERSION_1", "batch 0 (1 or more)"),
    ):
        assert main(["accesses", name, "--batch", "0"]) == 2
        assert words in capsys.readouterr().err
