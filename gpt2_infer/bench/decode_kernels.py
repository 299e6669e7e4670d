"""Time decode kernels alone: attention of one query per row over a cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_kernels import BackendSpec, list_backends
from gpt2_infer.bench import selection
from gpt2_infer.bench.kernels import MIN_ROTATED_BYTES
from gpt2_infer.bench.record import KernelCell, Row
from gpt2_infer.bench.study import Contender, DecodeKernelStudy, RejectedError, Subject
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.device_time import device_seconds

_MAX_ERROR = 1e-5  # of float32, from float64


class DecodeKernels(Subject[KernelCell]):
    """Times decode() alone, with all rows as long as the cache.

    A sample is one replay of a graph of calls, on caches which together exceed the L2. Each kernel
    is checked first, on one of them.
    """

    def __init__(self, study: DecodeKernelStudy) -> None:
        resolve_device("cuda")
        self.device, self.rounds = "cuda", study.rounds
        self.specs = [spec for spec in list_backends() if spec.family == "decode"]
        shape = study.heads, study.head_dim, "float32"
        self.cells = [
            KernelCell(n, batch, *shape, is_causal=False)
            for batch, n in itertools.product(study.batch_sizes, study.seqlens)
        ]

    def contenders(self, cell: KernelCell) -> Iterator[Contender]:
        """Check and yield each kernel."""
        shape = cell.batch, cell.seqlen, cell.num_heads, cell.head_dim
        sets = max(2, -(-MIN_ROTATED_BYTES // (cell.min_bytes // 2)))
        draw = functools.partial(torch.randn, device="cuda")
        caches = [(draw(*shape), draw(*shape)) for _ in range(sets)]
        q = draw(cell.batch, 1, *shape[2:])
        seqlens = torch.full((cell.batch,), cell.seqlen, dtype=torch.int32, device="cuda")
        q_64, k_64, v_64 = (x.transpose(1, 2).double() for x in (q, *caches[0]))
        expected = F.scaled_dot_product_attention(q_64, k_64, v_64).transpose(1, 2)
        for spec in self.specs:
            row = selection.row_of(spec, cell.dtype, "time", "us", self.sources)
            error = float((spec.decode(q, *caches[0], seqlens) - expected).abs().max())
            row.extra["error"] = error
            if not error <= _MAX_ERROR:  # also NaN
                row.status, row.reason = "failed", f"the error is {error:.1e}"
                yield Contender(row)
                continue
            graph = _captured(spec, q, caches, seqlens)
            yield Contender(row, functools.partial(_sample, row, graph, sets))


def _captured(
    spec: BackendSpec, q: Tensor, caches: list[tuple[Tensor, Tensor]], seqlens: Tensor
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k, v in caches:
            spec.decode(q, k, v, seqlens)
    return graph


def _sample(row: Row, graph: torch.cuda.CUDAGraph, sets: int) -> Mapping[str, float]:
    try:
        return {"time": 1e6 * device_seconds(graph.replay) / sets}
    except RuntimeError as error:
        raise RejectedError(f"{row.contender} failed: {error}") from error
