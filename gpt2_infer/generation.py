"""Text generation: recompute or KV cache, one prompt or several, eager or in CUDA graphs.

The loop lives on the device. Tokens, lengths and random numbers are device tensors, so a step
neither reads from nor waits for the device. Where someone watches (streaming, end of text, stop
strings) tokens are copied to pinned memory and read one step late, while the next step runs.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from tqdm import tqdm

from attention_kernels.contract import dtype_name
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines import ENGINES, Engine, make_engine
from gpt2_infer.engines.base import EngineName
from gpt2_infer.errors import NotFiniteError, RequestError
from gpt2_infer.model import GPT2
from gpt2_infer.sampling import Sampling
from gpt2_infer.tokenizer import TextStream, Tokenizer

Mode = Literal["recompute", "kv-cache"]
FinishReason = Literal["length", "end-of-text", "stop", "interrupted"]
MODES: tuple[Mode, ...] = ("recompute", "kv-cache")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate, checked against a model's configuration when it is made.

    Raises RequestError for what such a model cannot meet.
    """

    config: GPT2Config
    tokenizer: Tokenizer | None
    prompts: str | Sequence[str] | Sequence[Sequence[int]]
    max_new_tokens: int = 512
    mode: Mode = "recompute"
    sampling: Sampling = field(default_factory=Sampling)
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    engine: Literal["auto"] | EngineName = "auto"
    check_finite: bool = True
    """Raise NotFiniteError where logits are; otherwise token 0 is taken."""
    rows: list[list[int]] = field(init=False)
    """The prompts' token ids."""
    stops: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise RequestError(f"max-new-tokens must be 1 or more, not {self.max_new_tokens}")
        if self.engine not in ENGINES:
            raise RequestError(f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(stops):
            raise RequestError("a stop string must not be empty")
        if stops and self.tokenizer is None:
            raise RequestError("stop strings need a model with a tokenizer")
        prompts = [self.prompts] if isinstance(self.prompts, str) else self.prompts
        rows = encode_prompts(self.tokenizer, prompts)
        longest, positions = max(map(len, rows)), self.config.n_positions
        if longest + self.max_new_tokens > positions:
            raise RequestError(
                f"{longest} prompt tokens and {self.max_new_tokens} new ones are "
                f"{longest + self.max_new_tokens}, and this model has {positions} positions: "
                "shorten the prompt or lower --max-new-tokens"
            )
        vocab_size = self.config.vocab_size
        outside = sorted({token for row in rows for token in row if not 0 <= token < vocab_size})
        if outside:
            raise RequestError(
                f"token ids {outside[:5]} are outside the vocabulary of {vocab_size}"
            )
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "stops", stops)


@dataclass
class Generation:
    """What was generated, how, and how long it took."""

    prompts: list[list[int]]
    """Token ids per row."""
    tokens: list[list[int]]
    """New token ids per row, without the end-of-text token that ended it."""
    finish_reasons: list[FinishReason]
    mode: Mode
    attention: str
    decode_attention: str | None
    engine: EngineName
    length_step: int
    """Recompute ran at lengths rounded up to multiples of it."""
    warm_up_s: float
    """Loading kernels and capturing the first graphs."""
    prefill_s: float
    """From the start to the first new token."""
    generation_s: float
    """From the start to the last new token, prefill included."""
    intervals_s: list[float] = field(default_factory=list)
    """Between a token and the next, on the device; empty if nobody watched for the text's end."""
    texts: list[str] = field(default_factory=list)
    """The new text per row, cut before a stop string; empty without a tokenizer."""

    def whole(self) -> Generation:
        """Return self, or raise KeyboardInterrupt if generation was interrupted."""
        if "interrupted" in self.finish_reasons:
            raise KeyboardInterrupt
        return self

    @property
    def new_tokens(self) -> int:
        """The number of new tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over generation_s."""
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
    check_finite: bool = True,
) -> Generation:
    """Continue each prompt by up to max_new_tokens tokens.

    prompts: a text, texts, or lists of token ids; an empty text stands for GPT-2's <|endoftext|>.
    Rows of different lengths are right-padded and equal to running each alone; row i samples from
    seed + i.
    mode: "recompute" re-runs the whole prefix for every token (the case study's workload),
    "kv-cache" keeps keys and values. stop: texts that end a row. on_text(row, piece) is called as
    text becomes certain. engine: "eager", "graph", "fused" or "auto", the fastest that supports the
    case. check_finite: see Request. KeyboardInterrupt ends generation early.
    Raises RequestError, UnavailableBackendError or UnsupportedError before any long work, and
    NotFiniteError for logits that are NaN or infinite.
    """
    request = Request(
        config=model.config,
        tokenizer=model.tokenizer,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        mode=mode,
        sampling=sampling or Sampling(),
        stop=stop,
        ignore_eos=ignore_eos,
        engine=engine,
        check_finite=check_finite,
    )
    return run(model, request, on_text=on_text, progress=progress)


@torch.inference_mode()
def run(
    model: GPT2,
    request: Request,
    *,
    on_text: Callable[[int, str], None] | None = None,
    progress: bool = False,
) -> Generation:
    """Generate what was requested of this model's configuration; see generate()."""
    if request.config != model.config:
        raise RequestError("the request was checked for a model of another configuration")
    model = model.up_to(max(map(len, request.rows)) + request.max_new_tokens)
    tokenizer, wants_text = model.tokenizer, bool(request.stops or on_text)
    if wants_text and tokenizer is None:
        raise RequestError("streamed text needs a model with a tokenizer")
    rows, mode = request.rows, request.mode
    engine = make_engine(model, request)
    eos = () if request.ignore_eos else model.config.eos_token_id
    watchers = [
        Watcher(
            i,
            eos,
            request.stops,
            tokenizer.stream() if tokenizer and wants_text else None,
            on_text,
        )
        for i in range(len(rows))
    ]
    watch = wants_text or bool(eos) or progress
    started = time.perf_counter()
    interrupted = False
    marks = Marks(model.device)
    warm_up_s = 0.0
    try:
        engine.warm_up()
        marks.synchronize()
        warm_up_s = time.perf_counter() - started
        marks.add()
        _run(engine, watchers if watch else [], request.max_new_tokens, marks, progress)
    except KeyboardInterrupt:
        interrupted = True
    marks.add()
    marks.synchronize()

    done = engine.steps_done() if not interrupted or warm_up_s else 0
    if not watch:
        for step, tokens in enumerate(zip(*engine.new_tokens(done), strict=True)):
            _see(engine, watchers, step, tokens)
    for watcher in watchers:
        watcher.end("interrupted" if interrupted else "length")
    texts = (
        [w.text if wants_text else tokenizer.decode(w.tokens) for w in watchers]
        if tokenizer
        else []
    )
    seconds = marks.seconds()  # the start, the first token, ... the end
    return Generation(
        prompts=rows,
        tokens=[w.tokens for w in watchers],
        finish_reasons=[w.finish for w in watchers if w.finish is not None],
        mode=mode,
        attention=model.attention.name,
        decode_attention=engine.backend(1) if mode == "kv-cache" else None,
        engine=engine.name,
        length_step=engine.length_step if mode == "recompute" else 1,
        warm_up_s=warm_up_s,
        prefill_s=seconds[1] if len(seconds) > 1 else 0.0,
        generation_s=seconds[-1] if seconds else 0.0,
        intervals_s=[b - a for a, b in itertools.pairwise(seconds[1:-1])],
        texts=texts,
    )


def encode_prompts(
    tokenizer: Tokenizer | None, prompts: Sequence[str] | Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the token ids of each prompt; an empty text becomes <|endoftext|>.

    Raises RequestError where there is no prompt, no tokenizer for a text, or no id to begin with.
    """
    try:
        count = len(prompts)
    except TypeError as error:
        raise RequestError(f"prompts are texts or lists of token ids: {error}") from error
    if count == 0:
        raise RequestError("there is no prompt")
    rows = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError("this model has no tokenizer: give the prompt as token ids")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is not valid text: {error.reason}") from error
            ids = tokenizer.encode(prompt)
            if not ids and tokenizer.end_of_text is not None:
                ids = [tokenizer.end_of_text]
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError as error:
                raise RequestError(f"a prompt is a text or a list of ids: {error}") from error
        if not ids:
            raise RequestError(
                "the prompt is empty and there is no end-of-text token to begin with"
            )
        rows.append(ids)
    return rows


def _run(engine: Engine, watchers: list[Watcher], steps: int, marks: Marks, progress: bool) -> None:
    """Run all steps, or until every watcher has finished; without watchers nothing is read."""
    reader = _Reader(engine, steps, marks) if watchers else None
    lag = 1 if engine.device.type == "cuda" else 0
    with tqdm(total=steps, unit="tok", disable=None if progress else True) as bar:
        for step in range(steps + lag):
            if step < steps:
                engine.step(step)
                if reader:
                    reader.push(step)
                if reader or step == 0:
                    marks.add()
            if reader and step >= lag:
                _see(engine, watchers, step - lag, reader.read(step - lag))
                bar.update()
                if all(watcher.finish for watcher in watchers):
                    return


def _see(engine: Engine, watchers: list[Watcher], step: int, tokens: Sequence[int]) -> None:
    """Show each unfinished watcher its row's token of that step; NotFiniteError for -1."""
    for watcher, token in zip(watchers, tokens, strict=True):
        if token < 0 and not watcher.finish:
            backend, dtype = engine.backend(step), dtype_name(engine.model.dtype)
            position = engine.position(watcher.row, step)
            raise NotFiniteError(
                f"with attention backend {backend} in {dtype} the logits at position {position} of "
                f"prompt {watcher.row + 1} are not finite: the kernel, the weights or the dtype is "
                "at fault"
            )
        watcher.see(token)


class _Reader:
    """Copy new tokens to the host: on CUDA through pinned memory, one step late."""

    def __init__(self, engine: Engine, steps: int, marks: Marks) -> None:
        self._marks = marks  # one after each push
        self._newest = engine.newest[: engine.batch]
        is_cuda = engine.device.type == "cuda"
        self._host = torch.empty(steps, engine.batch, dtype=torch.long, pin_memory=is_cuda)

    def push(self, step: int) -> None:
        self._host[step].copy_(self._newest, non_blocking=True)

    def read(self, step: int) -> list[int]:
        self._marks.wait(step + 1)
        ids: list[int] = self._host[step].tolist()
        return ids


@dataclass
class Watcher:
    """One row as the host sees it: its tokens, its text, and why it ended."""

    row: int
    eos: Sequence[int]
    stop: Sequence[str]
    stream: TextStream | None
    on_text: Callable[[int, str], None] | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sent: int = 0  # characters that on_text has
    finish: FinishReason | None = None

    def see(self, token: int) -> None:
        """Take the row's next token; ignored once the row has finished."""
        if self.finish:
            return
        if token in self.eos:
            self.end("end-of-text")
            return
        self.tokens.append(token)
        if self.stream:
            self._add(self.stream.feed(token))

    def end(self, reason: FinishReason) -> None:
        """Finish the row unless it is finished."""
        if self.finish:
            return
        if self.stream:
            self._add(self.stream.finish())
        self.finish = self.finish or reason
        self._send(len(self.text))

    def _add(self, piece: str) -> None:
        searched = max(0, len(self.text) - max(map(len, self.stop), default=0))
        self.text += piece
        found = [at for text in self.stop if (at := self.text.find(text, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish = "stop"
            self._send(len(self.text))
        else:
            # What may be the beginning of a stop string is held back.
            held = (
                n for text in self.stop for n in range(1, len(text)) if self.text.endswith(text[:n])
            )
            self._send(len(self.text) - max(held, default=0))

    def _send(self, upto: int) -> None:
        if self.on_text and upto > self.sent:
            self.on_text(self.row, self.text[self.sent : upto])
            self.sent = upto


class Marks:
    """Points in time: CUDA events, which cost no synchronization, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def add(self) -> None:
        """Mark the moment at which the device comes here."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def wait(self, index: int) -> None:
        """Wait until the device has come to a mark."""
        if self._device.type == "cuda":
            self._events[index].synchronize()

    def seconds(self) -> list[float]:
        """Return the seconds from the first mark to each."""
        if self._device.type == "cuda":
            return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        return [moment - self._times[0] for moment in self._times]
