"""The command `gpt2-infer`, or `gpt2-infer generate`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gpt2_infer.cli.console import EXIT_INTERRUPTED, show
from gpt2_infer.cli.options import DEFAULT_PROMPT, HIDDEN, Model, Text
from gpt2_infer.cli.versions import adapted
from gpt2_infer.errors import RequestError


@dataclass(frozen=True)
class Generated:
    """What ran and how long it took, and each prompt's text."""

    report: dict[str, Any]
    results: list[dict[str, Any]]
    """The prompt, text, finish_reason and tokens of each prompt."""


def generate(
    *,
    prompts: Annotated[tuple[str, ...], Parameter(name="--prompt")] = (),
    prompt_files: Annotated[
        tuple[str, ...], Parameter(name="--prompt-file", allow_leading_hyphen=True)
    ] = (),
    backend: str | None = None,
    entry: str | None = None,
    decode_backend: str | None = None,
    kv_cache: bool = False,
    engine: str = "auto",
    speculate: int = 0,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
    text: Annotated[Text, Parameter(name="*", group="Text")] = Text(),
    live: Annotated[bool, HIDDEN] = False,
) -> Generated:
    """Generate text with GPT-2, using the attention backend of your choice.

    Raises RequestError, OSError, and what loading the model and generating raise.

    Args:
        prompts: text to complete; repeatable; an empty one stands for GPT-2's <|endoftext|>,
            which starts a document (default: "Hello, I'm a language model,")
        prompt_files: UTF-8 file with one prompt per line, or - for standard input; repeatable
        backend: attention backend; see `gpt2-infer backends` (default: on cuda CUSTOM_CUDA if
            it is available and takes the model, else PYTORCH_SDPA_EFFICIENT_ATTENTION;
            PYTORCH_SDPA_FLASH_ATTENTION on cpu)
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        decode_backend: attention backend for decoding with --kv-cache (default: the given
            --backend if it has a decode kernel, else DECODE_SPLIT_KV_VERSION_1 on cuda, or
            NAIVE_PYTORCH without nvcc or if the model is not supported, and
            PYTORCH_SDPA_FLASH_ATTENTION on cpu)
        kv_cache: cache keys and values; without it every token reruns the whole prefix, as in
            the case study
        engine: engine: eager launches kernels from Python, graph replays captured CUDA graphs,
            fused runs our own code: with --kv-cache whole steps, also in float32 on a CPU, else
            matrix products in float32 on a GPU; auto is the fastest that supports the request
        speculate: with --kv-cache, guess up to 1, 3 or 7 of the next tokens from what the text
            repeats, on a GPU, for one prompt and temperature 0; the text stays the same
        model: the model
        text: where a text ends, and how tokens are chosen
        live: print the text of a single prompt as it is generated, and the report to standard error
    """
    prompts = (*prompts, *_read(prompt_files)) or (DEFAULT_PROMPT,)
    if decode_backend and not kv_cache:
        raise RequestError("--decode-backend needs --kv-cache: without a cache nothing is decoded")

    from attention_kernels import ladder
    from gpt2_infer import generation
    from gpt2_infer.summary import format_report, make_report

    settings = text.settings(model)
    if entry is not None:
        (backend,) = adapted([backend or ""], entry)
    mode = "kv-cache" if kv_cache else "recompute"
    started = time.perf_counter()
    loaded, request = model.load(
        {"prompts": prompts, "mode": mode, "engine": engine, "guesses": speculate, **settings},
        attention=ladder.resolve(backend) if backend else None,
        decode_attention=ladder.resolve(decode_backend) if decode_backend else None,
        seed=settings["sampling"].seed,
    )
    load_s = time.perf_counter() - started
    streams = live and len(prompts) == 1
    if streams:
        show(prompts[0], end="")
    try:
        result = generation.run(
            loaded,
            request,
            on_text=(lambda _, piece: show(piece, end="")) if streams else None,
            progress=live and not streams and sys.stderr.isatty(),
        )
    finally:
        if streams:
            show()  # an error starts on a new line
    name = model.model + (f"@{model.revision}" if model.revision else "")
    if model.random_weights:
        name += " (random weights: the text means nothing)"
    rows = zip(prompts, result.texts, result.finish_reasons, result.tokens, strict=True)
    keys = ("prompt", "text", "finish_reason", "tokens")
    report = make_report(loaded, result, name=name, load_s=load_s)
    generated = Generated(report, [dict(zip(keys, row, strict=True)) for row in rows])
    if live:
        for i, row in enumerate(generated.results if not streams else (), 1):
            show(f"--- prompt {i} of {len(prompts)}\n{row['prompt']}{row['text']}\n")
        print(format_report(report), file=sys.stderr)
    return generated


def exit_status(generated: Generated) -> int:
    """Return whether it was interrupted."""
    return EXIT_INTERRUPTED if "interrupted" in generated.report["finish_reasons"] else 0


def _read(names: Sequence[str]) -> Iterator[str]:
    """Yield the prompts in files; raises RequestError or OSError."""
    for name in names:
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
        yield from lines
