"""Score the bundled model with every attention backend, compared with NAIVE_PYTORCH."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import msgspec
from tqdm import tqdm

from attention_kernels import AttentionError
from gpt2_infer import perplexity
from gpt2_infer.bench import models, selection
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import Contender, PerplexityStudy, Subject
from gpt2_infer.errors import NotFiniteError


class Dtype(msgspec.Struct, frozen=True):
    """The cell of this study: a dtype."""

    dtype: str

    def __str__(self) -> str:
        return self.dtype


class Scores(Subject[Dtype]):
    """Scores the beginning of the bundled model's held-out books; half of each window is context.

    If a backend refuses or its logits are not finite, its row says why.
    """

    def __init__(self, study: PerplexityStudy) -> None:
        self.study = study
        self.device, self.specs, _ = selection.selected(study, emulated=True)
        self.cells = [*map(Dtype, study.dtypes)]
        self._models = models.OneModel(device=self.device, attention=perplexity.BASELINE)
        model = self._models.load("demo", study.dtypes[0])
        self.text = perplexity.read_text(perplexity.HELD_OUT, model, max_tokens=study.max_tokens)
        self.facts = {
            "device": self.device,
            "model": "demo",
            "tokens": len(self.text.ids) - 1,
            "bytes": self.text.bytes,
        }

    def contenders(self, cell: Dtype) -> Iterator[Contender]:
        """Score each backend that supports the dtype."""
        model, window = self._models.load("demo", cell.dtype), self.study.window
        nats = functools.partial(
            perplexity.token_nats, ids=self.text.ids, window=window, stride=window // 2
        )
        baseline = nats(model)
        takers = [spec for spec in self.specs if cell.dtype in spec.precisions]
        combined = list(itertools.product(self.study.products, takers))
        for products, spec in tqdm(combined, cell.dtype, disable=None):
            is_default = products == "ieee-fp32"
            name = spec.name if is_default else f"{spec.name}, {products}"
            row = Row(contender=name, metric="bits per byte", unit="bits")
            row.extra["precision"] = spec.precisions[cell.dtype]
            contender = Contender(row)
            try:
                is_baseline = name == perplexity.BASELINE
                ours = model.with_products(products).with_attention(spec)
                found = baseline if is_baseline else nats(ours)
            except (NotFiniteError, AttentionError) as error:
                row.status, row.reason = "failed", str(error)
            else:
                score = perplexity.make_score(name, found, baseline, self.text)
                row.samples = [score.bits_per_byte]
                contender.beside = [
                    Row(contender=name, metric=metric, unit=unit, samples=[value])
                    for metric, unit, value in (
                        ("perplexity", "1", score.perplexity),
                        ("difference", "nats", score.difference),
                        ("standard error", "nats", score.standard_error),
                    )
                ]
            yield contender
