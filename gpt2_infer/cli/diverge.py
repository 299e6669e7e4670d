"""The command `gpt2-infer diverge`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, get_args

from cyclopts import Parameter

from gpt2_infer.cli.options import DEFAULT_PROMPT, HIDDEN, Count, Model
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from gpt2_infer.diverge import Divergence


def diverge(
    a: str,
    b: str,
    /,
    *,
    prompt: str = DEFAULT_PROMPT,
    max_new_tokens: Count = 64,
    kv_cache: bool = False,
    decode_backend: str | None = None,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
    live: Annotated[bool, HIDDEN] = False,
) -> Divergence:
    """Find the first step in which the texts of two backends or engines differ: a tie or a bug.

    A tie means that rounding explains the difference. Equal texts rule out no bug; `untried` says
    what they did not exercise. Model and kernels run in one process. Raises RequestError,
    UnsupportedError, and what loading the model raises.

    Args:
        a: attention backend, version file (*.cu) or engine
        b: another of the same kind, or A again
        prompt: text to complete
        max_new_tokens: maximum number of new tokens
        kv_cache: generate with a KV cache
        decode_backend: attention of two engines with --kv-cache, such as a slot's file, *.cuh
        model: the model
        live: show progress
    """
    from attention_kernels import ladder
    from gpt2_infer.diverge import diverge as find
    from gpt2_infer.request import EngineName

    first: str | BackendSpec = a
    second: str | BackendSpec = b
    has_engines = bool({a, b} & {*get_args(EngineName)})
    if decode_backend and not (has_engines and kv_cache):
        raise RequestError("--decode-backend needs --kv-cache and two engines")
    if not has_engines:
        first, second = ladder.resolve_all([a, b])
    loaded, checked = model.load(
        {"prompts": [prompt], "max_new_tokens": max_new_tokens}, decode_attention=decode_backend
    )
    return find(
        loaded,
        first,
        second,
        checked.rows[0],
        max_new_tokens=max_new_tokens,
        mode="kv-cache" if kv_cache else "recompute",
        progress=live and sys.stderr.isatty(),
    )


def text(divergence: Divergence, **_: object) -> str:
    """Return the report."""
    return str(divergence)
