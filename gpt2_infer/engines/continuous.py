"""Continuous batching: a finished row makes room for the next one.

All shapes follow from the settings and a row's own prompt, never from the other rows: the batch has
a fixed number of rows, and prompts run in groups of one size, by length. A library picks its kernel
by shape, and within a kernel a row's result depends only on that row. So in float32 a row is the
same, bit for bit, whichever rows share its batch. The cache's capacity may depend on the other rows
if the decode kernel is one of a ladder, whose results do not depend on it; for others, rows with
prompts of different lengths run apart.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from attention_kernels import KernelError, OutputError, UnsupportedError
from gpt2_infer.engines.base import key_of, room
from gpt2_infer.engines.fused import power_of_two
from gpt2_infer.engines.slots import Integers, Slots, Work
from gpt2_infer.errors import RequestError
from gpt2_infer.model import GPT2
from gpt2_infer.prepared import clear_all
from gpt2_infer.request import EngineName, Request
from gpt2_infer.stream import FinishReason, Watcher

MIN_PROMPT = 16  # prompts are padded to a power-of-two multiple of this
NOT_FINITE = "the logits are not finite: the kernel, the weights or the dtype is at fault"
# Pieces of work that are enqueued before the host reads the previous one. With 1, a row that has
# ended for another reason than its length is decoded once more.
AHEAD = {"cuda": 2, "cpu": 0}


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


Member = tuple[int, Request]
"""A request and the key that identifies it."""
Result = tuple[int, Completion | str]
"""A request's key, and its completion or the reason why it failed."""


@dataclass(frozen=True)
class _Ended:
    """A row that has ended, without its text, which takes the host longest."""

    row: int
    slot: int
    reason: str
    tokens: Integers
    logprobs: npt.NDArray[np.float64]


class _Rows:
    """The rows of a run: which slot each has, and the tokens that the host has read so far."""

    def __init__(self, members: Sequence[Member], batch: int) -> None:
        self.members, self.new_tokens = members, members[0][1].max_new_tokens
        # By slot, after all enqueued work: the row, or -1, and its number of tokens. A row leaves
        # when its last token is enqueued, before that token has been read.
        self.held = np.full(batch, -1)
        self.begun = np.zeros(batch, dtype=np.int64)
        # By slot, the tokens read so far. A row's tokens are read in order, and before those of the
        # next row in its slot.
        self.seen = np.zeros(batch, dtype=np.int64)
        self.tokens = np.zeros((batch, self.new_tokens), dtype=np.int64)
        self.logprobs = np.zeros((batch, self.new_tokens))
        # By row; the last element stands for no row.
        self.ended = np.zeros(len(members) + 1, dtype=bool)
        self.ended[-1] = True
        self.ignores_eos = np.array([request.ignore_eos for _, request in members])
        self.eos = np.array(members[0][1].config.eos_token_id, dtype=np.int64)
        self.watchers: dict[int, Watcher] = {}  # of rows with stop strings

    def join(self, rows: Sequence[int], slots: Integers) -> Integers:
        """Put rows into free slots; return the row of each slot that gets a token."""
        self.held[slots], self.begun[slots] = rows, 1
        for row in rows:
            if (request := self.members[row][1]).stops:
                self.watchers[row] = Watcher(request)
        joined = np.full_like(self.held, -1)
        joined[slots] = rows
        return joined

    def step(self) -> Integers:
        """Count a token of every row; return the row of each slot."""
        self.begun += self.held >= 0
        return self.held.copy()

    def full(self) -> Integers:
        """Remove the rows that got their last token; return their slots."""
        slots = np.flatnonzero((self.held >= 0) & (self.begun == self.new_tokens))
        self.held[slots] = -1
        return slots

    def read(self, work: Work) -> list[_Ended]:
        """Read results; return the rows that have ended. Their slots are then read for others."""
        every_token, every_logprob = work.results()
        slots = np.flatnonzero(~self.ended[work.rows])
        rows, tokens, at = work.rows[slots], every_token[slots], self.seen[slots]
        self.tokens[slots, at], self.logprobs[slots, at] = tokens, every_logprob[slots]
        is_eos = np.isin(tokens, self.eos) & ~self.ignores_eos[rows]
        self.seen[slots] += (tokens >= 0) & ~is_eos
        reasons: dict[int, str] = {}
        for finish, where in (
            ("length", self.seen[slots] == self.new_tokens),
            ("end-of-text", is_eos),
            (NOT_FINITE, tokens < 0),
        ):
            reasons |= dict.fromkeys(np.flatnonzero(where).tolist(), finish)
        if self.watchers:
            reasons = self._watched(rows.tolist(), tokens.tolist(), reasons)
        self.ended[rows[[*reasons]]] = True
        return [self._end(int(rows[at]), int(slots[at]), why) for at, why in reasons.items()]

    def _end(self, row: int, slot: int, reason: str) -> _Ended:
        count, self.seen[slot] = self.seen[slot], 0
        tokens, logprobs = self.tokens[slot, :count].copy(), self.logprobs[slot, :count].copy()
        return _Ended(row, slot, reason, tokens, logprobs)

    def _watched(
        self, rows: Sequence[int], tokens: Sequence[int], reasons: dict[int, str]
    ) -> dict[int, str]:
        """Return reasons, in which rows may also end at a stop string."""
        for at, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            watcher = self.watchers.get(row)
            if watcher is None or token < 0:
                continue
            watcher.see(token)
            if reasons.get(at) == "length":
                watcher.end("length")
            if watcher.finish:
                reasons[at] = watcher.finish
        return reasons

    def result(self, ended: _Ended, backend: str) -> Completion | str:
        """Return the result of a row."""
        if ended.reason == NOT_FINITE:
            return ended.reason
        tokens = ended.tokens.tolist()
        logprob = float(ended.logprobs.cumsum()[-1]) if tokens else 0.0
        watcher = self.watchers.pop(ended.row, None)
        if watcher is None:
            watcher = Watcher(self.members[ended.row][1])
            watcher.tokens = tokens
        reason = cast("FinishReason", ended.reason)
        return Completion(tokens, watcher.whole_text(), reason, logprob, backend)


class Continuous:
    """Completes any number of prompts in batches of `batch`.

    engine: "eager", or "graph" to replay a captured step on CUDA; "auto" is the faster one that
    supports the case. Raises RequestError for any other, or one that does not support it.
    """

    def __init__(self, model: GPT2, *, batch: int, engine: str = "auto") -> None:
        model = model.for_rows(batch)
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

    def run(self, requests: Sequence[Member]) -> Iterator[Result]:
        """Yield each request's key with its completion, or the reason why it failed, in any order.

        Each request has one prompt; all have the same max_new_tokens, and the same sampling except
        for the seed.
        """
        results = self._run(requests)
        while True:
            # Not around `yield`: between two results the caller's own device is current.
            with torch.inference_mode(), self.model.on_device():
                result = next(results, None)
            if result is None:
                return
            yield result

    def _run(self, requests: Sequence[Member]) -> Iterator[Result]:
        self.set_up_s = 0.0
        mixes = self.model.decode_attention.version is not None
        ordered = sorted(requests, key=self._padded)
        for _, members in itertools.groupby(ordered, lambda member: mixes or self._padded(member)):
            yield from self._run_apart([*members])

    def _run_apart(self, members: Sequence[Member]) -> Iterator[Result]:
        """Run rows, sorted by length; if a backend raises, halve the rest of them, down to one."""
        left = dict(members)
        try:
            for key, result in self._run_together(members):
                del left[key]
                yield key, result
            return
        except (KernelError, OutputError, UnsupportedError) as error:
            reason = str(error)  # the error itself would keep the cache alive
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # raises if the device can run no more kernels
        rows, middle = [*left.items()], len(left) // 2
        if not middle:
            yield rows[0][0], reason
            return
        yield from self._run_apart(rows[:middle])
        yield from self._run_apart(rows[middle:])

    def _padded(self, member: Member) -> int:
        """Return the length to which a request's prompt is padded."""
        padded = power_of_two(max(MIN_PROMPT, len(member[1].rows[0])))
        return min(padded, self.model.config.n_positions)

    def _run_together(self, members: Sequence[Member]) -> Iterator[Result]:
        lengths = [*map(self._padded, members)]
        started = time.perf_counter()
        slots, keep = self._lend_slots(members[0][1], lengths[-1])
        self.set_up_s += time.perf_counter() - started
        rows, ahead = _Rows(members, self.batch), AHEAD[self.model.device.type]
        waiting = deque(range(len(members)))
        work, least, ended = deque[Work](), slots.group, deque[_Ended]()

        def result() -> Result:
            done = ended.popleft()
            return members[done.row][0], rows.result(done, slots.backend(lengths[done.row]))

        while True:
            free = np.flatnonzero(rows.held < 0)
            most = min(slots.group, len(free))
            group = _next_group(waiting, lengths, most, least, self.batch)
            is_enqueued = bool(group) or len(free) < self.batch
            if group:
                slots.join(lengths[group[0]], [members[row][1] for row in group], free)
                work.append(slots.work(rows.join(group, free[: len(group)])))
            elif is_enqueued:
                slots.step()
                work.append(slots.work(rows.step()))
            # A quarter of a group may follow another: the last group of a length leaves slots free.
            least = -(-slots.group // 4) if group else slots.group
            slots.leave(rows.full())
            if is_enqueued and len(work) <= ahead:
                continue
            if not work:
                break
            # The device must not wait for texts. A batch of them may be left to the next round.
            while ended and (len(ended) > self.batch or not work[0].is_done):
                yield result()
            newest = rows.read(work.popleft())
            left = [end.slot for end in newest if rows.held[end.slot] == end.row]
            rows.held[left] = -1
            slots.leave(left)
            ended += newest
        while ended:
            yield result()
        keep()

    def _lend_slots(self, request: Request, longest: int) -> tuple[Slots, Callable[[], None]]:
        """Return slots, kept from an earlier run if possible, and a function that keeps them."""
        model = self.model
        capacity = min(longest + request.max_new_tokens, model.config.n_positions)
        # The same slots can serve all runs of the same key in turn.
        sizes = self.batch, capacity, request.max_new_tokens
        key = Slots, self.engine, *sizes, *key_of(model, request)
        most = room(model.device) if self.engine == "graph" else 0

        def make() -> Slots:
            try:
                return Slots(model, request, self.batch, capacity, self.engine)
            except torch.OutOfMemoryError:
                if not clear_all():
                    raise
                return Slots(model, request, self.batch, capacity, self.engine)

        return model.prepared.lend(key, make, lambda slots: slots.begin(model, request), most)


def _next_group(
    waiting: deque[int], lengths: Sequence[int], most: int, least: int, batch: int
) -> list[int]:
    """Take the next rows of one length: up to `most`; none if fewer than `least`.

    Fewer are taken if they are the last of that length, or if without them a few rows would be left
    for one more round at the end. waiting: rows that are sorted by length.
    """
    same = itertools.takewhile(lambda row: lengths[row] == lengths[waiting[0]], waiting)
    available = len(list(itertools.islice(same, most + 1)))
    count = min(available, most)
    rounds, rounds_after = (-(-rows // batch) for rows in (len(waiting), len(waiting) - count))
    if count < least and available > most and rounds_after == rounds:
        return []
    return [waiting.popleft() for _ in range(count)]
