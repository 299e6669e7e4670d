"""The command `gpt2-infer perplexity`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from gpt2_infer.cli.console import show, show_json
from gpt2_infer.cli.options import POSITIVE, add_model_options

INPUT = (
    "UTF-8 text, .xz or plain, documents separated by a line <|endoftext|> (default: the bundled "
    "model's held-out books)"
)
BACKENDS = "attention backends to compare with NAIVE_PYTORCH"
WINDOW = "tokens per forward pass (default: the model's maximum)"
STRIDE = "tokens between the starts of two windows (default: half a window)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("input", metavar="INPUT", type=Path, nargs="?", help=INPUT)
    add_model_options(parser)
    add("--backend", nargs="+", default=[], metavar="NAME", help=BACKENDS)
    add("--window", type=POSITIVE, metavar="N", help=WINDOW)
    add("--stride", type=POSITIVE, metavar="N", help=STRIDE)
    add("--max-tokens", type=POSITIVE, metavar="N", help="tokens to score (default: all)")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from tabulate import tabulate
    from tqdm import tqdm

    from gpt2_infer import GPT2, perplexity

    model = GPT2.from_pretrained(
        arguments.model,
        revision=arguments.revision,
        device=arguments.device,
        dtype=arguments.dtype,
        products=arguments.products,
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
            "products": arguments.products,
            "input": path.name,
            "bytes": text.bytes,
            "window": window,
            "stride": stride,
            "scores": [
                dataclasses.asdict(s)
                | {"perplexity": s.perplexity, "standard_errors": s.standard_errors}
                for s in scores
            ],
        }
        show_json(facts)
        return 0
    table = [("backend", "bits per byte", "perplexity", "nats per token", "standard errors")]
    for i, s in enumerate(scores):
        differences = (f"{s.difference:+.2e}", f"{s.standard_errors:+.1f}") if i else ("", "")
        table.append((s.backend, f"{s.bits_per_byte:.6f}", f"{s.perplexity:.5f}", *differences))
    align = ("left", *["right"] * 4)
    show(tabulate(table, "firstrow", "plain", disable_numparse=True, colalign=align))
    print(
        f"{scores[0].tokens} tokens, {text.bytes} bytes of {path.name}; {arguments.dtype}, windows "
        f"of {window}, stride {stride}; the last two columns: difference from {scores[0].backend}",
        file=sys.stderr,
    )
    return 0
