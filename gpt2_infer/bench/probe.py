"""Measure what `gpt2-infer predict` knows of a GPU and no table tells, with scripts/probe.cu."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from attention_kernels import child
from attention_kernels.ladder import compilers
from attention_kernels.ladder.header import CSRC
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import Contender, ProbeStudy, Subject
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.errors import RequestError

SOURCE = Path(__file__).parents[2] / "scripts" / "probe.cu"
_SECONDS = 60.0  # a run takes a few


class Gpu(msgspec.Struct, frozen=True):
    """The GPU that is probed."""

    arch: str

    def __str__(self) -> str:
        return f"sm_{self.arch}"


class Probe(Subject[Gpu]):
    """Runs the program a few times; each of its figures is a row."""

    def __init__(self, study: ProbeStudy) -> None:
        resolve_device("cuda")
        self.device = "cuda"
        self.rounds, self.cells = study.rounds, [Gpu(study.arch)]

    def contenders(self, cell: Gpu) -> Iterator[Contender]:
        """Yield a contender per figure, with the samples of all runs."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "probe")
            _compile(program, cell.arch)
            runs = [_run(program) for _ in range(self.rounds)]
        for name, (_, unit) in runs[0].items():
            samples = [run[name][0] for run in runs]
            yield Contender(Row(contender=name, metric="probe", unit=unit, samples=samples))


def _compile(program: Path, arch: str) -> None:
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    if not (nvcc := compilers.find_nvcc()):
        raise compilers.BuildError(f"needs nvcc to compile {SOURCE.name}")
    options = ["-O3", "-std=c++17", code, f"-I{CSRC}"]
    compilers.output_of([nvcc, *options, "-o", str(program), str(SOURCE)])


def _run(program: Path) -> dict[str, tuple[float, str]]:
    """Return the value and the unit of each figure."""
    done = child.run([str(program)], timeout_s=_SECONDS)
    if done.status:
        raise RequestError(f"{SOURCE.name} {done.how}: {done.err.strip()}")
    return msgspec.json.decode(done.out, type=dict[str, tuple[float, str]])
