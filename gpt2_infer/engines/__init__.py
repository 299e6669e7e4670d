"""Engines: how steps run, eagerly, in captured CUDA graphs, or fused in our own kernels."""

from __future__ import annotations

from collections.abc import Callable

from gpt2_infer.engines.base import Engine, key_of, room
from gpt2_infer.engines.cached import Cached
from gpt2_infer.engines.cpu_step import Emulated, FusedOnCPU
from gpt2_infer.engines.fused import DECODE_ATTENTION, Fused, slot_of
from gpt2_infer.engines.recompute import Recompute
from gpt2_infer.engines.speculative import Speculative
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
    return _make(model, request, *_choose(model, request))


def lend_engine(model: GPT2, request: Request) -> tuple[Engine, Callable[[], None]]:
    """Return an engine, cached by an earlier call if possible, and a function that caches it.

    Eager engines and those of a CPU, which are made quickly, are not cached. Raises what
    make_engine() raises.
    """
    kind, name = _choose(model, request)

    def begin(engine: Engine) -> None:
        engine.clear()
        engine.begin(model, request)

    most = 0 if name == "eager" else room(model.device)
    # One engine can serve all requests of the same key in turn.
    sizes = len(kind.padded_rows(request)), kind.needed(model, request, name)
    key = kind, name, *sizes, *key_of(model, request)
    return model.prepared.lend(key, lambda: _make(model, request, kind, name), begin, most)


def _make(model: GPT2, request: Request, kind: type[Engine], name: EngineName) -> Engine:
    if kind is Cached or slot_of(model):
        model.check_backends(decode=True)  # fail now, not after a long prefill
    return kind(model, request, name)


def _choose(model: GPT2, request: Request) -> tuple[type[Engine], EngineName]:
    names = FASTEST_FIRST if request.engine == "auto" else (request.engine,)
    if request.guesses:
        names = ("fused",)
    for name in names:
        kind = _kind(model, request, name)
        if not (reasons := kind.refusals(model, request, name)):
            return kind, name
    raise RequestError(f"the {name} engine does not support this: {'; '.join(reasons)}")


def _kind(model: GPT2, request: Request, name: EngineName) -> type[Engine]:
    if request.mode == "recompute":
        return Recompute
    if name != "fused":
        return Cached
    if request.guesses:
        return Speculative
    if model.device.type != "cpu":
        return Fused
    return Emulated if slot_of(model) else FusedOnCPU
