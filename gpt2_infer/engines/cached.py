"""Decoding with a static KV cache: the prompt runs once, then each token runs alone."""

from __future__ import annotations

import torch

from gpt2_infer.engines.base import Engine
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName, Request


class Cached(Engine):
    """Runs eagerly, or replays two captured graphs: one of the prompts, one of a step."""

    def backend(self, step: int) -> str:
        """Return the name of the attention that a step uses."""
        return (self.model.decode_attention if step else self.model.attention).name

    def __init__(self, model: GPT2, request: Request, name: EngineName) -> None:
        super().__init__(model, request, name)
        self.cache = KVCache.allocate(model, len(self.rows), self.capacity)
        self.prompt_graph: torch.cuda.CUDAGraph | None = None
        self.prompt_shape: tuple[int, bool] | None = None  # (longest, same_length) of the graph
        self.step_graph: torch.cuda.CUDAGraph | None = None

    def clear(self) -> None:
        """Clear the last request from the tensors, on the current stream."""
        super().clear()
        self.cache.kv.zero_()  # the last request may have left NaN there

    @property
    def nbytes(self) -> int:
        """The device memory that the engine holds in bytes, without weights."""
        return super().nbytes + self.cache.kv.nbytes

    def warm_up(self) -> None:
        """Build the kernels, or capture the missing graphs."""
        if self.name == "eager":
            for spec in (self.model.attention, self.model.decode_attention):
                spec.prepare(self.device.type)
            return
        prompt_shape = self.longest, self.same_length
        # In the fused engine, the prompt's backend may be one that cannot be captured.
        lacks_prompt = self.model.attention.cuda_graphs and self.prompt_shape != prompt_shape
        lacks_step = self.step_graph is None and self.last_length > self.longest
        if not lacks_prompt and not lacks_step:
            return
        self.prefill()
        self.reset()
        if lacks_prompt:
            self.prompt_graph = self.record(self.prefill)
            self.prompt_shape = prompt_shape
        if lacks_step:
            self.prepare_decode()
            self.decode()
            self.step_graph = self.record(self.decode)
            self.reset()

    def prepare_decode(self) -> None:
        """Prepare for the first decode()."""

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
