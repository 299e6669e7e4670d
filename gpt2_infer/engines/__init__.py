"""Engines: how steps run, eagerly, in captured CUDA graphs, or fused in our own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from gpt2_infer.engines import cpu_step, fused, recompute
from gpt2_infer.engines.base import Engine, room
from gpt2_infer.engines.cached import Cached
from gpt2_infer.engines.cpu_step import FusedOnCPU
from gpt2_infer.engines.fused import DECODE_ATTENTION, Fused
from gpt2_infer.engines.recompute import Recompute
from gpt2_infer.errors import RequestError
from gpt2_infer.model import GPT2
from gpt2_infer.request import EngineName, Request

__all__ = ["DECODE_ATTENTION", "Engine", "lend_engine", "make_engine"]

FASTEST_FIRST: tuple[EngineName, ...] = ("fused", "graph", "eager")


def make_engine(model: GPT2, request: Request) -> Engine:
    """Return a new engine: the one that the request names; for auto, the fastest that supports it.

    Raises RequestError with all reasons against a named engine, and UnavailableBackendError or
    UnsupportedError if the backend cannot decode.
    """
    kind, name = _choose(model, request)
    if kind is Cached:
        model.check_decode()  # fail now, not after a long prefill
    return kind(model, request, name)


def lend_engine(model: GPT2, request: Request) -> tuple[Engine, Callable[[], None]]:
    """Return an engine, cached by an earlier call if possible, and a function that caches it.

    Until it is cached again, no other call gets it. Eager engines and those of a CPU, which are
    made quickly, are not cached. Raises what make_engine() raises.
    """
    kind, name = _choose(model, request)
    if name == "eager" or not room(model.device):
        return make_engine(model, request), lambda: None
    prepared, key = model.prepared, kind.shape(model, request, name)
    stamp, kept = prepared.stamp, prepared.take(key)
    if kept is None:
        engine = make_engine(model, request)
    else:
        engine = cast("Engine", kept)
        engine.clear()
        engine.begin(model, request)

    def keep() -> None:
        engine.rest()
        prepared.put(key, engine, stamp, room(engine.device))

    return engine, keep


def _choose(model: GPT2, request: Request) -> tuple[type[Engine], EngineName]:
    if request.engine == "auto":
        name = next(name for name in FASTEST_FIRST if not _reasons(model, request, name))
    elif reasons := _reasons(model, request, request.engine):
        raise RequestError(
            f"the {request.engine} engine does not support this: {'; '.join(reasons)}"
        )
    else:
        name = request.engine
    if request.mode == "recompute":
        return Recompute, name
    if name != "fused":
        return Cached, name
    return (FusedOnCPU if model.device.type == "cpu" else Fused), name


def _reasons(model: GPT2, request: Request, name: EngineName) -> list[str]:
    """Return the reasons against an engine; only those against fused may build code."""
    is_cached = request.mode == "kv-cache"
    if name == "eager":
        return []
    if name == "fused" and is_cached:
        if model.device.type == "cpu":
            return cpu_step.unsupported_reasons(model, request)
        return fused.unsupported_reasons(model, request)
    if name == "fused":
        reasons = recompute.unsupported_reasons(model, request)
    else:
        reasons = [] if model.device.type == "cuda" else ["it needs a CUDA device"]
    specs = [model.attention, *([model.decode_attention] if is_cached else [])]
    return reasons + [
        f"{spec.name} cannot be captured in a CUDA graph" for spec in specs if not spec.cuda_graphs
    ]
