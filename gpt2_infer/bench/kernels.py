"""Compare kernels alone: check each, time them in interleaved rounds, check again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attention_kernels import BackendSpec
from attention_kernels.judge.conformance import KERNEL_ERRORS, Case
from attention_kernels.judge.reference import check_precision
from gpt2_infer.bench import environment, models, selection
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.study import LENGTHS, Contender, KernelStudy, Subject
from gpt2_infer.device_time import device_seconds

MIN_ROTATED_BYTES = 96 * 2**20
MIN_CALLS = 5


class Kernels(Subject[KernelCell]):
    """Times attention() alone; a sample is microseconds per call.

    On CUDA a sample is one replay of a graph of calls that rotate through inputs which together
    exceed the L2. Backends that need contiguous inputs get them; the copies are not timed.
    """

    def __init__(self, study: KernelStudy) -> None:
        check_precision()
        self.device, specs, baseline = selection.selected(study)
        self.cells = study.cells or [
            KernelCell(n, batch, study.heads, head_dim, dtype, not study.full)
            for dtype, batch, head_dim, n in itertools.product(
                study.dtypes,
                study.batch_sizes,
                study.head_dims,
                study.seqlens or LENGTHS[self.device]["seqlens"],
            )
        ]
        kinds = [(cell.dtype, cell.head_dim, cell.seqlen) for cell in self.cells]
        first, self.specs = selection.with_baseline(baseline, specs, kinds, self.device)
        for cell in self.cells:
            what = f"inputs and output at {cell}"
            selection.check_memory(what, cell.min_bytes, self.device)
        self.rounds = study.rounds
        self.facts = {"device": self.device, "baseline": first.name}

    def limits(self) -> dict[str, float]:
        """Measure the GPU's bandwidth and arithmetic."""
        if self.device == "cpu":
            return {}
        return environment.gpu_limits(sorted({cell.dtype for cell in self.cells}))

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Check and yield each backend that supports the cell's dtype."""
        case = selection.case_of(cell, cell.dtype)
        inputs = _Inputs(case, _sets(cell, self.device), self.device)
        for spec in (spec for spec in self.specs if cell.dtype in spec.precisions):
            row = selection.row_of(spec, cell.dtype, "time", "us", self.sources)
            contender = Contender(row)
            try:
                selection.check(row, spec, [case], self.device)
                if row.status == "ok":
                    contender.beside = _workspace(spec, inputs.of(spec)[0], case)
                    sampler = kernel_sampler(spec, inputs.of(spec), is_causal=cell.is_causal)
                    contender.sample = functools.partial(_sample, row, sampler, self.device)
                    contender.recheck = functools.partial(
                        selection.recheck, spec, case, self.device
                    )
            except KERNEL_ERRORS as error:
                selection.record_failure(row, error, self.device)
            yield contender


class _Inputs:
    """Sets of q, k and v, made on first use, so that running out of memory fails one backend."""

    def __init__(self, case: Case, sets: int, device: str) -> None:
        self._case, self._sets, self._device = case, sets, device

    def of(self, spec: BackendSpec) -> list[tuple[Tensor, ...]]:
        """Return the sets in the layout that a backend needs."""
        return self._dense if spec.needs_contiguous else self._views

    @functools.cached_property
    def _views(self) -> list[tuple[Tensor, ...]]:
        # All sets hold the same numbers, which do not affect a kernel's time.
        fused = torch.stack([x.contiguous() for x in self._case.inputs(self._device)], 2)
        return [tuple((fused.clone() if i else fused).unbind(2)) for i in range(self._sets)]

    @functools.cached_property
    def _dense(self) -> list[tuple[Tensor, ...]]:
        return [tuple(x.contiguous() for x in qkv) for qkv in self._views]


def _sets(cell: KernelCell, device: str) -> int:
    """Return the number of input sets that together exceed the L2."""
    if device == "cpu":
        return 2
    rotated = max(2 * torch.cuda.get_device_properties().L2_cache_size, MIN_ROTATED_BYTES)
    return max(-(-rotated // (cell.min_bytes * 3 // 4)), MIN_CALLS)


def _sample(row: Row, sampler: Callable[[], float], device: str) -> dict[str, float]:
    with selection.rejecting(row, device):
        return {"time": sampler()}


def kernel_sampler(
    spec: BackendSpec, inputs: Sequence[tuple[Tensor, ...]], *, is_causal: bool = True
) -> Callable[[], float]:
    """Return a function that takes one sample: mean microseconds per call over the inputs."""
    calls = [functools.partial(spec.attention, *qkv, is_causal=is_causal) for qkv in inputs]

    def run() -> None:
        for call in calls:
            call()

    device = inputs[0][0].device
    if device.type == "cpu":
        return lambda: models.timed(device, run)[1] * 1e6 / len(calls)

    calls[0]()
    work = run
    if spec.cuda_graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        work = graph.replay

    return lambda: device_seconds(work) * 1e6 / len(calls)


def _workspace(spec: BackendSpec, qkv: tuple[Tensor, ...], case: Case) -> list[Row]:
    """Return the peak device memory of a call beyond inputs and output; nothing on the CPU."""
    if qkv[0].device.type != "cuda":
        return []
    spec.attention(*qkv, is_causal=case.is_causal)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = spec.attention(*qkv, is_causal=case.is_causal)
    most = torch.cuda.max_memory_allocated() - before - o.numel() * o.element_size()
    return [Row(contender=spec.name, metric="workspace", unit="bytes", samples=[most])]
