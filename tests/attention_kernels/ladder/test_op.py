"""A ladder that somebody edits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from attention_kernels.ladder import header
from tests.attention_kernels.ladder.conftest import HEADER

ROOT = Path(__file__).parents[3]


def test_a_new_file_is_a_new_backend_and_a_broken_one_breaks_nothing_else(tmp_path):
    package = tmp_path / "attention_kernels"
    shutil.copytree(ROOT / "attention_kernels", package)
    ladder = package / "csrc" / "fp32"
    files = header.version_files(ladder)
    for file in files[1:-1]:
        file.unlink()
    last, number = files[-1], header.version_number(files[-1]) + 1
    text = last.read_text().replace(f"// {last.name[:3]} - ", f"// v{number} - ")
    (ladder / f"v{number}_new.cu").write_text(text)
    (ladder / "v90_no_header.cu").write_text("int x;\n")
    (ladder / "v91_no_code.cu").write_text(HEADER.format(name="v91", title="a typo") + "a typo\n")
    (ladder / "v92_one.cu").write_text("")
    (ladder / "v92_two.cu").write_text("")
    code = f"""
import torch
from attention_kernels import AttentionError, attention, list_backends, get_backend
from attention_kernels.conformance import Case, run_case
print([spec.name for spec in list_backends() if spec.family == "custom-cuda"])
print(run_case(get_backend("CUSTOM_CUDA_VERSION_{number}"), Case(33, 64), "cpu").passed)
q = torch.zeros(1, 1, 1, 32)
for number in (90, 91, 92):
    spec = get_backend(f"CUSTOM_CUDA_VERSION_{{number}}")
    try:
        spec.attention(q, q, q)
    except AttentionError as error:
        print(error)
    print(spec.unavailable_reason("cpu"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "ATTENTION_KERNELS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [f"CUSTOM_CUDA_VERSION_{n}" for n in (1, number - 1, number, 90, 91, 92)]
    assert lines[:2] == [str(names), "True"]
    no_header = "v90_no_header.cu: the first line must be `// v90 - <what changed>`"
    assert lines[3] == no_header
    assert lines[2].startswith("attention backend CUSTOM_CUDA_VERSION_90 is not available here: ")
    assert lines[2].endswith(no_header)
    assert "v91_no_code.cu:13:1: error: " in lines[4]
    assert f"(log: {tmp_path / 'cache' / 'v91-emulator-'}" in lines[4]
    assert lines[5] in lines[4]
    assert lines[7] == "several files have the number 92: v92_one.cu, v92_two.cu"
