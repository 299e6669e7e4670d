"""The example package, installed as a reader would: listed, verified, generating, renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels import ladder
from attention_kernels.judge.suite import Case, DecodeCase, run_case
from attention_kernels.ladder import compilers
from gpt2_infer import GPT2, generate
from gpt2_infer.bench.record import read
from tests.conftest import DEVICES, EXAMPLE, ROOT, needs_compiler

PACKAGE = ROOT / "examples" / "my_backend"
NAMES = ["MY_PYTORCH", "MY_CUDA_VERSION_1"]
DECODER = "MY_DECODE_VERSION_1"
PROMPT = "Once upon a time there was a"


def install(site: Path, *sources: Path) -> None:
    """Install the packages into `site`; the builds write into `sources`, which are copies."""
    pip = [sys.executable, "-m", "pip", "install", "--isolated", "--quiet", "--no-index"]
    pip += ["--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, *sources], check=True)


@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("v01_warp_per_row.cu", Case(5, 32)),
        ("v01_warp_per_row.cu", Case(70, 64, 8.0, 2, 2, False)),
        ("v01_warp_per_row.cu", Case(33, 128)),
        ("decode/v01_warp_per_head.cu", DecodeCase(32, lengths=(1, 33, 130), max_seqlen=130)),
        ("decode/v01_warp_per_head.cu", DecodeCase(64, scale=8.0, layout="gaps")),
        ("decode/v01_warp_per_head.cu", DecodeCase(128, num_heads=12, softmax_scale=0.3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_its_kernels_are_right(device, file, case):
    if reason := compilers.missing_compiler("cuda" if device == "cuda" else "emulator"):
        pytest.skip(reason)
    assert run_case(ladder.resolve(str(EXAMPLE / file)), case, device).passed


@pytest.mark.slow
@needs_compiler
def test_it_and_a_renamed_copy_are_installed_listed_run_and_compared(tmp_path):
    readme = (PACKAGE / "README.md").read_text("utf-8")
    *rename, pip = re.search(r"```\n(.*?)```", readme, re.DOTALL)[1].splitlines()
    assert pip.startswith("pip install ")
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-ec", "\n".join(rename)], cwd=ROOT, env=environment, check=True)
    files = [file for file in (tmp_path / "fast_rows").rglob("*") if file.is_file()]
    for file in (file for file in files if file.name != "README.md"):
        assert not re.search(r"my.backend|\bMY_|mine", file.read_text("utf-8")), file
    site = tmp_path / "site"
    install(site, tmp_path / "fast_rows", shutil.copytree(PACKAGE, tmp_path / "source"))
    path = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def run(*arguments: str):
        command = [sys.executable, "-m", "gpt2_infer", *arguments, "--json"]
        return json.loads(subprocess.check_output(command, cwd=tmp_path, env=environment))

    rows = {row["name"]: row for row in run("backends")}
    renamed = ["FAST_PYTORCH", "FAST_CUDA_VERSION_1", "FAST_DECODE_VERSION_1"]
    assert {rows[name]["family"] for name in renamed} == {"fast-rows"}
    assert {rows[name]["family"] for name in (*NAMES, DECODER)} == {"my-backend"}
    assert rows[NAMES[1]]["emulated_on"] == ["cpu"]
    plain = GPT2.from_pretrained("demo", device="cpu", attention="NAIVE_PYTORCH")
    expected = generate(plain, PROMPT, max_new_tokens=6).texts[0]
    for name, options in (
        (NAMES[0], ["--backend", NAMES[0]]),
        (NAMES[1], ["--backend", NAMES[1]]),
        (DECODER, ["--backend", "NAIVE_PYTORCH", "--kv-cache", "--decode-backend", DECODER]),
    ):
        options += ["--model", "demo", "--device", "cpu", "--max-new-tokens", "6"]
        answer = run("--prompt", PROMPT, *options)
        assert name in answer["report"].values()
        assert answer["results"][0]["text"] == expected
    options = ["--device", "cpu", "--max-tokens", "16", "--rounds", "2", "--out", "r.json"]
    run("compare", "--backends", *NAMES, "NAIVE_PYTORCH", *options)
    found = {row.contender: row for row in read(tmp_path / "r.json").of("generation")}
    assert [found[name].status for name in NAMES] == ["ok", "emulated"]
    assert [len(found[name].samples) for name in NAMES] == [2, 0]
