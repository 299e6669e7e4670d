"""The kernel alone: every backend that runs on this GPU, over sequence lengths, in one run.

    python scripts/bench_kernels.py --out results/<date>_<gpu>_kernels.json

Each backend is first held to the float64 reference; one that fails is recorded as failed and not
timed. A sample is one replay of a CUDA graph of calls over rotating inputs that together exceed the
L2, divided by their number; replays of all backends are interleaved. Backends that need contiguous
inputs get them: the copies belong to the adapter, not to the kernel.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention_kernels import AttentionError, BackendSpec, backends
from attention_kernels.conformance import Case, run_case
from gpt2_infer import bench
from gpt2_infer.results import Results, Series, output_file

ROTATED_BYTES = 96 * 2**20  # more than the L2 of any GPU up to Hopper
MIN_CALLS = 5


def main() -> None:
    """Check, time, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=output_file, required=True, help="JSON to write")
    parser.add_argument(
        "--seqlens", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4096]
    )
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="kept, after one that is not")
    arguments = parser.parse_args()

    settings = {
        name: getattr(arguments, name) for name in ("batch", "heads", "head_dim", "dtype", "rounds")
    }
    results = Results("kernels", bench.provenance(), settings | {"is_causal": True}, [])
    # Listed once: a backend that fails at the first length is recorded at every one.
    specs = [
        spec for spec in backends() if not spec.unavailable_reason("cuda") and spec.cuda_graphs
    ]
    for seqlen in arguments.seqlens:
        results.series += measure(specs, seqlen, arguments)
        results.write(arguments.out)
    print(format_table(results))


def measure(
    specs: Sequence[BackendSpec], seqlen: int, arguments: argparse.Namespace
) -> list[Series]:
    """All backends at one length."""
    dtype = getattr(torch, arguments.dtype)
    case = Case(
        seqlen,
        arguments.head_dim,
        batch=arguments.batch,
        num_heads=arguments.heads,
        dtype=dtype,
    )
    sets = -(-ROTATED_BYTES // sum(x.numel() * x.element_size() for x in case.inputs("cpu")))
    fused = [case.inputs("cuda") for _ in range(max(sets, MIN_CALLS))]
    dense = [tuple(x.contiguous() for x in qkv) for qkv in fused]
    found: dict[str, Series] = {}
    replays: dict[str, Callable[[], float]] = {}
    for spec in specs:
        q, k, v = fused[0]
        series = Series(spec.name, {"seqlen": seqlen, "family": spec.family}, "us")
        try:
            if spec.unsupported_reasons(q, k, v):
                continue
            series.labels["precision"] = spec.precisions[arguments.dtype]
            verdict = run_case(spec, case, "cuda")
            inputs: Sequence[tuple[Tensor, ...]] = dense if spec.needs_contiguous else fused
            graph = capture(spec, inputs)
        except (AttentionError, RuntimeError) as error:
            series.status, series.reason = "failed", str(error).splitlines()[0]
            found[spec.name] = series
            continue
        series.facts = {
            "error": verdict.error,
            "budget": verdict.budget,
            "naive_error": verdict.naive_error,
        }
        if verdict.passed:
            replays[spec.name] = functools.partial(replay, graph, len(inputs))
        else:
            series.status = "failed"
            series.reason = f"error {verdict.error:.2e} is over its budget of {verdict.budget:.2e}"
        found[spec.name] = series
    for name, samples in bench.interleave(replays, rounds=arguments.rounds).items():
        found[name].samples = [round(sample, 3) for sample in samples]
    return list(found.values())


def capture(spec: BackendSpec, inputs: Sequence[tuple[Tensor, ...]]) -> torch.cuda.CUDAGraph:
    """A graph that calls the backend once on each input."""
    spec.attention(*inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for q, k, v in inputs:
            spec.attention(q, k, v)
    return graph


def replay(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds per call of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def format_table(results: Results) -> str:
    """Median microseconds, a row per backend and a column per length."""
    seqlens = sorted({series.labels["seqlen"] for series in results.series})
    names = list(dict.fromkeys(series.name for series in results.series))
    cells = {(series.name, series.labels["seqlen"]): series for series in results.series}
    lines = [f"{'us':34}" + "".join(f"{seqlen:>10}" for seqlen in seqlens)]
    for name in names:
        row = [cells.get((name, seqlen)) for seqlen in seqlens]
        lines.append(
            f"{name:34}"
            + "".join(
                f"{'-' if s is None else s.status if not s.samples else f'{s.median:.1f}':>10}"
                for s in row
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
