"""Comparing kernels alone: each is checked, timed in interleaved rounds and checked again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attention_kernels import BackendSpec, ladder
from attention_kernels.conformance import KERNEL_ERRORS, Case, describe_error
from attention_kernels.reference import check_precision
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.results import BASELINE, KernelCell, KernelSeries, KernelTiming
from gpt2_infer.bench.timing import Contender, Progress, RejectedError, time_cells
from gpt2_infer.device_time import device_seconds

MIN_ROTATED_BYTES = 96 * 2**20
MIN_CALLS = 5


def compare_kernels(
    specs: Sequence[BackendSpec],
    cells: Sequence[KernelCell],
    *,
    device: str,
    rounds: int = 7,
    baseline: str | BackendSpec = BASELINE,
    task: str = "kernel",
    out: Path | None = None,
) -> KernelTiming:
    """Time attention() alone: a sample is microseconds per call.

    On CUDA a sample is one replay of a graph of calls over rotating inputs that together exceed the
    L2. Backends that need contiguous inputs get them: the copies belong to the adapter. baseline: a
    name, or a backend that may be in no registry; it is measured even if specs lack it. out: a file
    to write; the same call goes on with what an interrupted one has finished.
    Raises RequestError or ResultsError.
    """
    selection.check_rounds(rounds)
    check_precision()
    kinds = [(cell.dtype, cell.head_dim, cell.seqlen) for cell in cells]
    first, specs = selection.with_baseline(baseline, specs, kinds, device)
    for cell in cells:
        selection.check_memory(f"inputs and output at {cell}", cell.min_bytes, device)
    sources = {spec.name: environment.backend_digest(spec) for spec in specs}
    results = KernelTiming(
        task=task,
        provenance=environment.provenance(),
        device=device,
        baseline=first.name,
        rounds=rounds,
        backends=[spec.name for spec in specs],
        cells=[*cells],
        series=[],
    )
    settings = {"task": task, "device": device, "baseline": first.name, "rounds": rounds}
    settings |= {"backends": results.backends, "cells": results.cells}
    progress = Progress(out, KernelSeries, results.provenance, settings, sources)
    ladder.build_all(device, specs)
    if device == "cuda" and out:
        results.provenance.limits = environment.gpu_limits(sorted({c.dtype for c in cells}))
    results.series = time_cells(
        cells,
        lambda cell: _contenders(specs, cell, device, sources),
        rounds=rounds,
        progress=progress,
    )
    if out:
        results.write(out)
    progress.remove()
    return results


def _contenders(
    specs: Sequence[BackendSpec],
    cell: KernelCell,
    device: str,
    sources: Mapping[str, str | None],
) -> Iterator[Contender[KernelSeries]]:
    case = Case(
        cell.seqlen,
        cell.head_dim,
        batch=cell.batch,
        num_heads=cell.num_heads,
        dtype=getattr(torch, cell.dtype),
        is_causal=cell.is_causal,
    )
    sets = 2
    if device == "cuda":
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        rotated = max(2 * l2_bytes, MIN_ROTATED_BYTES)
        sets = max(-(-rotated // (cell.min_bytes * 3 // 4)), MIN_CALLS)

    # Made on first use, where running out of memory is recorded for the cell.
    @functools.cache
    def views() -> list[tuple[Tensor, ...]]:
        # The inputs are rotated; their numbers are drawn once, as they change no kernel's time.
        fused = torch.stack([x.contiguous() for x in case.inputs(device)], 2)
        return [tuple((fused.clone() if i else fused).unbind(2)) for i in range(sets)]

    @functools.cache
    def dense() -> list[tuple[Tensor, ...]]:
        return [tuple(x.contiguous() for x in qkv) for qkv in views()]

    for spec in (spec for spec in specs if cell.dtype in spec.precisions):
        series = KernelSeries(cell=cell, **selection.facts(spec, cell.dtype, sources))
        contender = Contender(series)
        try:
            selection.check(series, spec, [case], device)
            if series.status == "ok":
                inputs = dense() if spec.needs_contiguous else views()
                series.workspace_bytes = _workspace(spec, inputs[0], is_causal=cell.is_causal)
                sampler = kernel_sampler(spec, inputs, is_causal=cell.is_causal)
                contender.sample = functools.partial(_sample, series, sampler, device)
                contender.recheck = functools.partial(_recheck, series, spec, case, device)
        except KERNEL_ERRORS as error:
            selection.record_failure(series, error, device)
        yield contender


def _sample(series: KernelSeries, sampler: Callable[[], float], device: str) -> dict[str, float]:
    try:
        return {"samples": sampler()}
    except KERNEL_ERRORS as error:
        selection.record_failure(series, error, device)
        raise RejectedError(f"while it was timed: {describe_error(error)}") from error


def _recheck(series: KernelSeries, spec: BackendSpec, case: Case, device: str) -> None:
    selection.recheck(spec, case, device)
    series.checked_again = True


def kernel_sampler(
    spec: BackendSpec, inputs: Sequence[tuple[Tensor, ...]], *, is_causal: bool = True
) -> Callable[[], float]:
    """Return a function that takes one sample: microseconds per call over the inputs."""
    calls = [functools.partial(spec.attention, *qkv, is_causal=is_causal) for qkv in inputs]

    def run() -> None:
        for call in calls:
            call()

    if inputs[0][0].device.type == "cpu":

        def on_host() -> float:
            started = time.perf_counter()
            run()
            return (time.perf_counter() - started) * 1e6 / len(calls)

        return on_host

    calls[0]()
    work = run
    if spec.cuda_graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        work = graph.replay

    return lambda: device_seconds(work) * 1e6 / len(calls)


def _workspace(spec: BackendSpec, qkv: tuple[Tensor, ...], *, is_causal: bool) -> int | None:
    """Return the most device memory of a call beyond inputs and output; None on the CPU."""
    if qkv[0].device.type != "cuda":
        return None
    spec.attention(*qkv, is_causal=is_causal)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = spec.attention(*qkv, is_causal=is_causal)
    return torch.cuda.max_memory_allocated() - before - o.numel() * o.element_size()
