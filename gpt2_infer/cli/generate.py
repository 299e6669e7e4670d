"""The command `gpt2-infer`, or `gpt2-infer generate`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_infer.cli.console import EXIT_INTERRUPTED, show, show_json
from gpt2_infer.cli.options import (
    DEFAULT_PROMPT,
    Former,
    add_model_options,
    add_sampling_options,
    add_text_options,
    make_sampling,
)
from gpt2_infer.cli.summary import format_report, make_report
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from gpt2_infer.model import GPT2
    from gpt2_infer.request import Request

BACKEND = (
    "see `gpt2-infer backends` (default: on cuda CUSTOM_CUDA if it is available and takes the "
    "model, else PYTORCH_SDPA_EFFICIENT_ATTENTION; PYTORCH_SDPA_FLASH_ATTENTION on cpu)"
)
DECODE_BACKEND = (
    "attention backend for decoding with --kv-cache (default: the given --backend if it has a "
    "decode kernel, else DECODE_SPLIT_KV_VERSION_1 on cuda, or NAIVE_PYTORCH without nvcc or if "
    "the model is not supported, and PYTORCH_SDPA_FLASH_ATTENTION on cpu)"
)
PROMPT = (
    "text to complete; repeatable; an empty one stands for GPT-2's <|endoftext|>, which starts a "
    f"document (default: {DEFAULT_PROMPT!r})"
)
PROMPT_FILE = "UTF-8 file with one prompt per line, or - for standard input; repeatable"
ENGINE = (
    "engine: eager launches kernels from Python, graph replays captured CUDA graphs, fused "
    "runs our own code: with --kv-cache whole steps, also in float32 on a CPU, else matrix "
    "products in float32 on a GPU; auto is the fastest that supports the request (default: "
    "%(default)s)"
)
KV_CACHE = (
    "cache keys and values; without it every token reruns the whole prefix, as in the case study"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model = parser.add_argument_group("model")
    add_model_options(model)
    add = model.add_argument
    add("--backend", metavar="NAME", help=f"attention backend; {BACKEND}")
    add("--decode-backend", metavar="NAME", help=DECODE_BACKEND)
    add = parser.add_argument_group("text").add_argument
    add("--prompt", action="append", metavar="TEXT", help=PROMPT)
    add("--prompt-file", action="append", metavar="FILE", help=PROMPT_FILE)
    add_text_options(add)
    add_sampling_options(parser)
    add = parser.add_argument_group("how").add_argument
    add("--kv-cache", action="store_true", help=KV_CACHE)
    add("--engine", default="auto", metavar="NAME", help=ENGINE)
    instead = "--engine eager"
    add("--no-cuda-graphs", action=Former, dest="engine", const="eager", instead=instead)
    add("--json", action="store_true", help="print one JSON object, not text and report")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    prompts = _read_prompts(arguments)
    if arguments.decode_backend and not arguments.kv_cache:
        raise RequestError("--decode-backend needs --kv-cache: without a cache nothing is decoded")

    from attention_kernels import ladder
    from gpt2_infer import generation

    sampling = make_sampling(arguments)
    attention, decode_attention = (
        None if name is None else ladder.resolve(name)
        for name in (arguments.backend, arguments.decode_backend)
    )
    started = time.perf_counter()
    model, request = load(
        arguments,
        attention=attention,
        decode_attention=decode_attention,
        seed=sampling.seed,
        request={
            "prompts": prompts,
            "max_new_tokens": arguments.max_new_tokens,
            "mode": "kv-cache" if arguments.kv_cache else "recompute",
            "sampling": sampling,
            "stop": arguments.stop,
            "ignore_eos": arguments.ignore_eos,
            "engine": arguments.engine,
        },
    )
    load_s = time.perf_counter() - started

    streams = not arguments.json and len(prompts) == 1
    if streams:
        show(prompts[0], end="")
    try:
        result = generation.run(
            model,
            request,
            on_text=(lambda _, piece: show(piece, end="")) if streams else None,
            progress=not streams and sys.stderr.isatty(),
        )
    finally:
        if streams:
            show()  # an error starts on a new line
    status = EXIT_INTERRUPTED if "interrupted" in result.finish_reasons else 0
    name = arguments.model + (f"@{arguments.revision}" if arguments.revision else "")
    if arguments.random_weights:
        name += " (random weights: the text means nothing)"
    report = make_report(model, result, name=name, load_s=load_s)
    if arguments.json:
        rows = zip(prompts, result.texts, result.finish_reasons, result.tokens, strict=True)
        keys = ("prompt", "text", "finish_reason", "tokens")
        texts = [dict(zip(keys, row, strict=True)) for row in rows]
        show_json({"report": report, "results": texts})
        return status
    if not streams:
        for i, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True), 1):
            show(f"--- prompt {i} of {len(prompts)}\n{prompt}{text}\n")
    print(format_report(report), file=sys.stderr)
    return status


def load(
    arguments: argparse.Namespace,
    *,
    request: dict[str, Any],
    attention: BackendSpec | None = None,
    decode_attention: BackendSpec | None = None,
    seed: int = 0,
) -> tuple[GPT2, Request]:
    """Return the model and the request; the request is checked before any weight is read."""
    from gpt2_infer.checkpoint import open_checkpoint, resolve_device, resolve_dtype
    from gpt2_infer.model import GPT2
    from gpt2_infer.request import Request

    device = resolve_device(arguments.device)
    checkpoint = open_checkpoint(
        arguments.model, revision=arguments.revision, random_weights=arguments.random_weights
    )
    checked = Request(config=checkpoint.config, tokenizer=checkpoint.tokenizer, **request)
    model = GPT2.from_checkpoint(
        checkpoint,
        device=device,
        dtype=resolve_dtype(arguments.dtype),
        attention=attention,
        decode_attention=decode_attention,
        products=arguments.products,
        seed=seed,
    )
    return model, checked


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the prompts given, or the default one; raises RequestError or OSError."""
    prompts = list(arguments.prompt or [])
    for name in arguments.prompt_file or []:
        if name == "-" and sys.stdin is None:
            raise RequestError("--prompt-file -: standard input is closed")
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8: byte {error.start} is not valid"
            raise RequestError(f"--prompt-file {name} {reason}") from error
        lines = [line for line in re.split(r"\r\n|\n|\r", text) if line.strip()]
        if not lines:
            raise RequestError(f"--prompt-file {name} contains no prompt")
        prompts += lines
    return prompts or [DEFAULT_PROMPT]
