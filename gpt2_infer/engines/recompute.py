"""The case study's workload: every token runs the whole prefix again."""

from __future__ import annotations

import functools

import torch

from gpt2_infer.engines.base import Engine, capture


class Recompute(Engine):
    """Runs the prefix eagerly, or replays a captured graph of its rounded length."""

    def warm_up(self) -> None:
        """Load the kernels; capture a graph for each length that will be run."""
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if self.name == "eager":
            self.run(self.padded(self.longest))
            self.reset()
            return
        lengths = sorted(
            {self.padded(self.longest + i) for i in range(self.last_length - self.longest + 1)}
        )
        # The longest first: the shorter ones then fit in the memory that it took.
        for length in reversed(lengths):
            body = functools.partial(self.run, length)
            body()
            first = next(iter(self.graphs.values()), None)
            self.graphs[length] = capture(body, shared_with=first)
            self.reset()

    def padded(self, length: int) -> int:
        """Return the length that is run for a prefix."""
        return min(self.rounded(length), self.capacity)

    def run(self, length: int) -> None:
        """Run the first `length` positions and accept a token."""
        seqlens = None if self.same_length and self.length_step == 1 else self.lengths
        self.accept(self.model(self.tokens[:, :length].clamp(min=0), seqlens=seqlens)[:, 0])

    def step(self, index: int) -> None:
        """Enqueue a step."""
        length = self.padded(self.longest + index)
        if self.name == "graph":
            self.graphs[length].replay()
        else:
            self.run(length)
