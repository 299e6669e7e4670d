"""The prompt runs once and fills a static cache of keys and values; then every token runs alone."""

from __future__ import annotations

import torch

from gpt2_infer.engines.base import Engine, capture
from gpt2_infer.model import KVCache


class Cached(Engine):
    """Runs eagerly, or replays two captured graphs: of the prompts, and of a step."""

    def backend(self, step: int) -> str:
        """Return the name of what computes a step's attention."""
        return self.decode_attention if step else self.model.attention.name

    @property
    def decode_attention(self) -> str:
        """The name of what computes attention when decoding."""
        return self.model.decode_attention.name

    def warm_up(self) -> None:
        """Build the kernels, or capture the graphs."""
        self.cache = KVCache.allocate(self.model, len(self.rows), self.capacity)
        self.prompt_graph: torch.cuda.CUDAGraph | None = None
        self.step_graph: torch.cuda.CUDAGraph | None = None
        if self.name == "eager":
            for spec in (self.model.attention, self.model.decode_attention):
                spec.prepare(self.device.type)
            return
        self.prefill()
        # The fused engine takes a prompt's backend that cannot be captured.
        if self.model.attention.cuda_graphs:
            self.prompt_graph = capture(self.prefill)
        if self.last_length > self.longest:  # more than one token: there is something to decode
            self.prepare_decode()
            self.decode()
            self.step_graph = capture(self.decode, shared_with=self.prompt_graph)
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
        graph = self.step_graph if index else self.prompt_graph
        if graph is not None:
            graph.replay()
        elif index == 0:
            self.prefill()
        else:
            self.decode()
