"""What users get: the wheel, built and installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from scripts import make_wheel

PROGRAM = """
from pathlib import Path
import gpt2_infer
from attention_kernels.judge import clock
from attention_kernels.ladder import header, prebuilt
from gpt2_infer import export
from gpt2_infer.bench import study
from gpt2_infer.bench.record import SCHEMA
from gpt2_infer.cli import main
clock.OUTSIDE["cpu"] = clock.REPEATED["cpu"] = float("inf")  # other tests run, too
for line in (
    "--model demo --device cpu --max-new-tokens 4",
    "backends",
    "compare --out r.json --task kernel --device cpu --seqlens 8 --heads 1 --head-dims 32 "
    "--rounds 2 --backends NAIVE_PYTORCH PYTORCH_SDPA_MATH",
):
    assert main(line.split()) == 0
assert SCHEMA.is_file() and (SCHEMA.parent / "show/page/page.html").is_file()
first = header.parse_header(header.version_files(header.CSRC / "fp32")[0])
export.plan(first, Path("exported")).write("", "")
assert len(study.load()) > 20
print(gpt2_infer.__file__, *(file.name for file in prebuilt.FOLDER.iterdir()))
"""


@pytest.mark.slow
def test_an_installed_wheel_generates_lists_and_measures(tmp_path):
    library, site = tmp_path / "v01-0123456789abcdef.so", tmp_path / "site"
    library.touch()
    wheel = make_wheel.pack([library], tmp_path, tag="any")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    assert (site / "bin" / "gpt2-infer").exists()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert "  CUSTOM_CUDA_VERSION_1 " in printed
    assert printed.splitlines()[-1] == f"{site}/gpt2_infer/__init__.py {library.name}"
