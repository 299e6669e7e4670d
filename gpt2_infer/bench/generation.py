"""Compare end-to-end generation: backends in one model, and transformers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_kernels import BackendSpec
from attention_kernels.contract import Kernels
from attention_kernels.judge.conformance import KERNEL_ERRORS, Case
from attention_kernels.judge.reference import check_precision
from attention_kernels.judge.worker import open_runner
from attention_kernels.precision import PLAIN_PRECISIONS
from gpt2_infer.bench import environment, models, selection
from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, GenerationCell, Row
from gpt2_infer.bench.study import LENGTHS, Contender, GenerationStudy, RejectedError, Subject
from gpt2_infer.diverge.backends import examine
from gpt2_infer.engines import DECODE_ATTENTION
from gpt2_infer.engines.base import GRAPH_LENGTH_STEP
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Generation, generate
from gpt2_infer.model import GPT2
from gpt2_infer.request import encode_prompts

TRANSFORMERS = "transformers"


class _Text(NamedTuple):
    """A generated text, and our program's record of the run."""

    tokens: list[list[int]]
    generation: Generation | None = None


class Texts(Subject[GenerationCell]):
    """Times greedy generation; a sample is seconds to the last token, or of the whole call.

    The tokens of every timed call are compared with the baseline's, the first contender of a cell;
    where they diverge, examine() says whether that is a tie. FREE_ATTENTION is one more contender.
    In a dtype that the baseline does not support, texts are not compared.
    """

    def __init__(self, study: GenerationStudy) -> None:
        check_precision()
        self.study, self.rounds = study, study.rounds
        self.device, specs, baseline = selection.selected(study, cpu_families=("pytorch",))
        lengths = study.max_tokens or LENGTHS[self.device]["max_tokens"]
        combined = itertools.product(study.dtypes, study.batch_sizes, study.modes, lengths)
        cells = [GenerationCell(n, batch, dtype, mode) for dtype, batch, mode, n in combined]
        if "float64" in study.dtypes:
            raise RequestError("text is generated in float32, float16 or bfloat16, not in float64")
        self.cells = sorted(cells, key=lambda cell: cell.dtype)
        self._models = models.OneModel(
            random_weights=study.random_weights,
            device=self.device,
            attention=BASELINE,  # a placeholder that supports every dtype
        )
        model = self._models.load(study.model, self.cells[0].dtype)
        (self.prompt,) = encode_prompts(model.tokenizer, [study.prompt])  # type: ignore[arg-type]
        for cell in self.cells:
            self._check_room(cell, model)
        self.facts = {
            "device": self.device,
            "model": study.model + (", random weights, seed 0" if study.random_weights else ""),
            "prompt_tokens": len(self.prompt),
            "prompt_digest": environment.token_digest([self.prompt]),
            "weights_digest": weights_digest(model),
            "dtype_of_digest": self.cells[0].dtype,
        }
        if study.transformers:
            self.facts |= {"baseline": TRANSFORMERS, "graph_length_step": GRAPH_LENGTH_STEP}
            self.specs = specs
        else:
            kinds = [(cell.dtype, model.config.head_dim, cell.max_tokens) for cell in cells]
            first, specs = selection.with_baseline(baseline, specs, kinds, self.device)
            others = [spec for spec in specs if spec.name != first.name]
            self.specs = [first, *others, _free_attention()]
            self.facts["baseline"] = first.name

    def _check_room(self, cell: GenerationCell, model: GPT2) -> None:
        """Raise RequestError if the text does not fit the model or the device."""
        if not len(self.prompt) < cell.max_tokens <= model.config.n_positions:
            raise RequestError(
                f"max_tokens {cell.max_tokens} must exceed the prompt's {len(self.prompt)} tokens "
                f"and fit into the model's {model.config.n_positions} positions"
            )
        itemsize = getattr(torch, cell.dtype).itemsize
        states = cell.batch * cell.max_tokens * model.config.n_embd * itemsize
        what = f"the states between two layers at batch {cell.batch}, {cell.max_tokens} tokens"
        selection.check_memory(what, states, self.device)

    def contenders(self, cell: GenerationCell) -> Iterator[Contender]:
        """Check each backend and compare its text with the first's."""
        model, expected = self._models.load(self.study.model, cell.dtype), None
        if self.study.transformers:
            contender, expected = _transformers(models.reference_of(model), cell, self.prompt)
            yield contender
        for spec in (spec for spec in self.specs if cell.dtype in spec.precisions):
            contender, text = self._ours(model, spec, cell, expected)
            if spec is self.specs[0] and not self.study.transformers:
                expected = text
            yield contender
        if self.study.fused and cell.mode == "kv-cache" and cell.dtype == "float32":
            yield self._fused(model, cell, expected)

    def _fused(self, model: GPT2, cell: GenerationCell, expected: _Text | None) -> Contender:
        """Return the fused engine, which has its own attention; its text is compared."""
        extra = {
            "attention": model.with_attention(None).attention.name,
            "decode_attention": DECODE_ATTENTION,
            "precision": PLAIN_PRECISIONS[cell.dtype],
        }
        row = Row(contender="fused", metric=self.study.timed, unit="s", extra=extra)
        call = functools.partial(_write, model, None, cell, self.prompt)
        try:
            text, beside = _text_and_peak(row.contender, call, model)
        except RequestError as error:
            row.status, row.reason = "refused", str(error)
            return Contender(row)
        row.extra["token_digest"] = environment.token_digest(text.tokens)
        if expected and text.tokens != expected.tokens:
            _compare(row, model, [], [expected, _Text(text.tokens)])
        sample = functools.partial(_sample, row, call, text.tokens, model.device)
        return Contender(row, sample if row.status == "ok" else None, beside=beside)

    def _ours(
        self, model: GPT2, spec: BackendSpec, cell: GenerationCell, expected: _Text | None
    ) -> tuple[Contender, _Text | None]:
        """Check a backend and return it with its text."""
        is_free = spec.name == FREE_ATTENTION
        row = selection.row_of(spec, cell.dtype, self.study.timed, "s", self.sources)
        row.extra |= {"attention": spec.name} | ({"precision": "none"} if is_free else {})
        if cell.mode == "kv-cache":
            row.extra["decode_attention"] = spec.name
        contender, text = Contender(row), None
        try:
            if not is_free:
                _check(row, model, spec, cell, len(self.prompt))
            if row.status == "ok":
                call = functools.partial(_write, model, spec, cell, self.prompt)
                text, contender.beside = _text_and_peak(spec.name, call, model)
                is_first = spec is self.specs[0]
                row.extra["token_digest"] = environment.token_digest(text.tokens)
                row.extra["text_compared"] = not is_free and (expected is not None or is_first)
                if expected and not is_free and text.tokens != expected.tokens:
                    _compare(row, model, [self.specs[0], spec], [expected, text])
            if row.status == "ok" and text:
                tokens = None if is_free else text.tokens
                contender.sample = functools.partial(_sample, row, call, tokens, model.device)
        except KERNEL_ERRORS as error:
            selection.record_failure(row, error, self.device)
        return contender, text


def _compare(row: Row, model: GPT2, specs: list[BackendSpec], texts: list[_Text]) -> None:
    """Record why the second text differs from the first."""
    expected, ours = (text.generation for text in texts)
    if expected and ours:
        # Examine these texts: generated again or outside the batch, they might differ.
        found = examine(model, specs, [expected, ours])
        row.extra["diverges"] = found.verdict
        if not found.passed:
            fault = "; ".join(found.b.faults or found.a.faults)
            row.status, row.reason = "failed", f"{found.verdict}: {fault}"
    else:
        pairs = enumerate(zip(*(text.tokens[0] for text in texts), strict=True))
        at = next((i for i, (wanted, got) in pairs if got != wanted), 0)
        row.status = "failed"
        row.reason = f"its greedy tokens differ from transformers' from token {at} on"


def weights_digest(model: GPT2) -> str:
    """Return a SHA-256 over the parameters' names and bytes."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _transformers(
    reference: Any, cell: GenerationCell, prompt: Sequence[int]
) -> tuple[Contender, _Text]:
    """Return transformers' greedy generate(), with its default attention, and its text."""
    device = reference.device
    ids = torch.tensor([[*prompt]] * cell.batch, device=device)
    new_tokens, use_cache = cell.max_tokens - len(prompt), cell.mode == "kv-cache"

    def call() -> _Text:
        return _Text(models.generated(reference, ids, new_tokens, use_cache=use_cache).tolist())

    text = call()
    row = Row(
        contender=TRANSFORMERS,
        metric="call",
        unit="s",
        extra={
            "program": "transformers",
            "attention": reference.config._attn_implementation,
            # SDPA's choice for float32: its CPU kernel, or the memory-efficient one on CUDA.
            "precision": "3xtf32" if device.type == "cuda" else "ieee-fp32",
            "token_digest": environment.token_digest(text.tokens),
        },
    )
    return Contender(row, functools.partial(_sample, row, call, text.tokens, device)), text


def _check(row: Row, model: GPT2, spec: BackendSpec, cell: GenerationCell, length: int) -> None:
    """Check a backend at the lengths that the generation uses."""
    # Check intermediate lengths, too: tuning for a size must precede all measurements.
    between = [n for n in (64, 128, 256, 512) if length < n < cell.max_tokens]
    config, dtype = model.config, getattr(torch, cell.dtype)
    cases = [
        Case(n, config.head_dim, 1.0, cell.batch, config.n_head, dtype=dtype)
        for n in (length, *between, cell.max_tokens)
    ]
    with contextlib.closing(open_runner(spec, model.device.type)) as runner:
        selection.check(row, runner, cases, decode=cell.mode == "kv-cache")


def _write(
    model: GPT2, spec: BackendSpec | None, cell: GenerationCell, prompt: Sequence[int]
) -> _Text:
    """Generate a text with our program: with a backend, or in the fused engine."""
    done = generate(
        model.with_attention(spec, spec if cell.mode == "kv-cache" else None),
        [[*prompt]] * cell.batch,
        max_new_tokens=cell.max_tokens - len(prompt),
        mode=cell.mode,
        ignore_eos=True,
        engine="auto" if spec else "fused",
    ).whole()
    return _Text(done.tokens, done)


def _sample(
    row: Row, call: Callable[[], _Text], expected: list[list[int]] | None, device: torch.device
) -> dict[str, float]:
    """Take one sample; raises RejectedError if the text changes or the kernel raises."""
    with selection.rejecting(row, device.type):
        text, seconds = models.timed(device, call)
    if expected is not None and text.tokens != expected:
        raise RejectedError("its text changes from run to run")
    figures = {"call": seconds}
    if found := text.generation:
        figures |= {"warm-up": found.warm_up_s, "prefill": found.prefill_s}
        figures["generation"] = found.generation_s
    return figures


def _text_and_peak(name: str, call: Callable[[], _Text], model: GPT2) -> tuple[_Text, list[Row]]:
    """Return a text and the peak device memory while it was generated, weights included."""
    if model.device.type != "cuda":
        return call(), []
    torch.cuda.synchronize()
    model.release()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    text = call()
    peak = torch.cuda.max_memory_allocated(model.device)
    return text, [Row(contender=name, metric="peak memory", unit="bytes", samples=[peak])]


def _free_attention() -> BackendSpec:
    """Build an unregistered backend that skips attention and returns cached zero tensors."""
    zeros = functools.cache(
        lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
    )

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
        return zeros(q.shape, q.dtype, q.device)

    def decode(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, softmax_scale: float
    ) -> Tensor:
        return zeros(q.shape, q.dtype, q.device)

    return BackendSpec(
        name=FREE_ATTENTION,
        family="bound",
        summary="No attention at all: the time of everything else.",
        loader=lambda: Kernels(attention, decode),
        precisions=PLAIN_PRECISIONS,
    )
