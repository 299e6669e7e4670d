"""Text generation: recompute or KV cache, one or more prompts, eager or in CUDA graphs.

Tokens, lengths and random numbers are device tensors, so a step neither reads from nor waits for
the device. If the host needs the tokens during generation (streaming, end of text, stop strings),
they are copied to pinned memory and read one step late, while the next step runs.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from tqdm import tqdm

from attention_kernels.contract import dtype_name
from gpt2_infer.engines import Engine, lend_engine
from gpt2_infer.engines.speculative import UNWRITTEN, Speculative, Text
from gpt2_infer.errors import NotFiniteError, RequestError, check_type
from gpt2_infer.linear import without_autocast
from gpt2_infer.model import GPT2
from gpt2_infer.prepared import clear_all
from gpt2_infer.request import EngineName, Mode, Request
from gpt2_infer.sampling import Sampling
from gpt2_infer.stream import FinishReason, Watcher


@dataclass
class Generation:
    """The generated tokens, how they were generated, and timings."""

    prompts: list[list[int]]
    """Prompt token ids per row."""
    tokens: list[list[int]]
    """New token ids per row, without a final end-of-text token."""
    finish_reasons: list[FinishReason]
    mode: Mode
    attention: str
    decode_attention: str | None
    engine: EngineName
    length_step: int
    """The multiple that recompute's lengths were rounded up to; 1 with a KV cache."""
    warm_up_s: float
    """Seconds for building kernels and capturing the first graphs, unless earlier calls did."""
    prefill_s: float
    """Seconds from the end of the warm-up to the first new token."""
    generation_s: float
    """Seconds from the end of the warm-up to the last new token, prefill included."""
    intervals_s: list[float] = field(default_factory=list)
    """Seconds between tokens, on the device; empty if tokens were read only at the end."""
    passes: int | None = None
    """The passes after the prompt's, if some read guesses; otherwise each gives a token per row."""
    texts: list[str] = field(default_factory=list)
    """The new text per row, cut before a stop string; empty without a tokenizer."""

    def whole(self) -> Generation:
        """Return self, or raise KeyboardInterrupt if generation was interrupted."""
        if "interrupted" in self.finish_reasons:
            raise KeyboardInterrupt
        return self

    @property
    def new_tokens(self) -> int:
        """The number of new tokens in all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of generation_s."""
        return self.new_tokens / self.generation_s if self.generation_s > 0 else 0.0


def generate(
    model: GPT2,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 512,
    mode: Mode = "recompute",
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    on_text: Callable[[int, str], None] | None = None,
    progress: bool = False,
    engine: Literal["auto"] | EngineName = "auto",
    guesses: int = 0,
) -> Generation:
    """Continue each prompt by up to max_new_tokens tokens.

    prompts: a text, texts, or lists of token ids; an empty text stands for GPT-2's <|endoftext|>.
    Rows of different lengths are right-padded, with the same results as running each alone; row i
    samples from seed + i.
    mode: "recompute" re-runs the whole prefix for every token (the case study's workload),
    "kv-cache" keeps keys and values. stop: texts that end a row. on_text(row, piece) is called as
    text becomes certain. engine: "eager", "graph", "fused" or "auto", the fastest that supports the
    case; graph and fused cache their state for later calls, see GPT2.release(). guesses: how many
    of the next tokens, 1, 3 or 7, the fused engine may guess on a GPU from what the text repeats,
    in greedy text of one prompt with a cache; the text stays the same, bit for bit.
    KeyboardInterrupt ends generation early.
    Raises RequestError, UnavailableBackendError or UnsupportedError before any long work, and
    NotFiniteError for logits that are NaN or infinite.
    """
    check_type("model", model, GPT2)
    request = Request(
        config=model.config,
        tokenizer=model.tokenizer,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        mode=mode,
        sampling=Sampling() if sampling is None else sampling,
        stop=stop,
        ignore_eos=ignore_eos,
        engine=engine,
        guesses=guesses,
    )
    return run(model, request, on_text=on_text, progress=progress)


@without_autocast
@torch.inference_mode()
def run(
    model: GPT2,
    request: Request,
    *,
    on_text: Callable[[int, str], None] | None = None,
    progress: bool = False,
) -> Generation:
    """Run a request made for this model's configuration; see generate()."""
    if request.config != model.config:
        raise RequestError("the request was made for a model with another configuration")
    model = model.up_to(max(map(len, request.rows)) + request.max_new_tokens)
    if on_text is not None and not callable(on_text):
        raise RequestError(f"on_text must be callable, not {on_text!r}")
    if on_text and request.tokenizer is None:
        raise RequestError("streamed text needs a model with a tokenizer")
    watchers = [Watcher(request, row, on_text) for row in range(len(request.rows))]
    watch = progress or bool(watchers[0].stream or watchers[0].eos)
    with model.on_device():
        try:
            return _generate(model, request, watchers, watch=watch, progress=progress)
        except torch.OutOfMemoryError:
            if any(watcher.tokens or watcher.finish for watcher in watchers) or not clear_all():
                raise
        torch.cuda.empty_cache()  # after the handler: the error keeps tensors alive there
        return _generate(model, request, watchers, watch=watch, progress=progress)


def _generate(
    model: GPT2, request: Request, watchers: list[Watcher], *, watch: bool, progress: bool
) -> Generation:
    """Generate; without `watch`, give the watchers all tokens at the end."""
    started = time.perf_counter()
    engine, keep = lend_engine(model, request)
    interrupted = False
    marks = Marks(model.device)
    warm_up_s = 0.0
    try:
        engine.warm_up()
        marks.synchronize()
        warm_up_s = time.perf_counter() - started
        marks.add()
        watching = watchers if watch else []
        if isinstance(engine, Speculative):
            _speculate(engine, watching, request.max_new_tokens, marks, progress)
        else:
            _run(engine, watching, request.max_new_tokens, marks, progress)
    except KeyboardInterrupt:
        interrupted = True
    marks.add()
    marks.synchronize()

    if not watch:
        done = request.max_new_tokens
        if interrupted:
            done = int((engine.lengths - engine.prompt_lengths).min()) if warm_up_s else 0
        for step, tokens in enumerate(zip(*engine.new_tokens(done), strict=True)):
            _see(engine, watchers, step, tokens)
    for watcher in watchers:
        watcher.end("interrupted" if interrupted else "length")
    seconds = marks.seconds()  # at the start, the first token, ..., the end
    intervals = [b - a for a, b in itertools.pairwise(seconds[1:-1])]
    generation = Generation(
        prompts=request.rows,
        tokens=[w.tokens for w in watchers],
        finish_reasons=[w.finish for w in watchers if w.finish is not None],
        mode=request.mode,
        attention=model.attention.name,
        decode_attention=engine.backend(1) if request.mode == "kv-cache" else None,
        engine=engine.name,
        length_step=engine.length_step if request.mode == "recompute" else 1,
        warm_up_s=warm_up_s,
        prefill_s=seconds[1] if len(seconds) > 1 else 0.0,
        generation_s=seconds[-1] if seconds else 0.0,
        intervals_s=intervals if watch and not request.guesses else [],
        passes=engine.passes if isinstance(engine, Speculative) else None,
        texts=[w.whole_text() for w in watchers] if request.tokenizer else [],
    )
    if not interrupted:
        keep()
    return generation


def _run(engine: Engine, watchers: list[Watcher], steps: int, marks: Marks, progress: bool) -> None:
    """Run all steps, or until every watcher has finished; without watchers, read no tokens."""
    is_cuda = engine.device.type == "cuda"
    lag = 1 if is_cuda else 0
    newest, pins = engine.newest[: engine.batch], is_cuda and bool(watchers)
    host = torch.empty(steps, len(newest), dtype=torch.long, device="cpu", pin_memory=pins)
    with tqdm(total=steps, unit="tok", disable=None if progress else True) as bar:
        for step in range(steps + lag):
            if step < steps:
                engine.step(step)
                if watchers:
                    host[step].copy_(newest, non_blocking=True)
                if watchers or step == 0:
                    marks.add()
            if watchers and step >= lag:
                marks.wait(step - lag + 1)
                _see(engine, watchers, step - lag, host[step - lag].tolist())
                bar.update()
                if all(watcher.finish for watcher in watchers):
                    return


def _speculate(
    engine: Speculative, watchers: list[Watcher], steps: int, marks: Marks, progress: bool
) -> None:
    """Run passes until a row has all its tokens, or its watcher has finished.

    The device is one look ahead of the host, which decides by the text so far whether to guess.
    """
    text, first = Text(engine.tokens[0, : engine.longest].tolist()), engine.longest
    waiting, last, looks = deque[tuple[int, int]](), first + steps, 0  # waiting: see enqueue()
    with tqdm(total=steps, unit="tok", disable=None if progress else True) as bar:
        while (known := len(text.tokens)) < last:
            most = last - known - sum(new for new, _ in waiting)
            if len(waiting) < 2 and most > 0:
                waiting.append(engine.enqueue(looks, most, guess=text.repeats))
                marks.add()
                looks += 1
                continue
            look = looks - len(waiting)
            marks.wait(look + 1)
            _, passes = waiting.popleft()
            seen = engine.seen[look % 2][0, known:].tolist()
            new = [*itertools.takewhile(lambda token: token != UNWRITTEN, seen)]
            for step, token in enumerate(new, known - first):
                _see(engine, watchers, step, [token] * len(watchers))
            text.add(new)
            used = len(watchers[0].tokens) - (known - first) if watchers else len(new)
            engine.passes += min(passes, used)
            bar.update(len(new))
            if watchers and watchers[0].finish:
                return


def _see(engine: Engine, watchers: list[Watcher], step: int, tokens: Sequence[int]) -> None:
    """Give each unfinished watcher its row's token of a step; raises NotFiniteError for -1."""
    for watcher, token in zip(watchers, tokens, strict=True):
        if token < 0 and not watcher.finish:
            backend, dtype = engine.backend(step), dtype_name(engine.model.dtype)
            position = int(engine.prompt_lengths[watcher.row]) + step - 1
            raise NotFiniteError(
                f"with attention backend {backend} in {dtype} the logits at position {position} of "
                f"prompt {watcher.row + 1} are not finite: the kernel, the weights or the dtype is "
                "at fault"
            )
        watcher.see(token)


class Marks:
    """Timestamps: CUDA events, which need no synchronization, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def add(self) -> None:
        """Record the time at which the device reaches this point."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def synchronize(self) -> None:
        """Wait for the current stream, not for other threads' work on the device."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def wait(self, index: int) -> None:
        """Wait until the device has reached a mark."""
        if self._device.type == "cuda":
            self._events[index].synchronize()

    def seconds(self) -> list[float]:
        """Return the seconds from the first mark to each mark."""
        if self._device.type == "cuda":
            return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        return [moment - self._times[0] for moment in self._times]
