"""NVIDIA's compute-sanitizer over every version of every ladder.

memcheck: no bad access. racecheck: no race in shared memory, which is all that it looks at. Both
are first shown to find what is planted in the negative controls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels import backends, ladder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]
NAMES = [spec.name for spec in backends() if spec.name in ladder.versions()]
NEGATIVE = Path(__file__).parent / "negative"
WORKER = """
import sys, torch
from pathlib import Path
from attention_kernels import UnsupportedError, build, get_backend
from attention_kernels.conformance import Case
from tests.attention_kernels.test_ladders import dtype_of, spec_of
if sys.argv[1].endswith(".cu"):
    spec = spec_of(build.parse_header(Path(sys.argv[1]), "negative_"))
else:
    spec = get_backend(sys.argv[1])
for seqlen, head_dim in ((1, 64), (33, 32), (130, 64), (65, 128)):
    if head_dim not in spec.head_dims:
        continue
    for is_causal in (True, False):
        case = Case(seqlen, head_dim, batch=2, num_heads=3, dtype=dtype_of(spec))
        q, k, v = case.inputs("cuda")
        try:
            spec.attention(q, k, v, is_causal=is_causal)
        except UnsupportedError:  # a GPU whose shared memory is too small for head_dim 128
            assert head_dim == 128
torch.cuda.synchronize()
"""


def sanitize(tool: str, what: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    # Inside torch's pool an access beyond a tensor is not beyond an allocation.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(root)}
    worker = [sys.executable, "-c", WORKER, what]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "77"]
    command += ["--report-api-errors", "no", "--kernel-name", "kernel_substring=attention"]
    return subprocess.run(
        [*command, *worker], capture_output=True, text=True, check=False, cwd=root, env=environment
    )


@pytest.mark.parametrize(
    ("tool", "control"),
    [("memcheck", "v03_out_of_bounds_read.cu"), ("racecheck", "v01_dropped_barrier.cu")],
)
def test_what_is_planted_is_found(tool, control):
    done = sanitize(tool, str(NEGATIVE / control))
    assert done.returncode == 77, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", NAMES)
def test_sanitizer_is_silent(name, tool):
    done = sanitize(tool, name)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert summary in done.stdout
