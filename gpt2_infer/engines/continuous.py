"""Continuous batching: a finished row makes room for the next one.

All shapes follow from the settings and a row's own prompt, never from the other rows: the batch has
a fixed number of rows, the cache is as long as the row's bucket needs, and prompts run in groups of
one size. A library picks its kernel by shape, and within a kernel a row's result depends only on
that row. So in float32 a row is the same, bit for bit, whichever rows share its batch.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_kernels import KernelError, OutputError, UnsupportedError
from gpt2_infer.engines.base import capture
from gpt2_infer.errors import RequestError
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName, Request
from gpt2_infer.stream import FinishReason, Watcher

MIN_PROMPT = 16  # prompts are padded to a power-of-two multiple of this
NOT_FINITE = "the logits are not finite: the kernel, the weights or the dtype is at fault"
GROUPS = 8  # groups of prompts that fill a batch
# Pieces of work that are enqueued before the host reads the previous one. With 1, a row that has
# ended is decoded once more.
AHEAD = {"cuda": 1, "cpu": 0}


@dataclass(frozen=True)
class Completion:
    """The completion of one prompt."""

    tokens: list[int]
    """New token ids, without a final end-of-text token."""
    text: str
    """The new text, cut before a stop string."""
    finish_reason: FinishReason
    logprob: float
    """The tokens' log-probability in the model's own distribution: without temperature, top-k and
    top-p."""
    backend: str
    """The backend that computed attention over the prompt."""


class _Row:
    """A prompt in progress, as the host sees it."""

    def __init__(self, key: int, request: Request, backend: str) -> None:
        self.key, self.request, self.backend = key, request, backend
        self.watcher, self.logprob = Watcher(request), 0.0

    def see(self, token: int, logprob: float) -> None:
        """Take the row's next token."""
        before = len(self.watcher.tokens)
        self.watcher.see(token)
        if len(self.watcher.tokens) > before:
            self.logprob += logprob
        if len(self.watcher.tokens) == self.request.max_new_tokens:
            self.watcher.end("length")

    def completion(self) -> Completion:
        """Return a finished row's completion."""
        tokens, text = self.watcher.tokens, self.watcher.whole_text()
        return Completion(tokens, text, self.watcher.finish or "length", self.logprob, self.backend)


class Continuous:
    """Completes any number of prompts in batches of `batch`.

    engine: "eager", or "graph" to replay a captured step on CUDA; "auto" is the faster one that
    supports the case. Raises RequestError for any other, or one that does not support it.
    """

    def __init__(self, model: GPT2, *, batch: int, engine: str = "auto") -> None:
        if batch < 1:
            raise RequestError(f"batch-size must be 1 or more, not {batch}")
        can_capture = model.device.type == "cuda" and model.decode_attention.cuda_graphs
        if engine not in ("auto", "eager", "graph"):
            raise RequestError(f"batches run in the eager or the graph engine, not in {engine!r}")
        if engine == "graph" and not can_capture:
            raise RequestError(
                "the graph engine needs a CUDA device and a backend that a graph can capture"
            )
        model.check_backends(decode=True)
        self.model, self.batch = model, batch
        captures = can_capture and engine != "eager"
        self.engine: EngineName = "graph" if captures else "eager"
        self.set_up_s = 0.0
        """Seconds in which the last run() allocated caches and captured graphs."""

    @torch.inference_mode()
    def run(
        self, requests: Sequence[tuple[int, Request]]
    ) -> Iterator[tuple[int, Completion | str]]:
        """Yield each request's key with its completion, or the reason why it failed, in any order.

        Each request has one prompt; all have the same max_new_tokens, and the same sampling except
        for the seed.
        """
        self.set_up_s = 0.0
        buckets = defaultdict(list)
        for key, request in requests:
            buckets[self._padded(len(request.rows[0]))].append((key, request))
        for prompt_length, members in sorted(buckets.items()):
            yield from self._run_apart(prompt_length, members)

    def _run_apart(
        self, prompt_length: int, members: Sequence[tuple[int, Request]]
    ) -> Iterator[tuple[int, Completion | str]]:
        """Run a bucket's rows; if a backend raises, halve the remaining rows, down to one."""
        left = dict(members)
        try:
            for key, result in self._run_bucket(prompt_length, members):
                del left[key]
                yield key, result
            return
        except (KernelError, OutputError, UnsupportedError) as error:
            reason = str(error)  # the error itself would keep the bucket's cache alive
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # raises if the device can run no more kernels
        rows, middle = [*left.items()], len(left) // 2
        if not middle:
            yield rows[0][0], reason
            return
        yield from self._run_apart(prompt_length, rows[:middle])
        yield from self._run_apart(prompt_length, rows[middle:])

    def _padded(self, length: int) -> int:
        padded = MIN_PROMPT
        while padded < length:
            padded *= 2
        return min(padded, self.model.config.n_positions)

    def _run_bucket(
        self, prompt_length: int, members: Sequence[tuple[int, Request]]
    ) -> Iterator[tuple[int, Completion | str]]:
        model = self.model.up_to(prompt_length)
        started = time.perf_counter()
        slots = _Slots(model, members[0][1], self.batch, prompt_length, self.engine)
        self.set_up_s += time.perf_counter() - started
        waiting, backend = deque(members), model.attention.name
        free, running = list(range(self.batch)), dict[int, _Row]()
        work = deque[_Work]()
        while waiting or running:
            count = min(slots.group, len(waiting))
            if waiting and len(free) >= count:
                joining = {free.pop(): _Row(*waiting.popleft(), backend) for _ in range(count)}
                running |= joining
                work.append(slots.join(joining))
            else:
                work.append(slots.step(running))
            if len(work) <= slots.ahead:
                continue
            left = []
            for slot, row, token, logprob in work.popleft().results():
                if running.get(slot) is not row:
                    continue  # the row has ended in the meantime
                if token >= 0:
                    row.see(token, logprob)
                if token < 0 or row.watcher.finish:
                    left.append(slot)
                    del running[slot]
                    yield row.key, NOT_FINITE if token < 0 else row.completion()
            slots.leave(left)
            free += left


class _Work:
    """Work enqueued for some rows, by slot: a decode step or their prompts."""

    def __init__(self, rows: dict[int, _Row], tokens: Tensor, logprobs: Tensor) -> None:
        self.rows = rows
        self.tokens = tokens.to("cpu", non_blocking=True, copy=True)
        self.logprobs = logprobs.to("cpu", non_blocking=True, copy=True)
        self.done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record()

    def results(self) -> Iterator[tuple[int, _Row, int, float]]:
        """Wait for the device; yield each slot, row, token and the token's log-probability."""
        if self.done is not None:
            self.done.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        for slot, row in self.rows.items():
            yield slot, row, tokens[slot], logprobs[slot]


class _Slots:
    """The device's state of a batch: one slot per row.

    On a CPU, one extra slot, filled to the cache's capacity, makes each step attend to the same
    number of positions under a mask.
    """

    def __init__(
        self, model: GPT2, request: Request, batch: int, prompt_length: int, engine: EngineName
    ) -> None:
        self.model, self.sampling, self.batch = model, request.sampling, batch
        self.prompt_length, self.group = prompt_length, max(1, batch // GROUPS)
        capacity = min(prompt_length + request.max_new_tokens, model.config.n_positions)
        rows = batch if model.device.type == "cuda" else batch + 1
        self.ahead = AHEAD[model.device.type]
        self.cache = KVCache.allocate(model, rows, capacity)
        self.prompt_cache = KVCache.allocate(model, self.group, prompt_length)
        device = model.device
        # Each row's newest token; -1 if the logits were not finite, which the model reads as 0.
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.lengths[batch:] = capacity - 1
        self.active = torch.zeros_like(self.lengths)
        self.steps = torch.zeros_like(self.tokens)
        self.uniforms = torch.zeros(rows, request.max_new_tokens + self.ahead, device=device)
        self.prompts = torch.zeros(self.group, prompt_length, dtype=torch.long, device=device)
        self.prompt_lengths = torch.ones(self.group, dtype=torch.long, device=device)
        self.prompt_uniforms = torch.zeros(self.group, self.uniforms.shape[1], device=device)
        self.first = torch.zeros(self.group, dtype=torch.long, device=device)  # first new tokens
        self.first_logprobs = torch.zeros(self.group, device=device)
        self.step_graph: torch.cuda.CUDAGraph | None = None
        self.prompt_graph: torch.cuda.CUDAGraph | None = None
        if engine == "graph":
            self.decode()
            self.step_graph = capture(self.decode)
            if model.attention.cuda_graphs:
                self.prefill()
                self.prompt_graph = capture(self.prefill, shared_with=self.step_graph)

    def join(self, rows: dict[int, _Row]) -> _Work:
        """Run at most a group of prompts and fill their slots."""
        prompts = [row.request.rows[0] for row in rows.values()]
        prompts += [[0]] * (self.group - len(rows))  # pad the group with unused rows
        padded = [prompt + [0] * (self.prompt_length - len(prompt)) for prompt in prompts]
        self.upload(padded, self.prompts)
        self.upload([len(prompt) for prompt in prompts], self.prompt_lengths)
        if not self.sampling.is_greedy:
            uniforms = torch.zeros(self.prompt_uniforms.shape, device="cpu")
            for draws, row in zip(uniforms, rows.values(), strict=False):
                new_tokens = row.request.max_new_tokens
                draws[:new_tokens] = row.request.sampling.uniforms(1, new_tokens, draws.device)[0]
            self.upload(uniforms, self.prompt_uniforms)
        _replay(self.prompt_graph, self.prefill)

        slots, count = self.upload([*rows]), len(rows)
        kv, short = self.cache.kv, self.prompt_cache.kv[:, :, :count]
        kept = min(self.prompt_length, kv.shape[4])
        kv[:, :, slots, :, :kept] = short[:, :, :, :, :kept]
        kv[:, :, slots, :, kept:] = 0  # the slot's previous row may have left NaN there
        self.tokens[slots] = self.first[:count]
        self.logprobs[slots] = self.first_logprobs[:count]
        self.lengths[slots] = self.prompt_lengths[:count].int()
        self.active[slots] = 1
        self.steps[slots] = 1
        self.uniforms[slots] = self.prompt_uniforms[:count]
        return _Work(rows, self.tokens, self.logprobs)

    def leave(self, left: list[int]) -> None:
        """Free the given slots."""
        if left:
            slots = self.upload(left)
            for state in (self.active, self.lengths, self.steps):
                state[slots] = 0

    def upload(self, values: Tensor | list[Any], to: Tensor | None = None) -> Tensor:
        """Copy values to the device through pinned memory; otherwise the host would wait."""
        on_host = torch.as_tensor(values, device="cpu")
        to = on_host.new_empty(on_host.shape, device=self.model.device) if to is None else to
        return to.copy_(on_host.pin_memory() if to.is_cuda else on_host, non_blocking=True)

    def step(self, rows: dict[int, _Row]) -> _Work:
        """Decode a token of every row."""
        _replay(self.step_graph, self.decode)
        return _Work({**rows}, self.tokens, self.logprobs)

    def prefill(self) -> None:
        """Enqueue a group's prompts."""
        logits = self.model(self.prompts, seqlens=self.prompt_lengths, cache=self.prompt_cache)
        tokens, logprobs = self.choose(logits[:, 0], self.prompt_uniforms[:, 0])
        self.first.copy_(tokens)
        self.first_logprobs.copy_(logprobs)

    def decode(self) -> None:
        """Enqueue a step."""
        self.cache.seqlens.copy_(self.lengths)
        logits = self.model.decode(self.tokens.clamp(min=0), self.cache)
        uniforms = self.uniforms.gather(1, self.steps[:, None])[:, 0]
        tokens, logprobs = self.choose(logits, uniforms)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)
        self.lengths += self.active
        self.steps += self.active

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token per row, and its log-probability in the model's own distribution."""
        # torch starts a row's sum at the first multiple of 16 bytes. Every row begins at such a
        # multiple, so that the rounding does not depend on the slot.
        count, vocab_size = logits.shape
        rows = torch.empty(count, -(-vocab_size // 4) * 4, device=logits.device)
        rows[:, :vocab_size], rows[:, vocab_size:] = logits, -torch.inf
        tokens = self.sampling.choose(rows, uniforms)
        return tokens, rows.log_softmax(1).gather(1, tokens.clamp(min=0)[:, None])[:, 0]


def _replay(graph: torch.cuda.CUDAGraph | None, body: Callable[[], None]) -> None:
    body() if graph is None else graph.replay()
