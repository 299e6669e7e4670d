"""gpt2-infer diverge."""

from __future__ import annotations

import argparse
import json
import sys

from gpt2_infer.cli.console import EXIT_FAILED, show
from gpt2_infer.cli.generate import load
from gpt2_infer.cli.options import DEFAULT_PROMPT, add_model_options
from gpt2_infer.errors import RequestError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("a", metavar="A", help="attention backend, or a version file, *.cu")
    add("b", metavar="B", help="attention backend, or the same again")
    add_model_options(parser)
    add("--prompt", action="append", metavar="TEXT", help=f"one only; default: {DEFAULT_PROMPT!r}")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--kv-cache", action="store_true", help="compare texts with a cache")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    prompts = arguments.prompt or [DEFAULT_PROMPT]
    if len(prompts) > 1:
        raise RequestError(f"diverge takes one --prompt, not {len(prompts)}")

    from attention_kernels import ladder
    from gpt2_infer.bench.diverge import diverge

    a, b = ladder.resolve(arguments.a), ladder.resolve(arguments.b)
    request = {"prompts": prompts, "max_new_tokens": arguments.max_new_tokens}
    model, checked = load(arguments, request=request, attention=a)
    result = diverge(
        model,
        a,
        b,
        checked.rows[0],
        max_new_tokens=arguments.max_new_tokens,
        mode="kv-cache" if arguments.kv_cache else "recompute",
        progress=sys.stderr.isatty(),
    )
    show(json.dumps(result.to_json(), indent=2) if arguments.json else result)
    return 0 if result.passed else EXIT_FAILED
