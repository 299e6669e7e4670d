"""Generation requests, checked once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from gpt2_infer.config import GPT2Config
from gpt2_infer.errors import RequestError, check_integer, check_type
from gpt2_infer.sampling import Sampling
from gpt2_infer.tokenizer import Tokenizer

Mode = Literal["recompute", "kv-cache"]
EngineName = Literal["eager", "graph", "fused"]
MODES: tuple[Mode, ...] = get_args(Mode)
GUESSES = (1, 3, 7)  # with the newest token, as many as the fused engine takes rows
ENGINES = ("auto", *get_args(EngineName))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A generation request, checked against a model's configuration when it is made.

    Raises RequestError if such a model cannot meet it.
    """

    config: GPT2Config
    tokenizer: Tokenizer | None
    prompts: str | Sequence[str] | Sequence[Sequence[int]]
    max_new_tokens: int = 512
    mode: Mode = "recompute"
    sampling: Sampling = field(default_factory=Sampling)
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    engine: Literal["auto"] | EngineName = "auto"
    guesses: int = 0
    """Guesses of the next tokens that a pass may read, 0, 1, 3 or 7."""
    rows: list[list[int]] = field(init=False)
    """The prompts' token ids."""
    stops: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        check_integer("max-new-tokens", self.max_new_tokens, 1)
        check_type("ignore_eos", self.ignore_eos, bool)
        check_type("sampling", self.sampling, Sampling)
        check_type("stop", self.stop, Sequence)
        if self.engine not in ENGINES:
            raise RequestError(f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}")
        if self.config.unsupported_generation:
            raise RequestError(
                f"the checkpoint sets {', '.join(self.config.unsupported_generation)}, which is "
                "not supported: to generate without, remove it from generation_config.json (from "
                "config.json if there is no such file) in a local copy of the checkpoint"
            )
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise RequestError(f"stop strings must be non-empty texts, not {self.stop!r}")
        if stops and self.tokenizer is None:
            raise RequestError("stop strings need a model with a tokenizer")
        prompts = [self.prompts] if isinstance(self.prompts, str) else self.prompts
        rows = encode_prompts(self.tokenizer, prompts)
        longest, positions = max(map(len, rows)), self.config.n_positions
        needed = longest + self.max_new_tokens - 1  # nothing is computed from the last token
        if needed > positions:
            raise RequestError(
                f"{longest} prompt tokens and {self.max_new_tokens} new ones need {needed} "
                f"positions, but this model has {positions}: shorten the prompt or lower "
                "--max-new-tokens"
            )
        vocab_size = self.config.vocab_size
        outside = sorted({token for row in rows for token in row if not 0 <= token < vocab_size})
        if outside:
            raise RequestError(
                f"token ids {outside[:5]} are outside the vocabulary of {vocab_size}"
            )
        if self.guesses and (reasons := self._against_guesses(len(rows))):
            raise RequestError(f"speculation needs {', '.join(reasons)}")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "stops", stops)

    def _against_guesses(self, rows: int) -> list[str]:
        needs = {
            "1, 3 or 7 guesses": self.guesses in GUESSES,
            "a KV cache": self.mode == "kv-cache",
            "greedy sampling": self.sampling.is_greedy,
            "a single prompt": rows == 1,
            "the fused engine": self.engine in ("auto", "fused"),
        }
        return [need for need, is_met in needs.items() if not is_met]


def encode_prompts(
    tokenizer: Tokenizer | None, prompts: Sequence[str] | Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the token ids of each prompt; an empty text becomes <|endoftext|>.

    Raises RequestError for invalid prompts, for an empty list, for a text without a tokenizer, and
    for an empty text if the tokenizer has no end-of-text token.
    """
    if hasattr(prompts, "tolist"):  # true of tensors and arrays
        prompts = prompts.tolist()
    try:
        if any(isinstance(prompt, bytes | bytearray) for prompt in prompts):
            raise TypeError("bytes are neither")
        rows = [
            _encode(tokenizer, prompt)
            if isinstance(prompt, str)
            else [_token_id(token) for token in prompt]
            for prompt in prompts
        ]
    except TypeError as error:
        raise RequestError(f"a prompt must be a text or a list of token ids: {error}") from error
    if not rows:
        raise RequestError("there is no prompt")
    if not all(rows):
        raise RequestError("a list of token ids must not be empty")
    return rows


def _token_id(token: object) -> int:
    """Convert a token id from any library's integer type; raises TypeError for a bool."""
    if isinstance(token, bool):
        raise TypeError(f"{token} is not a token id")
    return operator.index(token)  # type: ignore[arg-type]


def _encode(tokenizer: Tokenizer | None, prompt: str) -> list[int]:
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: give the prompt as token ids")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not valid text: {error.reason}") from error
    try:
        ids = tokenizer.encode(prompt)
    except Exception as error:  # tokenizers raises bare ones: a word may have no token
        raise RequestError(f"the prompt {prompt[:40]!r} cannot be encoded: {error}") from error
    if ids:
        return ids
    if prompt:
        raise RequestError(f"the prompt {prompt[:40]!r} has no token that the tokenizer knows")
    if tokenizer.end_of_text is None:
        raise RequestError("the prompt is empty and there is no end-of-text token to begin with")
    return [tokenizer.end_of_text]
