"""The command `gpt2-infer perplexity`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gpt2_infer.cli.options import MANY, Count, Model

if TYPE_CHECKING:
    from gpt2_infer.perplexity import Score

INPUT = (
    "UTF-8 text, .xz or plain, documents separated by a line <|endoftext|> (default: the bundled "
    "model's held-out books)"
)
BACKENDS = "attention backends to compare with NAIVE_PYTORCH"
WINDOW = "tokens per forward pass (default: the model's maximum)"
STRIDE = "tokens between the starts of two windows (default: half a window)"


@dataclass(frozen=True)
class Scores:
    """The score of each backend, NAIVE_PYTORCH's first, and how it was computed."""

    model: str
    dtype: str
    products: str
    input: str
    bytes: int
    window: int
    stride: int
    scores: list[Score]

    def to_json(self) -> dict[str, Any]:
        """Return every field, and each score's perplexity and standard errors."""
        value = dataclasses.asdict(self)
        for row, score in zip(value["scores"], self.scores, strict=True):
            row |= {"perplexity": score.perplexity, "standard_errors": score.standard_errors}
        return value


def perplexity(
    path: Annotated[Path | None, Parameter(name="INPUT", help=INPUT)] = None,
    /,
    *,
    backends: Annotated[tuple[str, ...], MANY, Parameter(name="--backend", help=BACKENDS)] = (),
    window: Annotated[Count | None, Parameter(help=WINDOW)] = None,
    stride: Annotated[Count | None, Parameter(help=STRIDE)] = None,
    max_tokens: Annotated[Count | None, Parameter(help="tokens to score (default: all)")] = None,
    model: Annotated[Model, Parameter(name="*", group="Model")] = Model(),
) -> Scores:
    """Score backends by how well the model predicts a text.

    Raises the errors of GPT2.from_pretrained(), perplexity.read_text() and perplexity.compare().
    """
    from tqdm import tqdm

    from gpt2_infer import GPT2
    from gpt2_infer import perplexity as scoring

    options = dataclasses.asdict(model)
    loaded = GPT2.from_pretrained(options.pop("model"), attention=scoring.BASELINE, **options)
    path = path or scoring.HELD_OUT
    text = scoring.read_text(path, loaded, max_tokens=max_tokens)
    window = window or loaded.config.n_positions
    stride = stride or max(1, window // 2)
    with tqdm(unit="tok", disable=None) as bar:
        scores = scoring.compare(
            loaded, backends, text, window=window, stride=stride, progress=bar.update
        )
    facts = (model.model, model.dtype, model.products, path.name, text.bytes, window, stride)
    return Scores(*facts, scores)


def text(found: Scores, **_: object) -> str:
    """Return a table, and below it what was scored."""
    from tabulate import tabulate

    table = [("backend", "bits per byte", "perplexity", "nats per token", "standard errors")]
    for i, s in enumerate(found.scores):
        differences = (f"{s.difference:+.2e}", f"{s.standard_errors:+.1f}") if i else ("", "")
        table.append((s.backend, f"{s.bits_per_byte:.6f}", f"{s.perplexity:.5f}", *differences))
    align = ("left", *["right"] * 4)
    lines = tabulate(table, "firstrow", "plain", disable_numparse=True, colalign=align)
    first = found.scores[0]
    return (
        f"{lines}\n{first.tokens} tokens, {found.bytes} bytes of {found.input}; {found.dtype}, "
        f"windows of {found.window}, stride {found.stride}; the last two columns: difference from "
        f"{first.backend}"
    )
