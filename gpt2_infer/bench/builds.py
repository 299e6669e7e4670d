"""How long the float32 ladder takes to build from nothing, all versions at once."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from attention_kernels.ladder import build, compilers, header
from gpt2_infer.bench import environment
from gpt2_infer.bench.results import BuildSeries, BuildTiming
from gpt2_infer.bench.timing import interleave


def time_builds(arch: str, *, rounds: int, task: str, out: Path | None) -> BuildTiming:
    """Build into an empty cache each time: for a GPU with nvcc, for the emulator with g++.

    arch: compute capability, e.g. "90". Raises BuildError if a version does not compile.
    """
    versions = header.versions()
    targets: dict[str, tuple[compilers.Target, str]] = {
        f"nvcc, sm_{arch}": ("cuda", arch),
        "g++, emulator": ("emulator", ""),
    }

    def cold(target: compilers.Target, arch: str) -> float:
        before = os.environ.get("ATTENTION_KERNELS_CACHE")
        with tempfile.TemporaryDirectory() as cache:
            os.environ["ATTENTION_KERNELS_CACHE"] = cache
            try:
                started = time.perf_counter()
                built = build.build_many(versions, target, arch)
                seconds = time.perf_counter() - started
            finally:
                del os.environ["ATTENTION_KERNELS_CACHE"]
                if before is not None:
                    os.environ["ATTENTION_KERNELS_CACHE"] = before
        for outcome in built.values():
            if isinstance(outcome, compilers.BuildError):
                raise outcome
        return seconds

    provenance = environment.provenance()
    runs = {name: (lambda what=what: cold(*what)) for name, what in targets.items()}
    samples = interleave(runs, rounds=rounds, warm_up=0)
    results = BuildTiming(
        task=task,
        provenance=provenance,
        rounds=rounds,
        jobs=os.cpu_count() or 1,
        series=[
            BuildSeries(
                name=name, versions=len(versions), samples=[round(value, 3) for value in values]
            )
            for name, values in samples.items()
            if isinstance(values, list)
        ],
    )
    if out:
        results.write(out)
    return results
