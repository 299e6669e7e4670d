"""The command `gpt2-infer perplexity`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gpt2_infer.cli.options import Count, Model, Names

if TYPE_CHECKING:
    from gpt2_infer.perplexity import Score


def perplexity(
    path: Annotated[Path | None, Parameter(name="INPUT")] = None,
    /,
    *,
    backends: Annotated[Names, Parameter(name="--backend")] = (),
    window: Count | None = None,
    stride: Count | None = None,
    max_tokens: Count | None = None,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
) -> list[Score]:
    """Score backends by how well the model predicts a text.

    Raises the errors of GPT2.from_pretrained(), perplexity.read_text() and perplexity.compare().

    Args:
        path: UTF-8 text, .xz or plain, documents separated by a line <|endoftext|> (default:
            the bundled model's held-out books)
        backends: attention backends to compare with NAIVE_PYTORCH
        window: tokens per forward pass (default: the model's maximum)
        stride: tokens between the starts of two windows (default: half a window)
        max_tokens: tokens to score (default: all)
        model: the model
    """
    from tqdm import tqdm

    from gpt2_infer import GPT2
    from gpt2_infer import perplexity as scoring

    options = dataclasses.asdict(model)
    loaded = GPT2.from_pretrained(options.pop("model"), attention=scoring.BASELINE, **options)
    text = scoring.read_text(path or scoring.HELD_OUT, loaded, max_tokens=max_tokens)
    window = window or loaded.config.n_positions
    stride = stride or max(1, window // 2)
    with tqdm(unit="tok", disable=None) as bar:
        return scoring.compare(
            loaded, backends, text, window=window, stride=stride, progress=bar.update
        )


def text(scores: list[Score], **_: object) -> str:
    """Return a table, and below it how many tokens were scored."""
    from tabulate import tabulate

    table = [("backend", "bits per byte", "perplexity", "nats per token", "standard errors")]
    for i, s in enumerate(scores):
        differences = (f"{s.difference:+.2e}", f"{s.standard_errors:+.1f}") if i else ("", "")
        table.append((s.backend, f"{s.bits_per_byte:.6f}", f"{s.perplexity:.5f}", *differences))
    align = ("left", *["right"] * 4)
    lines = tabulate(table, "firstrow", "plain", disable_numparse=True, colalign=align)
    first = scores[0]
    return f"{lines}\n{first.tokens} tokens; the last two columns: difference from {first.backend}"
