"""Time a cold build of the float32 ladder, all versions at once."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator

import msgspec

from attention_kernels.ladder import build, compilers, header
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import BuildStudy, Contender, Subject


class Target(msgspec.Struct, frozen=True):
    """A build target."""

    target: compilers.Target
    arch: str

    def __str__(self) -> str:
        return f"nvcc, sm_{self.arch}" if self.arch else "g++, emulator"


class Builds(Subject[Target]):
    """Builds into an empty cache each time: for a GPU with nvcc, for the emulator with g++."""

    warm_up = 0
    has_long_samples = True

    def __init__(self, study: BuildStudy) -> None:
        self.rounds = study.rounds
        self.cells = [Target("cuda", study.arch), Target("emulator", "")]
        self.facts = {"jobs": os.cpu_count() or 1}

    def contenders(self, cell: Target) -> Iterator[Contender]:
        """Yield the compiler; its sample raises BuildError if a version does not compile."""
        versions = {"versions": len(header.versions())}
        row = Row(contender=str(cell), metric="time", unit="s", extra=versions)
        yield Contender(row, functools.partial(_cold, cell))


def _cold(cell: Target) -> dict[str, float]:
    before = os.environ.get("ATTENTION_KERNELS_CACHE")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ATTENTION_KERNELS_CACHE"] = cache
        try:
            started = time.perf_counter()
            built = build.build_many(header.versions(), cell.target, cell.arch)
            seconds = time.perf_counter() - started
        finally:
            del os.environ["ATTENTION_KERNELS_CACHE"]
            if before is not None:
                os.environ["ATTENTION_KERNELS_CACHE"] = before
    for outcome in built.values():
        if isinstance(outcome, compilers.BuildError):
            raise outcome
    return {"time": round(seconds, 3)}
