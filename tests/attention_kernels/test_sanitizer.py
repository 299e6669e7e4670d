"""NVIDIA's compute-sanitizer over every version of the ladder: no bad access, no race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]
NAMES = [spec.name for spec in backends() if spec.family == "custom-cuda"]
WORKER = """
import sys, torch
from attention_kernels import get_backend
from attention_kernels.conformance import Case
spec = get_backend(sys.argv[1])
for seqlen, head_dim in ((1, 64), (33, 32), (130, 64), (65, 128)):
    for is_causal in (True, False):
        q, k, v = Case(seqlen, head_dim, batch=2, num_heads=3).inputs("cuda")
        spec.attention(q, k, v, is_causal=is_causal)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", NAMES)
def test_sanitizer_is_silent(name, tool):
    subprocess.run([sys.executable, "-c", WORKER, name], check=True)  # build outside the tool
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "77"]
    command += ["--kernel-name", "kernel_substring=attention_kernel"]
    command += [sys.executable, "-c", WORKER, name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stdout[-2000:]
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert summary in done.stdout
