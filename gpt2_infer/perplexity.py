"""Perplexity of a text, and the effect of an attention backend's rounding on it."""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_kernels import BackendSpec
from gpt2_infer.errors import NotFiniteError, RequestError
from gpt2_infer.files import read_file
from gpt2_infer.model import GPT2
from gpt2_infer.tokenizer import END_OF_TEXT

HELD_OUT = Path(__file__).parent / "demo_model" / "held_out.txt.xz"
BASELINE = "NAIVE_PYTORCH"
ROWS = 256  # number of rows of logits converted to float64 at a time


@dataclass(frozen=True)
class Text:
    """A tokenized text."""

    ids: list[int]
    """The documents' tokens, with an end-of-text token before each document."""
    bytes: int
    """The text's size in UTF-8, without the separators."""

    def __post_init__(self) -> None:
        if len(self.ids) < 3 or not self.bytes:  # a single prediction has no standard error
            raise RequestError("the text has fewer than two tokens to predict")


@dataclass(frozen=True)
class Score:
    """How well a model predicted a text with one backend."""

    backend: str
    tokens: int
    """The number of predicted tokens."""
    nats: float
    """The sum of the predicted tokens' negative log-likelihoods."""
    bits_per_byte: float
    difference: float
    """The mean difference from NAIVE_PYTORCH in the same dtype, in nats per token."""
    standard_error: float
    """The standard error of the difference, over tokens."""
    perplexity: float
    """The exponential of the nats per token."""
    standard_errors: float
    """The difference in units of its standard error; 0 if that is 0."""


def read_text(path: Path, model: GPT2, *, max_tokens: int | None = None) -> Text:
    """Read UTF-8, .xz or plain, with documents separated by a line `<|endoftext|>`.

    max_tokens: the most tokens to predict; only their bytes are counted.
    Raises RequestError for a file that is not text, or a model without an end-of-text token.
    """
    try:
        data = read_file(path)
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {error}") from error
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.end_of_text is None:
        raise RequestError("this model has no end-of-text token to begin a document with")
    ids: list[int] = []
    size = 0
    for document in text.replace("\r\n", "\n").split(f"\n{END_OF_TEXT}\n"):
        if not document:
            continue
        kept, new = document, tokenizer.encode(document)
        if max_tokens is not None and len(ids) + len(new) > max_tokens:
            new = new[: max(0, max_tokens - len(ids))]
            kept = tokenizer.decode(new)
        ids += [tokenizer.end_of_text, *new]
        size += len(kept.encode("utf-8"))
        if max_tokens is not None and len(ids) > max_tokens:
            break
    return Text(ids, size)


@torch.inference_mode()
def token_nats(
    model: GPT2,
    ids: Sequence[int],
    *,
    window: int,
    stride: int,
    progress: Callable[[int], object] | None = None,
) -> torch.Tensor:
    """Return the negative log-likelihood of every token but the first, float64, on the CPU.

    A window of `window` tokens advances by `stride`: each token is predicted once, from at least
    window - stride tokens before it, or from all of them near the start of the text. progress: is
    called with the number of tokens just scored. Raises NotFiniteError.
    """
    positions = model.config.n_positions
    if not 1 <= stride <= window <= positions:
        raise RequestError(
            f"stride {stride} and window {window} must be 1 <= stride <= window <= {positions}, "
            "the model's positions"
        )
    stream = torch.tensor(ids, device=model.device)
    nats = torch.empty(len(ids) - 1, dtype=torch.float64, device="cpu")
    done = 0
    while done < len(nats):
        # The first window has no context to keep.
        first = min(len(nats), done + (stride if done else window))
        begin = max(0, first - window)
        # Short windows are rows of one forward pass, which is no larger than the longest window.
        rows = max(1, min((len(nats) - done) // stride, positions // window)) if done else 1
        end = first + (rows - 1) * stride
        kept = torch.arange(done - begin, first - begin, device=model.device)
        windows = stream[begin:end].unfold(0, first - begin, stride)
        logits = model(windows, logits_to_keep=kept).flatten(0, 1)
        for part in range(0, len(logits), ROWS):
            wide = logits[part : part + ROWS].double()
            targets = stream[1 + done + part :][: len(wide)]
            losses = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
            nats[done + part :][: len(wide)] = losses.cpu()
        if not nats[done:end].isfinite().all():
            raise NotFiniteError(
                f"with attention backend {model.attention.name} tokens {done + 1} to {end} have no "
                "finite likelihood"
            )
        if progress is not None:
            progress(end - done)
        done = end
    return nats


def compare(
    model: GPT2,
    backends: Sequence[str | BackendSpec],
    text: Text,
    *,
    window: int,
    stride: int,
    progress: Callable[[int], object] | None = None,
) -> list[Score]:
    """Score NAIVE_PYTORCH, then each backend against it; see token_nats()."""
    named = [model.with_attention(name) for name in (BASELINE, *backends)]
    models = {each.attention.name: each for each in named}
    for each in models.values():
        each.check_backends()  # check all backends before the first is scored
    scores: list[Score] = []
    baseline: torch.Tensor | None = None
    for name, each in models.items():
        nats = token_nats(each, text.ids, window=window, stride=stride, progress=progress)
        baseline = nats if baseline is None else baseline
        apart = nats - baseline
        total, count = nats.sum().item(), len(nats)
        difference, standard_error = apart.mean().item(), apart.std().item() / count**0.5
        score = Score(
            backend=name,
            tokens=count,
            nats=total,
            bits_per_byte=total / math.log(2) / text.bytes,
            difference=difference,
            standard_error=standard_error,
            perplexity=math.exp(total / count),
            standard_errors=difference / standard_error if standard_error else 0.0,
        )
        scores.append(score)
    return scores
