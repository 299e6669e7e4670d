"""Comparing generation end to end: backends in one model, and our program beside transformers."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attention_kernels import BackendSpec, ladder
from attention_kernels.conformance import KERNEL_ERRORS, Case, describe_error
from attention_kernels.contract import PLAIN_PRECISIONS, Kernels
from attention_kernels.reference import check_precision
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.diverge import examine
from gpt2_infer.bench.results import (
    BASELINE,
    FREE_ATTENTION,
    GenerationCell,
    GenerationSeries,
    GenerationTiming,
)
from gpt2_infer.bench.timing import Contender, Progress, RejectedError, time_cells
from gpt2_infer.engines.base import GRAPH_LENGTH_STEP
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Generation, generate
from gpt2_infer.model import GPT2
from gpt2_infer.request import MODES, Mode, encode_prompts

TRANSFORMERS = "transformers"
Timed = Literal["generation", "call"]


class _Text(NamedTuple):
    """What a program wrote, and what ours says of how."""

    tokens: list[list[int]]
    generation: Generation | None = None


def compare_generation(
    load: Callable[[torch.dtype], GPT2],
    specs: Sequence[BackendSpec],
    cells: Sequence[GenerationCell],
    prompt: str | Sequence[int],
    *,
    name: str,
    rounds: int = 5,
    baseline: str | BackendSpec = BASELINE,
    task: str = "generation",
    out: Path | None = None,
) -> GenerationTiming:
    """Time generation with each backend: a sample is seconds from the prompt to the last token.

    load: returns the model in a dtype, and is called once for each. name: what the results call it.
    Every timed call's greedy tokens are compared with the baseline's; where they part, examine()
    says whether that is a tie. baseline: as for compare_kernels(); in a dtype that it does not
    take, texts are compared with none. FREE_ATTENTION is one more contender. out: as for
    compare_kernels(). Raises RequestError or ResultsError.
    """
    cells = sorted(cells, key=lambda cell: cell.dtype)
    models = _Models(load)
    results = _plan(models, cells, prompt, rounds, name=name, task=task)
    head_dim = models.newest.config.head_dim
    kinds = [(cell.dtype, head_dim, cell.max_tokens) for cell in cells]
    first, specs = selection.with_baseline(baseline, specs, kinds, results.device)
    results.baseline, results.backends = first.name, [spec.name for spec in specs]
    specs = [first, *(spec for spec in specs if spec.name != first.name), _free_attention()]
    return _run(results, models, dict.fromkeys(MODES, specs), prompt, out)


def compare_with_transformers(
    model: GPT2,
    reference: Any,
    specs: Mapping[Mode, Sequence[BackendSpec]],
    cells: Sequence[GenerationCell],
    prompt: Sequence[int],
    *,
    name: str,
    rounds: int = 5,
    task: str = "generation",
    out: Path | None = None,
) -> GenerationTiming:
    """Time whole calls of transformers' generate() and of ours, with the same weights.

    reference: transformers' model. specs: our backends in each mode. A backend whose greedy tokens
    differ from transformers' is recorded as failed. Raises RequestError or ResultsError.
    """
    models = _Models(lambda _: model)
    results = _plan(models, cells, prompt, rounds, name=name, task=task)
    results.baseline, results.timed = TRANSFORMERS, "call"
    results.graph_length_step = GRAPH_LENGTH_STEP if results.device == "cuda" else None
    ours = dict.fromkeys(spec.name for of_mode in specs.values() for spec in of_mode)
    results.backends = [TRANSFORMERS, *ours]
    return _run(results, models, specs, prompt, out, reference)


def encode_prompt(model: GPT2, prompt: str | Sequence[int]) -> list[int]:
    """Return the prompt's token ids; raises RequestError."""
    (ids,) = encode_prompts(model.tokenizer, [prompt] if isinstance(prompt, str) else [[*prompt]])
    return ids


def weights_digest(model: GPT2) -> str:
    """Return a SHA-256 over the parameters' names and bytes."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Models:
    """The model in the dtype of the cell; the one before it is dropped."""

    def __init__(self, load: Callable[[torch.dtype], GPT2]) -> None:
        self._load = load
        self.newest: GPT2

    def get(self, dtype: str) -> GPT2:
        wanted = getattr(torch, dtype)
        if not hasattr(self, "newest") or self.newest.dtype != wanted:
            self.newest = self._load(wanted)
        return self.newest


def _plan(
    models: _Models,
    cells: Sequence[GenerationCell],
    prompt: str | Sequence[int],
    rounds: int,
    *,
    name: str,
    task: str,
) -> GenerationTiming:
    """Return results without series; raises RequestError for what cannot be compared."""
    selection.check_rounds(rounds)
    check_precision()
    if not cells:
        raise RequestError("there is nothing to compare")
    if "float64" in {cell.dtype for cell in cells}:
        raise RequestError("text is generated in float32, float16 and bfloat16, not in float64")
    model = models.get(cells[0].dtype)
    ids = encode_prompt(model, prompt)
    for cell in cells:
        if not len(ids) < cell.max_tokens <= model.config.n_positions:
            raise RequestError(
                f"{cell.max_tokens} tokens in all: the prompt has {len(ids)}, and the model "
                f"{model.config.n_positions} positions"
            )
        itemsize = getattr(torch, cell.dtype).itemsize
        states = cell.batch * cell.max_tokens * model.config.n_embd * itemsize
        what = f"the states between two layers at batch {cell.batch}, {cell.max_tokens} tokens"
        selection.check_memory(what, states, model.device.type)
    return GenerationTiming(
        task=task,
        provenance=environment.provenance(),
        device=model.device.type,
        baseline="",
        rounds=rounds,
        backends=[],
        cells=[*cells],
        model=name,
        prompt_tokens=len(ids),
        prompt_digest=environment.token_digest([ids]),
        weights_digest=weights_digest(model),
        dtype_of_digest=cells[0].dtype,
        series=[],
    )


def _run(
    results: GenerationTiming,
    models: _Models,
    specs: Mapping[Mode, Sequence[BackendSpec]],
    prompt: str | Sequence[int],
    out: Path | None,
    reference: Any = None,
) -> GenerationTiming:
    """Time the cells, and write the output.

    The first contender of a cell is the one whose text the others' are compared with: the first
    backend, or transformers if there is a reference.
    """
    settings = {
        name: getattr(results, name)
        for name in results.__struct_fields__
        if name not in ("provenance", "series")
    }
    prompt_ids = encode_prompt(models.newest, prompt)
    every = list({spec.name: spec for of_mode in specs.values() for spec in of_mode}.values())
    sources = {spec.name: environment.backend_digest(spec) for spec in every}
    progress = Progress(out, GenerationSeries, results.provenance, settings, sources)
    ladder.build_all(results.device, every)

    def contenders(cell: GenerationCell) -> Iterator[Contender[GenerationSeries]]:
        model, expected = models.get(cell.dtype), None
        if reference is not None:
            contender, expected = _transformers(reference, cell, prompt_ids)
            yield contender
        takers = [spec for spec in specs[cell.mode] if cell.dtype in spec.precisions]
        for spec in takers:
            first = specs[cell.mode][0]
            contender, text = _ours(
                model, spec, cell, prompt_ids, sources, results.timed, first, expected
            )
            if spec is first and reference is None:
                expected = text
            yield contender

    results.series = time_cells(results.cells, contenders, rounds=results.rounds, progress=progress)
    if out:
        results.write(out)
    progress.remove()
    return results


def _ours(
    model: GPT2,
    spec: BackendSpec,
    cell: GenerationCell,
    prompt: Sequence[int],
    sources: Mapping[str, str | None],
    timed: Timed,
    first: BackendSpec,
    expected: _Text | None,
) -> tuple[Contender[GenerationSeries], _Text | None]:
    """Return a backend, checked, with its text, which is compared with what is expected.

    first: the backend that wrote it, unless transformers did.
    """
    device, is_free = model.device.type, spec.name == FREE_ATTENTION
    series = GenerationSeries(
        cell=cell,
        attention=spec.name,
        decode_attention=spec.name if cell.mode == "kv-cache" else None,
        **selection.facts(spec, cell.dtype, sources) | ({"precision": "none"} if is_free else {}),
    )
    contender = Contender(series)
    text = None
    try:
        if not is_free:
            _check(series, model, spec, cell, len(prompt))
        if series.status == "ok":
            call = functools.partial(_write, model, spec, cell, prompt)
            text, series.peak_memory_bytes = _text_and_peak(call, model)
            series.token_digest = environment.token_digest(text.tokens)
            series.text_compared = not is_free and (expected is not None or spec is first)
            if expected and not is_free and text.tokens != expected.tokens:
                _compare(series, model, [first, spec], [expected, text])
        if series.status == "ok" and text:
            tokens = None if is_free else text.tokens
            contender.sample = functools.partial(_sample, series, call, tokens, timed, device)
    except KERNEL_ERRORS as error:
        selection.record_failure(series, error, device)
    return contender, text


def _compare(
    series: GenerationSeries, model: GPT2, specs: list[BackendSpec], texts: list[_Text]
) -> None:
    """Record why a text, the second, is not the first."""
    expected, ours = (text.generation for text in texts)
    if expected and ours:
        # The texts as they were written: again, or alone, they might be others.
        found = examine(model, specs, [expected, ours])
        series.diverges = found.verdict
        if not found.passed:
            fault = "; ".join(found.b.faults or found.a.faults)
            series.status, series.reason = "failed", f"{found.verdict}: {fault}"
    else:
        pairs = enumerate(zip(*(text.tokens[0] for text in texts), strict=True))
        at = next((i for i, (wanted, got) in pairs if got != wanted), 0)
        series.status = "failed"
        series.reason = f"its greedy tokens differ from transformers' from token {at} on"


def _transformers(
    reference: Any, cell: GenerationCell, prompt: Sequence[int]
) -> tuple[Contender[GenerationSeries], _Text]:
    """Return transformers' generate(), greedy, with the attention that it chooses, and its text."""
    is_cuda = reference.device.type == "cuda"
    ids = torch.tensor([[*prompt]] * cell.batch, device=reference.device)
    new_tokens = cell.max_tokens - len(prompt)

    def call() -> _Text:
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=cell.mode == "kv-cache",
            pad_token_id=0,
        )
        return _Text(out[:, ids.shape[1] :].tolist())

    text = call()
    series = GenerationSeries(
        name=TRANSFORMERS,
        program="transformers",
        attention=reference.config._attn_implementation,
        # What SDPA chooses for float32: its CPU kernel, or the memory-efficient one on CUDA.
        precision="3xtf32" if is_cuda else "ieee-fp32",
        cell=cell,
        token_digest=environment.token_digest(text.tokens),
    )
    sample = functools.partial(_sample, series, call, text.tokens, "call", reference.device.type)
    return Contender(series, sample), text


def _check(
    series: GenerationSeries, model: GPT2, spec: BackendSpec, cell: GenerationCell, length: int
) -> None:
    """Check a backend at the lengths that the generation runs."""
    # Also between: what is tuned by size is tuned before memory and time are taken.
    between = [n for n in (64, 128, 256, 512) if length < n < cell.max_tokens]
    config, dtype = model.config, getattr(torch, cell.dtype)
    cases = [
        Case(n, config.head_dim, 1.0, cell.batch, config.n_head, dtype=dtype)
        for n in (length, *between, cell.max_tokens)
    ]
    selection.check(series, spec, cases, model.device.type, decode=cell.mode == "kv-cache")


def _write(model: GPT2, spec: BackendSpec, cell: GenerationCell, prompt: Sequence[int]) -> _Text:
    """Write a text with our program."""
    done = generate(
        model.with_attention(spec, spec if cell.mode == "kv-cache" else None),
        [[*prompt]] * cell.batch,
        max_new_tokens=cell.max_tokens - len(prompt),
        mode=cell.mode,
        ignore_eos=True,
    ).whole()
    return _Text(done.tokens, done)


def _sample(
    series: GenerationSeries,
    call: Callable[[], _Text],
    expected: list[list[int]] | None,
    timed: Timed,
    device: str,
) -> dict[str, float]:
    """Take one sample; raises RejectedError for another text, or what the kernel raised."""
    try:
        _synchronize(device)
        started = time.perf_counter()
        text = call()
        _synchronize(device)
        call_s = time.perf_counter() - started
    except KERNEL_ERRORS as error:
        selection.record_failure(series, error, device)
        raise RejectedError(f"while it was timed: {describe_error(error)}") from error
    if expected is not None and text.tokens != expected:
        raise RejectedError("its text is another from run to run")
    parts = ("warm_up_s", "prefill_s", "generation_s")
    split = {part: getattr(text.generation, part) for part in parts if text.generation}
    if timed == "call":
        return {"samples": call_s, **split}
    return {"samples": split.pop("generation_s"), "call_s": call_s, **split}


def _text_and_peak(call: Callable[[], _Text], model: GPT2) -> tuple[_Text, int | None]:
    """Return a text and the device memory at its peak meanwhile, weights included."""
    if model.device.type != "cuda":
        return call(), None
    torch.cuda.synchronize()
    model.release()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    text = call()
    return text, torch.cuda.max_memory_allocated(model.device)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free_attention() -> BackendSpec:
    """Build a backend that skips attention; its zero tensors are cached. It is in no registry."""
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
