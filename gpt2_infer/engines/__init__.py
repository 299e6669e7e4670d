"""How steps run: eagerly, in captured CUDA graphs, or fused in kernels of our own."""

from __future__ import annotations

from gpt2_infer.engines import fused, recompute
from gpt2_infer.engines.base import Engine
from gpt2_infer.engines.cached import Cached
from gpt2_infer.engines.fused import DECODE_ATTENTION, Fused
from gpt2_infer.engines.recompute import Recompute
from gpt2_infer.errors import RequestError
from gpt2_infer.model import GPT2
from gpt2_infer.request import EngineName, Request

__all__ = ["DECODE_ATTENTION", "Engine", "make_engine"]


def make_engine(model: GPT2, request: Request) -> Engine:
    """Return the engine that a request names; for auto the fastest that supports the case.

    Raises RequestError with all reasons, and UnavailableBackendError or UnsupportedError of the
    backend that decodes.
    """
    against = _reasons(model, request)
    able = [name for name, reasons in against.items() if not reasons]
    name: EngineName = able[0] if request.engine == "auto" else request.engine
    if name not in able:
        reasons = "; ".join(against[name])
        raise RequestError(f"the {name} engine does not support this: {reasons}")
    if request.mode == "recompute":
        return Recompute(model, request, name)
    if name == "fused":
        return Fused(model, request, name)
    model.check_decode()  # the prefill may take long
    return Cached(model, request, name)


def _reasons(model: GPT2, request: Request) -> dict[EngineName, list[str]]:
    """Return what speaks against each engine, the fastest first."""
    is_cached = request.mode == "kv-cache"
    captured = [
        f"{spec.name} cannot be captured in a CUDA graph"
        for spec in [model.attention, *([model.decode_attention] if is_cached else [])]
        if not spec.cuda_graphs
    ]
    graph = captured if model.device.type == "cuda" else ["it needs a CUDA device", *captured]
    ours = (
        fused.unsupported_reasons(model, request)
        if is_cached
        else [*recompute.unsupported_reasons(model, request), *captured]
    )
    return {"fused": ours, "graph": graph, "eager": []}
