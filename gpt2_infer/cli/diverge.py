"""The command `gpt2-infer diverge`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, get_args

from gpt2_infer.cli.console import EXIT_FAILED, show, show_json
from gpt2_infer.cli.generate import load
from gpt2_infer.cli.options import DEFAULT_PROMPT, MAX_NEW_TOKENS, POSITIVE, add_model_options
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from gpt2_infer.diverge import Divergence
    from gpt2_infer.request import Mode

PROMPT = f"text to complete, only one (default: {DEFAULT_PROMPT!r})"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("a", metavar="A", help="attention backend, version file (*.cu) or engine")
    add("b", metavar="B", help="another of the same kind, or A again")
    add_model_options(parser)
    add("--prompt", action="append", metavar="TEXT", help=PROMPT)
    add("--max-new-tokens", type=POSITIVE, default=64, metavar="N", help=MAX_NEW_TOKENS)
    add("--kv-cache", action="store_true", help="generate with a KV cache")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    result = find(arguments)
    if arguments.json:
        show_json(result.to_json())
    else:
        show(result)
    return 0 if result.passed else EXIT_FAILED


def find(arguments: argparse.Namespace) -> Divergence:
    """Return where two backends or engines part, for the options of the command.

    Raises RequestError, UnsupportedError, and what loading the model raises.
    """
    prompts = arguments.prompt or [DEFAULT_PROMPT]
    if len(prompts) > 1:
        raise RequestError(f"diverge takes one --prompt, not {len(prompts)}")

    from attention_kernels import ladder
    from gpt2_infer.diverge import diverge
    from gpt2_infer.request import EngineName

    a, b = arguments.a, arguments.b
    attention = None
    if not {a, b} & {*get_args(EngineName)}:
        a, b = ladder.resolve_all([a, b])
        attention = a
    mode: Mode = "kv-cache" if arguments.kv_cache else "recompute"
    new_tokens = arguments.max_new_tokens
    request = {"prompts": prompts, "max_new_tokens": new_tokens}
    model, checked = load(arguments, request=request, attention=attention)
    (prompt,) = checked.rows
    progress = sys.stderr.isatty()
    return diverge(model, a, b, prompt, max_new_tokens=new_tokens, mode=mode, progress=progress)
