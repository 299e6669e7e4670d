"""NVIDIA's compute-sanitizer over every version of every ladder, and over Triton's.

memcheck: no bad access. racecheck: no race in shared memory, which is all that it looks at. Both
are first shown to find what is planted in the negative controls.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from attention_kernels import ladder, list_backends
from attention_kernels.inspection.sanitize import TOOLS, compute_sanitizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]
FAMILIES = sorted({spec.family for spec in list_backends() if spec.name in ladder.versions()})
NEGATIVE = Path(__file__).parents[1] / "negative"


@pytest.mark.parametrize(
    ("tool", "control"),
    [("memcheck", "v03_out_of_bounds_read.cu"), ("racecheck", "v01_dropped_barrier.cu")],
)
def test_what_is_planted_is_found(tool, control):
    (fault,) = compute_sanitizer(tool, [str(NEGATIVE / control)])
    assert fault.startswith(f"{tool}: ")


# Triton's kernels under memcheck alone: tuned under racecheck, they take longer than minutes.
@pytest.mark.parametrize(
    ("family", "tool"), [*itertools.product(FAMILIES, TOOLS), ("triton", "memcheck")]
)
def test_sanitizer_is_silent(family, tool):
    names = [s.name for s in list_backends() if s.family == family and "cuda" in s.device_types]
    assert compute_sanitizer(tool, names) == []
