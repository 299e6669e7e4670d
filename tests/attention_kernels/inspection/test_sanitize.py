"""NVIDIA's compute-sanitizer over every version of every ladder, and over Triton's.

memcheck: no bad access. racecheck: no race in shared memory, which is all that it looks at. Both
are first shown to find what is planted in the negative controls.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_kernels import BackendSpec, ladder, list_backends
from attention_kernels.inspection.sanitize import TOOLS, compute_sanitizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]
# Backends in one process under a sanitizer. While the other workers use the GPU, a process takes
# about 70 s to start, a backend 13 s, and a step of the ablation 30.
MOST = {"triton": 1, "ablation": 3}
USUALLY_MOST = 7
NEGATIVE = Path(__file__).parents[1] / "negative"


@pytest.mark.parametrize(
    ("tool", "control"),
    [("memcheck", "v03_out_of_bounds_read.cu"), ("racecheck", "v01_dropped_barrier.cu")],
)
def test_what_is_planted_is_found(tool, control):
    (fault,) = compute_sanitizer(tool, [str(NEGATIVE / control)])
    assert fault.startswith(f"{tool}: ")


def shares() -> Iterator[Any]:
    """Every backend, in parts of a family; Triton's, which take the longest, one by one."""

    def family(spec: BackendSpec) -> str:
        return spec.family

    ours = [s for s in list_backends() if s.name in ladder.versions() or s.family == "triton"]
    on_gpu = sorted((spec for spec in ours if "cuda" in spec.device_types), key=family)
    for name, group in itertools.groupby(on_gpu, family):
        names = [spec.name for spec in group]
        count = -(-len(names) // MOST.get(name, USUALLY_MOST))
        # Triton's kernels under memcheck alone: racecheck takes minutes for each.
        for tool in TOOLS[:1] if name == "triton" else TOOLS:
            for part in range(count):
                yield pytest.param(tool, names[part::count], id=f"{name}-{part}-{tool}")


@pytest.mark.parametrize(("tool", "names"), [*shares()])
def test_sanitizer_is_silent(tool, names):
    assert compute_sanitizer(tool, names) == []
