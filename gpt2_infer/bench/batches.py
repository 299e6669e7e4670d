"""Time many prompts: continuous batching, and transformers in padded and continuous batches."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attention_kernels.errors import RejectedTimeError
from gpt2_infer.batch import Settings
from gpt2_infer.batch.job import load
from gpt2_infer.bench import models
from gpt2_infer.bench.record import BatchCell, Row
from gpt2_infer.bench.study import BatchStudy, Contender, Subject
from gpt2_infer.checkpoint import DEMO_MODEL, resolve_device
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.request import Request

PROMPT_TOKENS = (4, 60)
BATCHES = 16  # batches per contender, unless there are fewer prompts
CACHE_SHARE = 0.25  # of the free memory, for the cache of generate_batch
Texts = dict[int, list[int]]
"""Tokens by the index of their prompt."""


class Batches(Subject[BatchCell]):
    """Times greedy texts of random prompts by batch size; only the demo model has real weights.

    A sample is the seconds of a whole call; `generation` excludes its set-up. A small batch gets an
    evenly spaced sample of the prompts. Some rows are also completed in another order, to count
    those that are bit for bit equal.
    """

    def __init__(self, study: BatchStudy) -> None:
        self.study, self.rounds = study, study.rounds
        self.target = resolve_device(study.device)
        self.device = self.target.type
        self.cells = [BatchCell(study.model, dtype, study.new_tokens) for dtype in study.dtypes]
        self.measures_energy_of = self.cells

    def contenders(self, cell: BatchCell) -> Iterator[Contender]:
        """Yield our batch sizes, then those of transformers."""
        study, rng = self.study, random.Random(0)
        settings = Settings(
            model=study.model, dtype=cell.dtype, random_weights=study.model != DEMO_MODEL
        )
        model = load(settings, self.target)
        lengths = sorted(rng.randint(*PROMPT_TOKENS) for _ in range(study.prompts))
        rows = [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in lengths]
        expected: Texts = {}

        def contender(
            name: str, program: str, batch: int, complete: Callable[..., dict[str, float]]
        ) -> Contender:
            count = min(len(rows), BATCHES * batch)
            indices = range(0, len(rows), len(rows) // count)[:count]
            extra = {"program": program, "batch": batch, "prompts": count}
            extra["tokens"] = count * study.new_tokens
            row = Row(contender=name, metric="time", unit="s", extra=extra)
            prompts = {index: rows[index] for index in indices}
            return Contender(
                row, functools.partial(complete, prompts, study.new_tokens, row, expected)
            )

        for batch in study.batch_sizes:
            complete = functools.partial(_ours, Continuous(model, batch=batch))
            yield contender(f"batch {batch}", "gpt2-infer", batch, complete)
        peers = [("padded", size, _padded) for size in study.peer_batch_sizes]
        peers += [("generate_batch", size, _generate_batch) for size in study.generate_batch_sizes]
        for name, batch, run in peers:
            complete = functools.partial(run, models.reference_of(model))
            yield contender(f"transformers, {name}, {batch}", "transformers", batch, complete)


def _ours(
    engine: Continuous, prompts: Texts, new_tokens: int, row: Row, expected: Texts
) -> dict[str, float]:
    config = engine.model.config
    how: dict[str, Any] = {"max_new_tokens": new_tokens, "mode": "kv-cache", "ignore_eos": True}
    requests = [
        (index, Request(config=config, tokenizer=None, prompts=[prompt], **how))
        for index, prompt in prompts.items()
    ]
    first = None
    if "same_rows" not in row.extra:
        some = requests[:: max(2, len(requests) // engine.batch)]
        random.Random(1).shuffle(some)
        first = dict(engine.run(some))
    done, seconds = models.timed(engine.model.device, lambda: dict(engine.run(requests)))
    if first is not None:
        same = sum(done[index] == text for index, text in first.items())
        row.extra["same_rows"] = same / len(first)
    for index, one in done.items():
        if isinstance(one, str):
            raise RejectedTimeError(one)
        expected.setdefault(index, one.tokens)
    return {"time": seconds, "generation": seconds - engine.set_up_s}


def _padded(
    reference: Any, prompts: Texts, new_tokens: int, row: Row, expected: Texts
) -> dict[str, float]:
    batch, device = row.extra["batch"], reference.device
    items, done = [*prompts.items()], Texts()

    def run() -> None:
        for begin in range(0, len(items), batch):
            indices, rows = zip(*items[begin : begin + batch], strict=True)
            longest = max(map(len, rows))
            padded = [[-1] * (longest - len(row)) + row for row in rows]
            ids = torch.tensor(padded, device=device)
            mask = (ids >= 0).long()
            tokens = models.generated(reference, ids.clamp(min=0), new_tokens, mask=mask)
            done.update(zip(indices, tokens.tolist(), strict=True))

    _, seconds = models.timed(device, run)
    _compare(done, row, expected)
    return {"time": seconds}


def _generate_batch(
    reference: Any, prompts: Texts, new_tokens: int, row: Row, expected: Texts
) -> dict[str, float]:
    """Time transformers' continuous batching; its warm-up is not part of the timed rounds.

    Raises RejectedTimeError with one sentence if it cannot run.
    """
    from transformers import GenerationConfig

    def run() -> Any:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        return reference.generate_batch(
            inputs=[*prompts.values()],
            generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=row.extra["batch"], max_memory_percent=CACHE_SHARE
            ),
            progress_bar=False,
            persistent_manager=True,
        )

    try:
        found, seconds = models.timed(reference.device, run)
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise RejectedTimeError(f"generate_batch cannot run here: {text}") from error
    texts = [one.generated_tokens for one in found.values()]
    complete = sum(len(text) == new_tokens for text in texts)
    if complete < len(prompts):
        errors = {one.error.splitlines()[0] for one in found.values() if one.error}
        what = f"{complete} of {len(prompts)} prompts" + (f": {min(errors)}" if errors else "")
        raise RejectedTimeError(f"generate_batch completed {what}")
    _compare(dict(zip(prompts, texts, strict=True)), row, expected)
    return {"time": seconds}


def _compare(done: Texts, row: Row, expected: Texts) -> None:
    """Record the share of texts that equal ours."""
    if ours := [expected[index] == text for index, text in done.items() if index in expected]:
        row.extra["same_rows"] = sum(ours) / len(ours)
