"""The fused engine, which also reads guesses of the next tokens: greedy text in fewer steps.

A guess is what followed the last few tokens when they last occurred. A pass with guesses takes
longer than one without, so they are made only while they would have been right. Either kind of pass
computes the same bits for a row, so the text does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch

from gpt2_infer.engines import fused
from gpt2_infer.engines.fused import Fused, State, Step
from gpt2_infer.model import GPT2
from gpt2_infer.request import EngineName, Request

GRAM = 3  # tokens that must have occurred before
# Guesses are made if, of the last RECENT tokens, RIGHT could have been guessed.
RECENT, RIGHT = 8, 4
BURST = 4  # passes without guesses between two looks of the host
UNWRITTEN = -2


class Text:
    """A text as the host knows it, and how many of its last tokens could have been guessed."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # where each gram ended last
        self._right = deque[bool](maxlen=RECENT)
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            gram, last = tuple(self.tokens[-GRAM:]), len(self.tokens) - 1
            self._right.append(gram in self._ends and self.tokens[self._ends[gram] + 1] == token)
            self._ends[gram] = last
            self.tokens.append(token)

    @property
    def repeats(self) -> bool:
        """Whether guesses pay."""
        return sum(self._right) >= RIGHT


class Speculative(Fused):
    """Decodes one row greedily, in passes that read the newest token alone or also guesses."""

    guess_step: Step | None = None
    guess_graph: torch.cuda.CUDAGraph | None = None

    def __init__(self, model: GPT2, request: Request, name: EngineName) -> None:
        super().__init__(model, request, name)
        self.read = torch.zeros(self.most_rows(request), dtype=torch.long, device=self.device)
        self.newest = self.read[:1]
        self.passes = 0  # after the prompt

    @staticmethod
    def most_rows(request: Request) -> int:
        """Return the most rows of a pass."""
        return 1 + request.guesses

    def reset(self) -> None:
        """Discard all new tokens."""
        super().reset()
        self.tokens[:, self.longest :] = UNWRITTEN
        self.passes = 0

    def prepare_decode(self) -> None:
        """Build the kernels and pack the weights."""
        super().prepare_decode()
        shape = replace(fused.shape_on(self.model, len(self.read)), has_guesses=True)
        state = State(self.cache, self.read, self.tokens, self.lengths)
        self.guess_step = Step(self.model, state, True, shape=shape)

    def warm_up(self) -> None:
        """Build the kernels, or capture the missing graphs."""
        super().warm_up()
        if self.guess_graph is None and self.last_length - self.longest >= len(self.read):
            assert self.guess_step is not None
            self.prefill()
            self.guess_step()
            self.guess_graph = self.record(self.guess_step)
            self.reset()

    def enqueue(self, most: int, *, guess: bool) -> int:
        """Enqueue a pass with guesses, or several without; return how many tokens may be new.

        most: the limit of new tokens.
        """
        if guess and len(self.read) <= most:
            assert self.guess_graph is not None
            self.guess_graph.replay()
            self.passes += 1
            return len(self.read)
        count = min(BURST, most)
        for index in range(1, 1 + count):
            self.step(index)
        self.passes += count
        return count
