"""The prompt runs once and fills a static cache of keys and values; then every token runs alone."""

from __future__ import annotations

import torch

from gpt2_infer.engines.base import Engine, capture
from gpt2_infer.model import KVCache


class Cached(Engine):
    """Decodes eagerly, or replays one captured graph."""

    def backend(self, step: int) -> str:
        """Return the name of what computes a step's attention."""
        return self.decode_attention if step else self.model.attention.name

    @property
    def decode_attention(self) -> str:
        """The name of what computes attention when decoding."""
        return self.model.decode_attention.name

    def warm_up(self) -> None:
        """Load the kernels; capture a step."""
        self.cache = KVCache.allocate(self.model, len(self.rows), self.capacity)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.prefill()
        if self.last_length > self.longest:  # more than one token: there is something to decode
            self.prepare_decode()
            self.decode()
            if self.name != "eager":
                self.graph = capture(self.decode)
        self.reset()

    def prepare_decode(self) -> None:
        """Do what the first decode() needs."""

    def prefill(self) -> None:
        """Run the prompts and accept their first token."""
        seqlens = None if self.same_length else self.lengths
        tokens = self.tokens[:, : self.longest]
        self.accept(self.model(tokens, seqlens=seqlens, cache=self.cache)[:, 0])

    def decode(self) -> None:
        """Run the newest token of each row and accept the next."""
        self.accept(self.model.decode(self.newest.clamp(min=0), self.cache))

    def step(self, index: int) -> None:
        """Enqueue a step."""
        if index == 0:
            self.prefill()
        elif self.graph is not None:
            self.graph.replay()
        else:
            self.decode()
