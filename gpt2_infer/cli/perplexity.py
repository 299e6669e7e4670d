"""gpt2-infer perplexity."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gpt2_infer.cli.console import show
from gpt2_infer.cli.options import POSITIVE, add_model_options

INPUT = (
    "UTF-8 text, .xz or plain, documents separated by a line <|endoftext|> (default: the bundled "
    "model's held-out books)"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("input", metavar="INPUT", type=Path, nargs="?", help=INPUT)
    add_model_options(parser)
    add("--backend", nargs="+", default=[], metavar="NAME", help="compared with NAIVE_PYTORCH")
    add(
        "--window",
        type=POSITIVE,
        metavar="N",
        help="tokens per pass (default: the model's maximum)",
    )
    add("--stride", type=POSITIVE, metavar="N", help="tokens from window to window (default: half)")
    add(
        "--max-tokens",
        type=POSITIVE,
        metavar="N",
        help="tokens of the text to score (default: all)",
    )
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from dataclasses import asdict

    from tabulate import tabulate
    from tqdm import tqdm

    from gpt2_infer import GPT2, perplexity

    model = GPT2.from_pretrained(
        arguments.model,
        revision=arguments.revision,
        device=arguments.device,
        dtype=arguments.dtype,
        attention=perplexity.BASELINE,
        random_weights=arguments.random_weights,
    )
    path = arguments.input or perplexity.HELD_OUT
    text = perplexity.read_text(path, model, max_tokens=arguments.max_tokens)
    window = model.config.n_positions if arguments.window is None else arguments.window
    stride = max(1, window // 2) if arguments.stride is None else arguments.stride
    with tqdm(unit="tok", disable=None) as bar:
        scores = perplexity.compare(
            model, arguments.backend, text, window=window, stride=stride, progress=bar.update
        )
    if arguments.json:
        facts = {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "input": path.name,
            "bytes": text.bytes,
            "window": window,
            "stride": stride,
            "scores": [
                {**asdict(s), "perplexity": s.perplexity, "standard_errors": s.standard_errors}
                for s in scores
            ],
        }
        show(json.dumps(facts, indent=2))
        return 0
    rows = [
        (
            s.backend,
            s.bits_per_byte,
            s.perplexity,
            f"{s.difference:+.2e}" if i else "",
            f"{s.standard_errors:+.1f}" if i else "",
        )
        for i, s in enumerate(scores)
    ]
    headers = ("backend", "bits per byte", "perplexity", "nats per token", "standard errors")
    show(tabulate(rows, headers, floatfmt=("", ".6f", ".5f", "", ""), disable_numparse=[3, 4]))
    print(
        f"{scores[0].tokens} tokens, {text.bytes} bytes of {path.name}; {arguments.dtype}, windows "
        f"of {window}, stride {stride}; the last two columns: difference from {scores[0].backend}",
        file=sys.stderr,
    )
    return 0
