"""The score of a model on a text with every attention backend, beside NAIVE_PYTORCH."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from attention_kernels import AttentionError, BackendSpec, ladder
from gpt2_infer import perplexity
from gpt2_infer.bench import environment
from gpt2_infer.bench.results import Perplexity, PerplexitySeries
from gpt2_infer.errors import NotFiniteError
from gpt2_infer.model import GPT2


def score(
    name: str,
    specs: Sequence[BackendSpec],
    dtypes: Sequence[str],
    *,
    device: str,
    max_tokens: int,
    window: int,
    task: str,
    out: Path | None = None,
) -> Perplexity:
    """Score the beginning of the bundled model's held-out books; half of a window is context.

    A backend that refuses, or whose logits are not finite, has its reason. The file is written
    after each dtype.
    """
    provenance = environment.provenance()
    ladder.build_all(device, specs)
    series = []
    for dtype in dtypes:
        model = GPT2.from_pretrained(
            name, device=device, dtype=getattr(torch, dtype), attention=perplexity.BASELINE
        )
        text = perplexity.read_text(perplexity.HELD_OUT, model, max_tokens=max_tokens)
        nats = functools.partial(
            perplexity.token_nats, ids=text.ids, window=window, stride=window // 2
        )
        baseline = nats(model)
        for spec in tqdm(specs, dtype, disable=None):
            if dtype not in spec.precisions:
                continue
            one = PerplexitySeries(name=spec.name, dtype=dtype, precision=spec.precisions[dtype])
            series.append(one)
            try:
                is_baseline = spec.name == perplexity.BASELINE
                found = baseline if is_baseline else nats(model.with_attention(spec))
            except (NotFiniteError, AttentionError) as error:
                one.reason = str(error)
                continue
            scored = perplexity.make_score(spec.name, found, baseline, text)
            one.bits_per_byte = scored.bits_per_byte
            one.perplexity = scored.perplexity
            one.difference, one.standard_error = scored.difference, scored.standard_error
        results = Perplexity(
            task=task,
            provenance=provenance,
            model=name,
            tokens=len(text.ids) - 1,
            bytes=text.bytes,
            window=window,
            series=series,
        )
        if out:
            results.write(out)
    return results
