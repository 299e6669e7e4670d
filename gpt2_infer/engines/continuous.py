"""Continuous batching: a row that has finished makes room for the next one.

Everything runs in shapes that follow from the settings and a row's own prompt, never from the other
rows: a batch of `batch` rows and one more, a cache as long as the row's bucket needs, prompts in
groups of one size. A library picks its kernel by shape, and within a kernel a row's result depends
on the row alone. So in float32 a row is the same, bit for bit, whoever shares its batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attention_kernels import KernelError, OutputError, UnsupportedError
from gpt2_infer.engines.base import EngineName, capture
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import FinishReason, Request, Watcher
from gpt2_infer.model import GPT2, KVCache

MIN_PROMPT = 16  # prompts are padded to this, or to it times a power of two
NOT_FINITE = "the logits are not finite: the kernel, the weights or the dtype is at fault"
GROUPS = 8  # prompts run in groups of an eighth of the batch


@dataclass(frozen=True)
class Completion:
    """What was written after one prompt."""

    tokens: list[int]
    """Without the end-of-text token that ended it."""
    text: str
    """Cut before a stop string."""
    finish_reason: FinishReason
    logprob: float
    """Of the tokens, by the model's own distribution: without temperature, top-k and top-p."""


@dataclass
class _Row:
    """A prompt that is being completed, as the host sees it."""

    key: int
    request: Request
    watcher: Watcher
    logprob: float = 0.0

    def see(self, token: int, logprob: float) -> None:
        """Take the row's next token."""
        before = len(self.watcher.tokens)
        self.watcher.see(token)
        if len(self.watcher.tokens) > before:
            self.logprob += logprob
        if len(self.watcher.tokens) == self.request.max_new_tokens:
            self.watcher.end("length")

    def completion(self) -> Completion:
        """Return what a finished row has become."""
        watcher, tokenizer = self.watcher, self.request.tokenizer
        text = watcher.text
        if tokenizer is not None and watcher.stream is None:
            text = tokenizer.decode(watcher.tokens)
        return Completion(watcher.tokens, text, watcher.finish or "length", self.logprob)


class Continuous:
    """Completes any number of prompts in batches of `batch`.

    engine: "eager", or "graph" to replay a captured step on CUDA; "auto" is the faster one that
    supports the case. Raises RequestError for another.
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

    @torch.inference_mode()
    def run(
        self, requests: Sequence[tuple[int, Request]]
    ) -> Iterator[tuple[int, Completion | str]]:
        """Yield each request's key and completion, in no order, or the reason why it has none.

        Each request has one prompt, and all have the same max_new_tokens and sampling but the seed.
        """
        buckets = defaultdict(list)
        for key, request in requests:
            buckets[self._padded(len(request.rows[0]))].append((key, request))
        for prompt_length, members in sorted(buckets.items()):
            yield from self._run_apart(prompt_length, members)

    def _run_apart(
        self, prompt_length: int, members: Sequence[tuple[int, Request]]
    ) -> Iterator[tuple[int, Completion | str]]:
        """Run rows of a bucket; where a backend raises, halves of what is left, down to the row."""
        left = dict(members)
        try:
            for key, result in self._run_bucket(prompt_length, members):
                del left[key]
                yield key, result
            return
        except (KernelError, OutputError, UnsupportedError) as error:
            reason = str(error)  # the error itself would keep the bucket's cache
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # raises if no kernel will run any more
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
        slots = _Slots(self.model, members[0][1], self.batch, prompt_length, self.engine)
        waiting = deque(members)
        free, running = list(range(self.batch)), dict[int, _Row]()
        while waiting or running:
            if waiting and len(free) >= min(slots.group, len(waiting)):
                count = min(slots.group, len(waiting))
                joining = {free.pop(): self._row(*waiting.popleft()) for _ in range(count)}
                seen = slots.join({slot: row.request for slot, row in joining.items()})
                running |= joining
            else:
                seen = slots.step(running)
            left = []
            for slot, token, logprob in seen:
                row = running[slot]
                if token >= 0:
                    row.see(token, logprob)
                if token < 0 or row.watcher.finish:
                    left.append(slot)
                    yield running.pop(slot).key, NOT_FINITE if token < 0 else row.completion()
            slots.leave(left)
            free += left

    def _row(self, key: int, request: Request) -> _Row:
        eos = () if request.ignore_eos else self.model.config.eos_token_id
        tokenizer = request.tokenizer
        stream = tokenizer.stream() if tokenizer and request.stops else None
        return _Row(key, request, Watcher(0, eos, request.stops, stream, None))


class _Slots:
    """The device's side of a batch: a slot per row, and one that fills its cache.

    The last slot is as long as the cache and no row ever is, so that on the CPU, too, each step
    attends to the same number of positions under a mask.
    """

    def __init__(
        self, model: GPT2, request: Request, batch: int, prompt_length: int, engine: EngineName
    ) -> None:
        self.model, self.sampling, self.batch = model, request.sampling, batch
        self.prompt_length, self.group = prompt_length, max(1, batch // GROUPS)
        capacity = min(prompt_length + request.max_new_tokens, model.config.n_positions)
        self.cache = KVCache.allocate(model, batch + 1, capacity)
        self.prompt_cache = KVCache.allocate(model, self.group, prompt_length)
        device = model.device
        self.newest = torch.zeros(batch + 1, dtype=torch.long, device=device)
        self.tokens = torch.zeros_like(self.newest)  # newest, or -1 for logits that are not finite
        self.logprobs = torch.zeros(batch + 1, device=device)
        self.lengths = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.lengths[-1] = capacity - 1
        self.active = torch.zeros_like(self.lengths)
        self.steps = torch.zeros_like(self.newest)
        self.uniforms = torch.zeros(batch + 1, request.max_new_tokens, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if engine == "graph":
            self.decode()
            self.graph = capture(self.decode)

    def join(self, requests: dict[int, Request]) -> list[tuple[int, int, float]]:
        """Run prompts, at most a group, into their slots; return slot, token and its logprob."""
        rows = [request.rows[0] for request in requests.values()]
        rows += [[0]] * (self.group - len(rows))  # nobody reads these
        device = self.model.device
        padded = [row + [0] * (self.prompt_length - len(row)) for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        tokens = torch.tensor(padded, device=device)
        logits = self.model(tokens, seqlens=lengths, cache=self.prompt_cache)[:, 0]
        uniforms = self.uniforms.new_zeros(self.group, self.uniforms.shape[1])
        if not self.sampling.is_greedy:
            for i, request in enumerate(requests.values()):
                draws = request.sampling.uniforms(1, request.max_new_tokens, device)
                uniforms[i] = draws[0]
        chosen, logprobs = self.choose(logits, uniforms[:, 0])

        slots, count = torch.tensor([*requests], device=device), len(requests)
        kv, short = self.cache.kv, self.prompt_cache.kv[:, :, :count]
        kept = min(self.prompt_length, kv.shape[4])
        kv[:, :, slots, :, :kept] = short[:, :, :, :, :kept]
        kv[:, :, slots, :, kept:] = 0  # the slot's last row may have left NaN there
        self.newest[slots] = chosen[:count].clamp(min=0)
        self.lengths[slots] = lengths[:count].int()
        self.active[slots] = 1
        self.steps[slots] = 1
        self.uniforms[slots] = uniforms[:count]
        return list(zip(requests, chosen.tolist(), logprobs.tolist(), strict=False))

    def leave(self, left: list[int]) -> None:
        """Free slots."""
        if left:
            slots = torch.tensor(left, device=self.model.device)
            for state in (self.active, self.lengths, self.newest, self.steps):
                state[slots] = 0

    def step(self, slots: Iterable[int]) -> list[tuple[int, int, float]]:
        """Decode a token of every row; return slot, token and its logprob."""
        if self.graph is None:
            self.decode()
        else:
            self.graph.replay()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [(slot, tokens[slot], logprobs[slot]) for slot in slots]

    def decode(self) -> None:
        """Enqueue a step."""
        self.cache.seqlens.copy_(self.lengths)
        logits = self.model.decode(self.newest, self.cache)
        uniforms = self.uniforms.gather(1, self.steps[:, None])[:, 0]
        tokens, logprobs = self.choose(logits, uniforms)
        self.tokens.copy_(tokens)
        self.newest.copy_(tokens.clamp(min=0))
        self.logprobs.copy_(logprobs)
        self.lengths += self.active
        self.steps += self.active

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token per row, and its log-probability in the model's own distribution."""
        logits = logits.float()
        if odd := logits.shape[1] % 4:
            # torch adds up a row from its first multiple of 16 bytes on: let all rows begin there,
            # or the rounding depends on the slot.
            logits = functional.pad(logits, (0, 4 - odd), value=-torch.inf)
        tokens = self.sampling.choose(logits, uniforms)
        chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        return tokens, chosen - logits.logsumexp(1)
