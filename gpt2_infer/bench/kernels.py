"""Compare kernels alone, each in a process of its own, in interleaved rounds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch

from attention_kernels.errors import RejectedTimeError
from attention_kernels.judge.clock import Clock, Numbers
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.plugins import keep_plugins_out
from attention_kernels.judge.suite import KERNEL_ERRORS
from attention_kernels.judge.timing import sets_of
from attention_kernels.judge.truth import check_precision
from gpt2_infer.bench import limits, selection
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.study import LENGTHS, Contender, KernelStudy, Subject
from gpt2_infer.errors import RequestError

# How much faster than a copy, or than the fastest product measured here, a kernel may be.
FLOOR_MARGIN = 1.2


class Kernels(Subject[KernelCell]):
    """Times attention() or decode() alone; a sample is microseconds per call, by the judge's rules.

    On CUDA a sample is one replay of a graph of calls, on sets of inputs which together exceed the
    L2. Backends that need contiguous inputs get them; the copies are not timed.
    """

    processes: selection.Runners

    def __init__(self, study: KernelStudy) -> None:
        check_precision()
        keep_plugins_out()
        if study.decode and study.full:
            raise RequestError("decode has no mask that full could omit")
        self.decode = study.decode
        self.device, specs, baseline = selection.select(study, decode=study.decode)
        self.cells = study.cells or [
            KernelCell(n, batch, study.heads, head_dim, not (study.full or study.decode), dtype)
            for dtype, batch, head_dim, n in itertools.product(
                study.dtypes,
                study.batch_sizes,
                study.head_dims,
                study.seqlens or LENGTHS[self.device]["seqlens"],
            )
        ]
        kinds = [(cell.dtype, cell.head_dim, cell.seqlen) for cell in self.cells]
        self.specs = selection.chosen([baseline, *specs], kinds, self.device)
        self.rounds = study.rounds
        self.processes = selection.Runners(self.device)
        self._limits: dict[str, float] = {}
        self.facts = {"device": self.device, "baseline": self.specs[0].name}

    def limits(self, *, is_recorded: bool) -> dict[str, float]:
        """Measure the GPU's bandwidth and arithmetic; no dtype is faster than float16."""
        if self.device == "cuda":
            dtypes = {"float16", *(cell.dtype for cell in self.cells)}
            self._limits = limits.gpu_limits(dtypes, instructions=is_recorded)
        return self._limits

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Check and yield each backend that supports the cell's dtype."""
        cases = _decode_cases(cell) if self.decode else [selection.case_of(cell, cell.dtype)]
        numbers = Numbers(cases[0], sets_of(cases[0], self.device), self.device)
        for spec in (spec for spec in self.specs if cell.dtype in spec.precisions):
            row = selection.row_of(spec, cell.dtype, "time", "us", self.sources)
            contender = Contender(row)
            try:
                runner = self.processes.of(spec)
                selection.check(row, runner, cases)
                if row.status == "ok":
                    clock = Clock(runner, numbers, floor_us=self._floor_us(cell))
                    contender.sample = functools.partial(self._sample, row, clock)
                    contender.recheck = functools.partial(_recheck, row, clock)
            except KERNEL_ERRORS as error:
                self.processes.record(row, error)
            self.processes.rest()
            yield contender

    def _floor_us(self, cell: KernelCell) -> float:
        """Return the least time that reading the inputs and computing take; 0 if unknown."""
        fastest = max((v for k, v in self._limits.items() if k.endswith("tflops")), default=0.0)
        if not fastest:
            return 0.0
        # Of q, k, v and o, decode reads the cache, k and v.
        input_bytes = cell.min_bytes * (2 if self.decode else 3) // 4
        reading = input_bytes / self._limits["copy_gbps"] / 1e3
        flops = cell.flops / cell.seqlen if self.decode else cell.flops
        return max(reading, flops / fastest / 1e6) / FLOOR_MARGIN

    def _sample(self, row: Row, clock: Clock) -> dict[str, float]:
        try:
            return {"time": clock.sample()}
        except RejectedTimeError:
            raise
        except KERNEL_ERRORS as error:
            self.processes.record(row, error)
            raise RejectedTimeError(f"while it was timed: {row.reason}") from error
        finally:
            self.processes.rest()


def _recheck(row: Row, clock: Clock) -> None:
    """Compare the clocks, and record what they say beside the times."""
    clock.check()
    row.extra |= clock.notes


def _decode_cases(cell: KernelCell) -> list[Case | DecodeCase]:
    """Return the case that is timed, and one whose rows differ in length, which is checked, too."""
    ragged = DecodeCase(cell.head_dim, getattr(torch, cell.dtype))
    full = dataclasses.replace(
        ragged,
        lengths=(cell.seqlen,) * cell.batch,
        max_seqlen=cell.seqlen,
        num_heads=cell.num_heads,
    )
    return [full, ragged]
