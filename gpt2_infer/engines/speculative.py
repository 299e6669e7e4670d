"""The fused engine, which also reads guesses of the next tokens: greedy text in fewer steps.

A guess is what followed the last few tokens when they last occurred. A pass with guesses takes
longer than one without, so they are made only while enough of them would have been right. Either
kind of pass computes the same bits for a row, so the text does not change.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpt2_infer.engines import fused
from gpt2_infer.engines.fused import Fused, State, Step
from gpt2_infer.model import GPT2
from gpt2_infer.request import EngineName, Request

GRAM = 2  # tokens that must have occurred before
# Guesses are made if, of the last RECENT tokens, RIGHT could have been guessed.
RECENT, RIGHT = 16, 4
BURST = 8  # passes without guesses between two looks of the host
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
    """Decodes one row greedily, in passes that read the newest token alone or also guesses.

    A graph holds what the device does between two looks of the host, and a copy of all tokens for
    the host, to one of two places in turn.
    """

    guess_step: Step | None = None

    def __init__(self, model: GPT2, request: Request, name: EngineName) -> None:
        super().__init__(model, request, name)
        self.read = torch.zeros(self.most_rows(request), dtype=torch.long, device=self.device)
        self.newest = self.read[:1]
        pins = self.device.type == "cuda"
        self.seen = [
            torch.empty(self.tokens.shape, dtype=torch.long, pin_memory=pins) for _ in range(2)
        ]
        self.graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        self.passes = 0  # after the prompt, up to the last token that counts

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
        for guess, most in ((False, BURST), (True, len(self.read))):
            is_needed = self.last_length >= self.longest + most
            if not is_needed or (guess, 0) in self.graphs:
                continue
            assert self.guess_step is not None
            if guess:
                self.prefill()
                self.guess_step()
            passes = [self.guess_step] if guess else [self.decode] * BURST
            for place, seen in enumerate(self.seen):
                self.graphs[guess, place] = self.record(functools.partial(self._look, passes, seen))
            self.reset()

    def _look(self, passes: Sequence[Callable[[], None]], seen: Tensor) -> None:
        for run in passes:
            run()
        seen.copy_(self.tokens, non_blocking=True)

    def enqueue(self, look: int, most: int, *, guess: bool) -> tuple[int, int]:
        """Enqueue what a look sees, passes without guesses or one with.

        Returns its most new tokens, and its passes after the prompt. look: its number; the first
        sees the prompt's token. most: the limit of new tokens. Until the next look but one,
        seen[look % 2] then has all tokens, and UNWRITTEN after them.
        """
        place = look % 2
        full = len(self.read) if guess else BURST
        if look > 0 and full <= most:
            self.graphs[guess, place].replay()
            return full, 1 if guess else BURST
        count = min(BURST, most) if look > 0 else 1
        passes = [functools.partial(self.step, min(look, 1))] * count
        self._look(passes, self.seen[place])
        return count, count if look > 0 else 0
