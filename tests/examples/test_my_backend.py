"""The example package, installed as a reader would: listed, verified, generating, renamed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attention_kernels import ladder
from attention_kernels.judge.suite import Case, DecodeCase, run_case
from attention_kernels.ladder import compilers
from gpt2_infer import GPT2, generate
from gpt2_infer.bench.record import read
from gpt2_infer.cli import parse
from tests.conftest import DEVICES, shared_by_workers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_backend"
README = (EXAMPLE / "README.md").read_text("utf-8")
SOURCE = EXAMPLE / "src" / "my_backend"
NAMES = ["MY_TILED_PYTORCH", "MY_CUDA_VERSION_1"]
DECODER = "MY_DECODE_VERSION_1"
PROMPT = "Once upon a time there was a"


def install(source: Path, site: Path, *options: str) -> None:
    """Install the package into `site`; the build writes into `source`, which is a copy."""
    pip = [sys.executable, "-m", "pip", "install", "--isolated", "--quiet", "--no-index"]
    pip += ["--no-deps", "--no-build-isolation", "--target", str(site), *options]
    subprocess.run([*pip, source], check=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with shared_by_workers(tmp_path_factory, "example") as folder:
        if not folder.exists():
            source = tmp_path_factory.mktemp("example") / "source"
            install(shutil.copytree(EXAMPLE, source), folder)
    return folder


# Reads the arguments of a run per line; prints its status, standard output and standard error.
PROGRAM = """
import contextlib, io, json, sys
from gpt2_infer.cli import main
for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(json.loads(line))
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""
Run = Callable[..., tuple[int, str, str]]


@contextlib.contextmanager
def program_in(site: Path) -> Iterator[Run]:
    """run(*arguments): one process of the program, with the packages of `site` installed."""
    path = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=site,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(*arguments: str) -> tuple[int, str, str]:
            print(json.dumps(arguments), file=process.stdin, flush=True)
            return tuple(json.loads(process.stdout.readline()))

        yield run


@pytest.fixture(scope="module")
def program(site: Path) -> Iterator[Run]:
    with program_in(site) as run:
        yield run


def listed(run: Run) -> dict[str, dict]:
    status, out, err = run("backends", "--json")
    assert status == 0, err
    return {row["name"]: row for row in json.loads(out)}


def skip_without_compiler(name: str, target: compilers.Target) -> None:
    if name != NAMES[0] and (reason := compilers.missing_compiler(target)):
        pytest.skip(reason)


def test_it_is_listed(program):
    rows = listed(program)
    tiled, cuda = (rows[name] for name in NAMES)
    assert tiled["family"] == cuda["family"] == "my-backend"
    assert tiled["unavailable"]["cpu"] is None
    assert cuda["unavailable"]["cpu"] == compilers.missing_compiler("emulator")
    assert cuda["emulated_on"] == ["cpu"]
    assert cuda["summary"] == "One warp per query, one key per lane."


@pytest.mark.slow
def test_a_script_next_to_the_package_finds_it(tmp_path):
    """There, the project's folder looks like a package of that name without __init__.py."""
    source = shutil.copytree(EXAMPLE, tmp_path / "my_backend")
    install(source, tmp_path / "site", "--editable")
    code = (
        f"import site, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        f"site.addsitedir({str(tmp_path / 'site')!r}); "
        "from attention_kernels import get_backend; print(get_backend('MY_TILED_PYTORCH').family)"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out == "my-backend\n"


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
    skip_without_compiler("CUDA", "cuda" if device == "cuda" else "emulator")
    assert run_case(ladder.resolve(str(SOURCE / file)), case, device).passed


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, f"--backend {name}", marks=pytest.mark.slow) for name in NAMES]
    + [
        pytest.param(
            DECODER,
            f"--backend NAIVE_PYTORCH --kv-cache --decode-backend {DECODER}",
            marks=pytest.mark.slow,
        )
    ],
)
def test_it_writes_what_plain_pytorch_writes(name, options, program):
    skip_without_compiler(name, "emulator")
    arguments = f"--model demo --device cpu {options} --max-new-tokens 6 --json".split()
    status, out, err = program(*arguments, "--prompt", PROMPT)
    assert status == 0, err
    answer = json.loads(out)
    plain = GPT2.from_pretrained("demo", device="cpu", attention="NAIVE_PYTORCH")
    assert name in answer["report"].values()
    assert answer["results"][0]["text"] == generate(plain, PROMPT, max_new_tokens=6).texts[0]


def test_the_commands_of_the_readme_parse():
    commands = re.findall(r"^gpt2-infer (.*)$", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        parse(shlex.split(command, comments=True))


@pytest.mark.slow
def test_a_renamed_copy_shares_no_name_with_the_original(site, tmp_path):
    *rename, pip = re.search(r"```\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert pip.startswith("pip install ")
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-ec", "\n".join(rename)], cwd=ROOT, env=environment, check=True)
    files = [file for file in (tmp_path / "fast_rows").rglob("*") if file.is_file()]
    for file in (file for file in files if file.name != "README.md"):
        assert not re.search(r"my.backend|\bMY_|mine", file.read_text("utf-8")), file
    both = shutil.copytree(site, tmp_path / "site")
    install(tmp_path / "fast_rows", both)
    renamed = ["FAST_TILED_PYTORCH", "FAST_CUDA_VERSION_1", "FAST_DECODE_VERSION_1"]
    with program_in(both) as run:
        rows = listed(run)
    assert {rows[name]["family"] for name in renamed} == {"fast-rows"}
    assert {*renamed, *NAMES, "NAIVE_PYTORCH"} <= {*rows}


@pytest.mark.slow
def test_it_is_compared(program, tmp_path):
    arguments = ["--device", "cpu", "--max-tokens", "16", "--rounds", "2"]
    arguments += ["--backends", *NAMES, "NAIVE_PYTORCH", "--out", str(tmp_path / "r.json")]
    status, out, err = program("compare", *arguments)
    assert status == 0, err
    found = {row.contender: row for row in read(tmp_path / "r.json").of("generation")}
    assert [found[name].status for name in NAMES] == ["ok", "emulated"]
    assert [len(found[name].samples) for name in NAMES] == [2, 0]
    assert f"| `{NAMES[0]}` | ieee-fp32 |" in " ".join(out.split())
