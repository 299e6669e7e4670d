"""The device's side of continuous batching: a batch of slots, each with a row's cache and state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpt2_infer.engines import batch_step
from gpt2_infer.engines.base import capture, pool_bytes
from gpt2_infer.linear import without_autocast
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName, Request

GROUPS = 8  # groups of prompts that fill a batch

Integers = npt.NDArray[np.int64]


class Work:
    """Enqueued work: a decode step, or a group of prompts.

    rows: the row in each slot that gets a token, or -1.
    """

    def __init__(self, rows: Integers, tokens: Tensor, logprobs: Tensor) -> None:
        self.rows = rows
        self._results = [x.to("cpu", non_blocking=True, copy=True) for x in (tokens, logprobs)]
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it; on a CPU, false until results() is called."""
        return self._done is not None and bool(self._done.query())  # type: ignore[no-untyped-call]

    def results(self) -> tuple[Integers, npt.NDArray[np.float32]]:
        """Wait for the device; return each slot's token and the token's log-probability."""
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs = (x.numpy() for x in self._results)
        return tokens, logprobs


class Slots:
    """The state of a batch: tokens, lengths and the KV cache.

    On a CPU, one extra slot, filled to the cache's capacity, makes each step attend to the same
    number of positions under a mask. A last slot, which is not decoded, takes what the unused rows
    of a group of prompts compute.
    """

    def __init__(
        self, model: GPT2, request: Request, batch: int, capacity: int, engine: EngineName
    ) -> None:
        self.batch, self.group = batch, max(1, batch // GROUPS)
        self.capacity, self.new_tokens = capacity, request.max_new_tokens
        self.captures = engine == "graph"
        device = model.device
        self.rows = batch if device.type == "cuda" else batch + 1
        self.all = KVCache.allocate(model, self.rows + 1, capacity)
        # Each row's newest token; -1 if the logits were not finite, which the model reads as 0.
        self.tokens = torch.zeros(self.rows + 1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(self.rows + 1, device=device)
        self.lengths = torch.zeros(self.rows + 1, dtype=torch.int32, device=device)
        self.active = torch.zeros_like(self.lengths)
        self.steps = torch.zeros_like(self.tokens)
        self.uniforms = torch.zeros(self.rows + 1, self.new_tokens + 1, device=device)
        self.cache = KVCache(self.all.kv[:, :, : self.rows], self.all.seqlens[: self.rows])
        self.prompts: dict[int, _Prompts] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.begin(model, request)

    @property
    def nbytes(self) -> int:
        """The device memory that the slots hold in bytes, without weights."""
        own = sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))
        own += sum(x.nbytes for group in self.prompts.values() for x in group.tensors)
        return own + self.all.kv.nbytes + (pool_bytes(self.graph) if self.graph else 0)

    @without_autocast
    def begin(self, model: GPT2, request: Request) -> None:
        """Start a run; the slots must be new or free."""
        self.model, self.sampling = model, request.sampling
        for state in (self.lengths, self.active, self.steps):
            state.zero_()
        self.lengths[self.batch :].fill_(self.capacity - 1)
        # A ladder's decode kernel never reads past the end of a row.
        self.must_clear = model.decode_attention.version is None
        if self.must_clear:
            self.all.kv.zero_()
        self.kernels: batch_step.BatchStep | None = None
        if not batch_step.refusals(model, self.batch):
            states = (self.tokens, self.lengths, self.active, self.logprobs)
            decoded = [state[: self.rows] for state in states]
            self.kernels = batch_step.BatchStep(model, self.cache, *decoded)
        if self.captures and self.graph is None:
            self.decode()
            self.graph = capture(self.decode)

    def rest(self) -> None:
        """Forget the model, so that idle slots do not keep it alive."""
        del self.model, self.kernels
        for prompts in self.prompts.values():
            del prompts.model

    @without_autocast
    def join(self, length: int, requests: Sequence[Request], slots: Integers) -> None:
        """Run at most a group of prompts of up to `length` tokens; fill the first of free slots."""
        prompts = self.prompts.get(length)
        if prompts is None:
            prompts = self.prompts[length] = _Prompts(self, length)
        prompts.run(self, requests, slots)

    def backend(self, length: int) -> str:
        """Return the name of the backend that computed attention over prompts of that length."""
        return self.prompts[length].model.attention.name

    def work(self, rows: Integers) -> Work:
        """Return the newest work; see Work."""
        return Work(rows, self.tokens, self.logprobs)

    @without_autocast
    def step(self) -> None:
        """Decode a token of every row."""
        self.decode() if self.graph is None else self.graph.replay()

    def leave(self, slots: Sequence[int] | Integers) -> None:
        """Free the given slots."""
        if not len(slots):
            return
        index = upload(torch.as_tensor(slots, device="cpu"), self.model.device)
        for state in (self.active, self.lengths, self.steps):
            state.index_fill_(0, index, 0)

    def decode(self) -> None:
        """Enqueue a step."""
        rows, kernels = self.rows, self.kernels
        if kernels is not None and self.sampling.is_greedy:
            kernels.choose(kernels.logits())
            return
        if kernels is not None:
            logits = kernels.logits()
        else:
            self.cache.seqlens.copy_(self.lengths[:rows])
            logits = self.model.decode(self.tokens[:rows].clamp(min=0), self.cache)
        uniforms = self.uniforms[:rows].gather(1, self.steps[:rows, None])[:, 0]
        tokens, logprobs = self.choose(logits, uniforms)
        self.tokens[:rows], self.logprobs[:rows] = tokens, logprobs
        self.lengths += self.active
        self.steps += self.active

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token per row, and its log-probability in the model's own distribution."""
        if self.kernels is not None and self.sampling.is_greedy:
            return self.kernels.chosen(logits)
        # torch starts a row's sum at the first multiple of 16 bytes. Every row begins at such a
        # multiple, so that the rounding does not depend on the slot.
        count, vocab_size = logits.shape
        rows = torch.empty(count, -(-vocab_size // 4) * 4, device=logits.device)
        rows[:, :vocab_size], rows[:, vocab_size:] = logits, -torch.inf
        tokens = self.sampling.choose(rows, uniforms)
        return tokens, rows.log_softmax(1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]


class _Prompts:
    """A group of prompts of up to `length` tokens, for some slots."""

    def __init__(self, slots: Slots, length: int) -> None:
        self.length, group, device = length, slots.group, slots.model.device
        # One upload: a row's padded prompt, its length and its slot.
        self.input = torch.zeros(group, length + 2, dtype=torch.long, device=device)
        self.uniforms = torch.zeros(group, slots.uniforms.shape[1], device=device)
        self.tensors = (self.input, self.uniforms)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, state: Slots, requests: Sequence[Request], slots: Integers) -> None:
        """Upload the prompts and enqueue their pass."""
        host = np.zeros(self.input.shape, dtype=np.int64)
        host[:, -2:] = 1, state.rows  # a prompt of one token, for the last slot
        for row, request, slot in zip(host, requests, slots, strict=False):
            prompt = request.rows[0]
            row[: len(prompt)] = prompt
            row[-2:] = len(prompt), slot
        upload(torch.from_numpy(host), self.input.device, self.input)
        if not state.sampling.is_greedy:
            uniforms = torch.zeros(self.uniforms.shape, device="cpu")
            for draws, request in zip(uniforms, requests, strict=False):
                count = request.max_new_tokens
                draws[:count] = request.sampling.uniforms(1, count, draws.device)[0]
            upload(uniforms, self.uniforms.device, self.uniforms)
        self.model = state.model.up_to(self.length)
        if self.graph is not None:
            self.graph.replay()
            return
        self.fill(state)
        if state.captures and self.model.attention.cuda_graphs:
            self.graph = capture(lambda: self.fill(state), shared_with=state.graph)

    def fill(self, state: Slots) -> None:
        """Enqueue the prompts: fill the slots' cache, and choose their first tokens."""
        prompts, lengths = self.input[:, :-2], self.input[:, -2].contiguous()
        slots = self.input[:, -1].contiguous()
        if state.must_clear:
            state.all.kv.index_fill_(2, slots, 0)  # a slot's previous row may have left NaN there
        if state.kernels is not None:
            args = (prompts, lengths, slots)
            logits = state.kernels.prompts(self.model, state.all, *args)
        else:
            cache = KVCache(state.all.kv, state.all.seqlens, slots)
            logits = self.model(prompts, seqlens=lengths, cache=cache)[:, 0]
        tokens, logprobs = state.choose(logits, self.uniforms[:, 0])
        state.tokens[slots], state.logprobs[slots] = tokens, logprobs
        state.lengths[slots] = lengths.int()
        state.active.index_fill_(0, slots, 1)
        state.steps.index_fill_(0, slots, 1)
        state.lengths[state.batch :].fill_(state.capacity - 1)
        state.active[state.batch :].fill_(0)
        state.uniforms[slots] = self.uniforms


def upload(values: Tensor, device: torch.device, to: Tensor | None = None) -> Tensor:
    """Copy values to the device through pinned memory; otherwise the host would wait."""
    to = values.new_empty(values.shape, device=device) if to is None else to
    return to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)
