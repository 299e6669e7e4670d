"""The case study's workload: the whole prefix runs again for every token."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from gpt2_infer.engines.base import Engine, kernel_refusals, padded_length, uncaptured
from gpt2_infer.engines.ends import Ends
from gpt2_infer.model import GPT2, Block, KVCache
from gpt2_infer.product import MAX_NORM, Activation
from gpt2_infer.request import EngineName, Request

# Up to this many rows our products were faster than the libraries' on an H200.
MAX_ROWS = 2048


class Recompute(Engine):
    """Runs the prefix eagerly, or replays a captured graph of its rounded length.

    The fused engine's graphs hold our own kernels, with attention between them.
    """

    def __init__(self, model: GPT2, request: Request, name: EngineName) -> None:
        super().__init__(model, request, name)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.forward = Forward(model) if name == "fused" else None

    @classmethod
    def refusals(cls, model: GPT2, request: Request, name: EngineName) -> list[str]:
        """Return all reasons why the engine cannot run a request."""
        if name != "fused":
            return super().refusals(model, request, name)
        longest = max(map(len, request.rows)) + request.max_new_tokens - 1
        reasons = Forward.refusals(model, len(request.rows) * longest)
        return reasons + uncaptured(model.attention)

    @classmethod
    def needed(cls, model: GPT2, request: Request, name: EngineName) -> int:
        """Return the capacity of a row: with graphs, n_positions, so any length fits."""
        return super().needed(model, request, name) if name == "eager" else model.config.n_positions

    def warm_up(self) -> None:
        """Build the kernels, or capture a graph of the last length.

        The longest comes first: the shorter ones then fit in its memory.
        """
        if self.name == "eager":
            self.model.attention.prepare(self.device.type)
            return
        length = self.padded(self.last_length)
        if length not in self.graphs:
            self.run(length)
            self.reset()
            self.capture(length)

    def padded(self, length: int) -> int:
        """Return the padded length at which a prefix runs."""
        return padded_length(length, self.length_step, self.model.config)

    def run(self, length: int) -> None:
        """Run the first `length` positions and accept a token."""
        tokens = self.tokens[:, :length]
        if self.forward is not None:
            logits = self.forward(self.model, tokens, self.lengths)
            if self.sampling.is_greedy:
                self.forward.ends.choose(self.tokens, self.lengths, self.newest)
            else:
                self.accept(logits)
            return
        tokens = tokens.clamp(min=0)
        seqlens = None if self.same_length and self.length_step == 1 else self.lengths
        self.accept(self.model(tokens, seqlens=seqlens)[:, 0])

    def step(self, index: int) -> None:
        """Enqueue a step."""
        length = self.padded(self.longest + index)
        if self.name == "eager":
            self.run(length)
        elif length in self.graphs:
            self.graphs[length].replay()
        else:
            self.run(length)
            self.capture(length)

    def own_logits(self, step: int) -> Tensor | None:
        """Return the logits of a step of the fused engine."""
        return None if self.forward is None else self.forward.ends.last_logits

    def capture(self, length: int) -> None:
        """Capture a graph of a length that has just run.

        The device is still busy with earlier steps; lengths that are never reached cost nothing.
        """
        self.graphs[length] = self.record(functools.partial(self.run, length))


class Layer:
    """A transformer block that runs in our own kernels, except attention.

    next_norm: the LayerNorm that follows the block.
    """

    def __init__(self, block: Block, next_norm: nn.LayerNorm) -> None:
        self.block, self.next_norm = block, next_norm
        attn, mlp = block.attn, block.mlp
        self.qkv, self.proj = attn.c_attn.product().after(block.ln_1), attn.c_proj.product()
        self.fc, self.fc2 = mlp.c_fc.product().after(block.ln_2), mlp.c_proj.product()

    def hidden(self, x: Tensor, heads: Tensor) -> Activation:
        """Add the first projection to the residual stream x in place; return the hidden units."""
        return self.fc.hidden(self.proj.add_and_norm(x, heads, self.block.ln_2))


class Forward:
    """A model's forward pass in float32: four of our own products per layer, and attention."""

    def __init__(self, model: GPT2) -> None:
        blocks = list(model.blocks())
        norms = [block.ln_1 for block in blocks[1:]] + [model.ln_f]
        self.ends = Ends(model)
        self.layers = [Layer(*pair) for pair in zip(blocks, norms, strict=True)]

    @staticmethod
    def refusals(model: GPT2, rows: int) -> list[str]:
        """Return all reasons why this model, or this many positions, cannot run here."""
        reasons = kernel_refusals(model, ["float32"])
        if model.config.n_embd > MAX_NORM:
            reasons.append(f"n_embd {model.config.n_embd} (it takes up to {MAX_NORM})")
        if rows > MAX_ROWS:
            reasons.append(f"passes of up to {rows} positions (it takes up to {MAX_ROWS})")
        return reasons

    def __call__(
        self, model: GPT2, tokens: Tensor, seqlens: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """Return the logits at each row's last position, (batch, vocab_size), until the next call.

        model: the one given at creation, with any attention. tokens: int64 (batch, seqlen),
        right-padded; -1 is read as 0. seqlens: int64 (batch,). cache: an empty one to fill.
        """

        def attend(layer: Layer, normed: Activation) -> Tensor:
            qkv, backend = layer.qkv(normed), model.attention
            return layer.block.attn.attend(qkv, tokens.shape, backend, cache).contiguous()

        *layers, last = self.layers
        x, normed = self.ends.begin(tokens, packs=self.layers[0].qkv.packs)
        for layer in layers:
            heads = attend(layer, normed)
            normed = layer.fc2.add_and_norm(x, layer.hidden(x, heads), layer.next_norm)
        heads = attend(last, normed)
        if cache is not None:
            cache.seqlens.copy_(seqlens)
        # From here on positions are independent, and only these need logits.
        x, heads = self.ends.keep(x, heads, seqlens)
        return self.ends.logits(last.fc2.add_to(x, last.hidden(x, heads), last.next_norm))
