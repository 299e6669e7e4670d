"""Compare backends in one model, end to end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_kernels import BackendSpec, get_backend
from attention_kernels.contract import Kernels
from attention_kernels.errors import RejectedTimeError
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import KERNEL_ERRORS
from attention_kernels.judge.truth import check_precision
from attention_kernels.precision import PLAIN_PRECISIONS
from gpt2_infer.bench import environment, models, selection
from gpt2_infer.bench.hf_models import HFModel, load
from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, GenerationCell, Row
from gpt2_infer.bench.study import LENGTHS, Contender, GenerationStudy, Subject
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.config import GPT2Config
from gpt2_infer.diverge import Divergence, examine
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Generation, generate
from gpt2_infer.model import GPT2
from gpt2_infer.request import encode_prompts


class Texts(Subject[GenerationCell]):
    """Times greedy generation; a sample is seconds from the prompt to the last token.

    The tokens of every timed call are compared with the baseline's, the first contender of a cell;
    where they diverge, examine() says whether that is a tie. FREE_ATTENTION is one more contender.
    In a dtype that the baseline does not support, texts are not compared.
    """

    warm_up = 0  # contenders() has already run each one
    processes: selection.Runners

    def __init__(self, study: GenerationStudy) -> None:
        check_precision()
        self.study, self.rounds = study, study.rounds
        if not (study.backends or study.families) and resolve_device(study.device).type == "cpu":
            study.families = ["pytorch"]  # others would take hours on a CPU
        self.device, specs, baseline = selection.select(study)
        lengths = study.max_tokens or LENGTHS[self.device]["max_tokens"]
        combined = itertools.product(lengths, study.batch_sizes, study.dtypes, study.modes)
        cells = study.cells or [*itertools.starmap(GenerationCell, combined)]
        if "float64" in study.dtypes:
            raise RequestError("text is generated in float32, float16 or bfloat16, not in float64")
        self.cells = sorted(cells, key=lambda cell: cell.dtype)
        self._load: Callable[..., Any] = models.loader(
            load,
            random_weights=study.random_weights,
            device=self.device,
            attention=BASELINE,  # a placeholder that supports every dtype
        )
        model = self._load(study.model, dtype=self.cells[0].dtype)
        (self.prompt,) = encode_prompts(model.tokenizer, [study.prompt])  # type: ignore[arg-type]
        if study.energy and self.device == "cuda":
            self.measures_energy_of = self.cells[:1]  # it takes seconds
        for cell in cells:
            check_length(cell.max_tokens, self.prompt, model.config)
        self.facts = {
            "device": self.device,
            "model": study.model + (", random weights, seed 0" if study.random_weights else ""),
            "prompt_tokens": len(self.prompt),
        }
        kinds = [(cell.dtype, model.config.head_dim, cell.max_tokens) for cell in cells]
        self.specs = selection.chosen([baseline, *specs], kinds, self.device)
        self.specs.append(_free_attention())
        self.facts["baseline"] = self.specs[0].name
        self.processes = selection.Runners(self.device, most=3)  # each takes memory of the GPU

    def contenders(self, cell: GenerationCell) -> Iterator[Contender]:
        """Check each backend and compare its text with the first's."""
        expected: Generation | None = None
        for spec in (spec for spec in self.specs if cell.dtype in spec.precisions):
            contender, text = self._ours(spec, cell, expected)
            if spec is self.specs[0]:
                expected = text
            self.processes.rest()
            yield contender

    def _ours(
        self, spec: BackendSpec, cell: GenerationCell, expected: Generation | None
    ) -> tuple[Contender, Generation | None]:
        """Check a backend; return it with its text."""
        model: GPT2 = self._load(self.study.model, dtype=cell.dtype)  # the last one is kept
        is_free = spec.name == FREE_ATTENTION
        row = selection.row_of(spec, cell.dtype, "generation", "s", self.sources)
        if is_free:
            row.extra["precision"] = "none"
        contender, text = Contender(row), None
        try:
            decoder = self._decoder(spec) if cell.mode == "kv-cache" else None
            if decoder and decoder is not spec:
                row.extra["decoder"] = decoder.name
            if not is_free:
                cases = _cases(model, cell, len(self.prompt), decodes=decoder is spec)
                checked = cases[-1:] if self.study.examine else cases
                selection.check(row, self.processes.of(spec), checked)
            if row.status == "ok":
                lent = model.with_attention(spec, decoder)
                call = functools.partial(_write, lent, cell, self.prompt)
                text = call()
                row.extra["token_digest"] = environment.token_digest(text.tokens)
                row.extra["text_compared"] = not is_free and bool(expected or spec is self.specs[0])
                differ = expected and (self.study.examine or text.tokens != expected.tokens)
                if expected and differ and not is_free:
                    # These texts: generated again or outside the batch, they might differ.
                    both = self.specs[0], spec
                    runners = [*map(self.processes.of, both)]
                    note(row, examine(model, both, [expected, text], runners))
            if row.status == "ok" and text:
                tokens = None if is_free else text.tokens
                contender.sample = functools.partial(_sample, row, call, tokens, model.device)
        except KERNEL_ERRORS as error:
            self.processes.record(row, error)
        return contender, text

    def _decoder(self, spec: BackendSpec) -> BackendSpec:
        """Return the backend that decodes with a cache."""
        if not self.study.decoder or spec.has_decode(self.device):
            return spec
        return get_backend(self.study.decoder)


def check_length(max_tokens: int, prompt: Sequence[int], config: GPT2Config) -> None:
    """Raise RequestError unless a text is longer than its prompt and fits into the model."""
    if not len(prompt) < max_tokens <= config.n_positions:
        raise RequestError(
            f"max_tokens {max_tokens} must exceed the prompt's {len(prompt)} tokens and fit into "
            f"the model's {config.n_positions} positions"
        )


def note(row: Row, found: Divergence) -> None:
    """Record what was found about a text; one with a bug has failed."""
    row.extra["diverges"] = found.verdict
    row.extra["logits_difference"] = found.logits_difference
    if not found.passed:
        fault = "; ".join(found.b.faults or found.a.faults)
        row.status, row.reason = "failed", f"{found.verdict}: {fault}"


def _cases(
    model: GPT2, cell: GenerationCell, length: int, *, decodes: bool
) -> list[Case | DecodeCase]:
    """Return the cases to check a backend on, at the lengths that the generation uses."""
    # Intermediate lengths, too: tuning for a size must precede all measurements.
    between = [n for n in (64, 128, 256, 512) if length < n < cell.max_tokens]
    config, dtype = model.config, getattr(torch, cell.dtype)
    cases: list[Case | DecodeCase] = [
        Case(n, config.head_dim, 1.0, cell.batch, config.n_head, dtype=dtype)
        for n in (length, *between, cell.max_tokens)
    ]
    return [*cases, DecodeCase(config.head_dim, dtype)] if decodes else cases


def _write(model: GPT2 | HFModel, cell: GenerationCell, prompt: Sequence[int]) -> Generation:
    """Generate a text."""
    rows, count = [[*prompt]] * cell.batch, cell.max_tokens - len(prompt)
    if isinstance(model, HFModel):
        return model.generate(rows, count, cell.mode)
    return generate(model, rows, max_new_tokens=count, mode=cell.mode, ignore_eos=True).whole()


def _sample(
    row: Row, call: Callable[[], Generation], expected: list[list[int]] | None, device: torch.device
) -> dict[str, float]:
    """Take one sample; raises RejectedTimeError if the text changes or the kernel raises."""
    try:
        done, seconds = models.timed(device, call)
    except KERNEL_ERRORS as error:
        selection.record_failure(row, error, device.type)
        raise RejectedTimeError(f"while it was timed: {row.reason}") from error
    if expected is not None and done.tokens != expected:
        raise RejectedTimeError("its text changes from run to run")
    return {"call": seconds, "generation": done.generation_s}


def _free_attention() -> BackendSpec:
    """Build an unregistered backend that skips attention and returns cached zero tensors."""
    zeros = functools.cache(
        lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
    )

    def skip(q: Tensor, *_: object) -> Tensor:
        return zeros(q.shape, q.dtype, q.device)

    return BackendSpec(
        name=FREE_ATTENTION,
        family="bound",
        summary="No attention at all: the time of everything else.",
        loader=lambda: Kernels(attention=skip, decode=skip),
        precisions=PLAIN_PRECISIONS,
        supports_gqa=True,  # without attention, nothing is copied per query head
    )
