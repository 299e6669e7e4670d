"""The command `gpt2-infer diverge`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, get_args

from cyclopts import Parameter

from gpt2_infer.cli.console import EXIT_FAILED
from gpt2_infer.cli.options import DEFAULT_PROMPT, HIDDEN, Count, Model

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from gpt2_infer.diverge import Divergence


def diverge(
    a: Annotated[str, Parameter(help="attention backend, version file (*.cu) or engine")],
    b: Annotated[str, Parameter(help="another of the same kind, or A again")],
    /,
    *,
    prompt: Annotated[str, Parameter(help="text to complete")] = DEFAULT_PROMPT,
    max_new_tokens: Annotated[Count, Parameter(help="maximum number of new tokens")] = 64,
    kv_cache: Annotated[bool, Parameter(help="generate with a KV cache")] = False,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
    live: Annotated[bool, HIDDEN] = False,
) -> Divergence:
    """Find the first step in which the texts of two backends or engines differ: a tie or a bug.

    A tie means that rounding explains the difference. Equal texts rule out no bug; `untried` says
    what they did not exercise. Model and kernels run in one process. Raises RequestError,
    UnsupportedError, and what loading the model raises.
    """
    from attention_kernels import ladder
    from gpt2_infer.diverge import diverge as find
    from gpt2_infer.request import EngineName

    sides: tuple[str | BackendSpec, str | BackendSpec] = a, b
    attention = None
    if not {a, b} & {*get_args(EngineName)}:
        attention, other = ladder.resolve_all([a, b])
        sides = attention, other
    request = {"prompts": [prompt], "max_new_tokens": max_new_tokens}
    loaded, checked = model.load(request=request, attention=attention)
    (row,) = checked.rows
    how: dict[str, Any] = {"mode": "kv-cache" if kv_cache else "recompute"}
    how["progress"] = live and sys.stderr.isatty()
    return find(loaded, *sides, row, max_new_tokens=max_new_tokens, **how)


def text(found: Divergence, **_: object) -> str:
    """Return the report."""
    return str(found)


def exit_status(found: Divergence) -> int:
    """Return whether there is a bug."""
    return 0 if found.passed else EXIT_FAILED
