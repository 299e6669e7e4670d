"""Measure what an attention kernel buys in a model: alone, and in each mode of generation.

A kernel that would run in the emulator has no time. For a GPU its own time is predicted, and that
of a model is FREE_ATTENTION's in the results of that GPU plus the predicted attention of each layer
and step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from attention_kernels import AttentionError, BackendSpec, UnavailableBackendError, ladder, registry
from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.judge import plugins
from gpt2_infer import diverge
from gpt2_infer.bench import generation, prediction, record, selection, study
from gpt2_infer.bench.environment import provenance
from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, File, KernelCell, Row
from gpt2_infer.bench.study import DEFAULT_PROMPT, LENGTHS
from gpt2_infer.bench.verdict import Findings
from gpt2_infer.checkpoint import DEMO_MODEL, open_checkpoint
from gpt2_infer.config import GPT2Config, named_config
from gpt2_infer.engines.base import GRAPH_LENGTH_STEP, padded_length
from gpt2_infer.errors import GPT2InferError
from gpt2_infer.model import GPT2
from gpt2_infer.request import encode_prompts

MODES: dict[str, tuple[study.Mode, int]] = {
    "recompute": ("recompute", 1),
    "prefill": ("recompute", 1),
    "kv-cache": ("kv-cache", 1),
    "batch of 8": ("recompute", 8),
}
"""The mode of generation and the batch behind each name; prefill is one token after a long text."""
RESULTS = Path(__file__).parents[2] / "results"
MEASURED_MODEL = "gpt2"
"""The model in the results from which a model's time is predicted."""
PREDICTED_LENGTHS = (32, 128, 256, 512)
"""Lengths between which predictions are interpolated."""
EMULATED_TOKENS = 8
"""New tokens of the text that an emulated kernel writes."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A kernel, and where and at which lengths its worth is measured or predicted."""

    what: str
    """The backend's name or version file, as it was given."""
    spec: BackendSpec
    model: str
    random_weights: bool
    config: GPT2Config
    prompt: list[int]
    device: str
    dtype: str
    tokens: int
    """The length of a text in tokens, prompt included."""
    longest: int
    """The length of the kernel alone, and of the long prompt and its token."""
    gpu: str
    """The GPU to predict for."""
    quick: bool

    @property
    def is_emulated(self) -> bool:
        """Whether the kernel would run emulated. A plug-in's word is enough to get no time."""
        return self.device in self.spec.emulated_on

    @property
    def cell(self) -> KernelCell:
        """The call that is timed alone."""
        heads, head_dim = self.config.n_head, self.config.head_dim
        return KernelCell(self.longest, 1, heads, head_dim, dtype=self.dtype)


@dataclass
class Worth:
    """The answer: the judge's verdict and, for a kernel that passed, times or predictions."""

    findings: Findings
    results: File | None = None
    """Rows with metric "time" (microseconds, alone) and "generation" (seconds)."""

    @property
    def passed(self) -> bool:
        """Whether neither the judge nor a mode found the kernel wrong."""
        rows = self.results.rows if self.results else []
        kernel = self.results and self.results.study["kernel"]
        wrong = [row for row in rows if row.contender == kernel and row.status == "failed"]
        return self.findings.passed and not wrong

    def to_json(self) -> dict[str, Any]:
        """Return the fields that docs/cli.md lists."""
        verdict, results = self.findings.to_json(), msgspec.to_builtins(self.results)
        return {"passed": self.passed, "verdict": verdict, "results": results}


def ask(
    what: str,
    *,
    model: str | None = None,
    random_weights: bool = False,
    device: str | None = None,
    dtype: str = "float32",
    max_tokens: int | None = None,
    gpu: str = "h200",
    quick: bool = False,
) -> Question:
    """Check all settings, and import no plug-in.

    model: None selects the demo model, or for predictions GPT-2 small. max_tokens: the length of
    texts, of the long prompt and of the kernel alone; None selects those of LENGTHS, if the model
    has as many positions. Raises UnknownBackendError, UnavailableBackendError, UnsupportedError,
    RequestError and the errors of open_checkpoint().
    """
    prediction.find_gpu(gpu)
    spec = plugins.find(what)
    device = registry.device_for(spec, device)
    if reason := spec.unavailable_reason(device):
        raise UnavailableBackendError(spec.name, reason)
    is_emulated = device in spec.emulated_on
    if model is None:
        model = MEASURED_MODEL if is_emulated else DEMO_MODEL
        random_weights = random_weights or is_emulated
    checkpoint = open_checkpoint(model, random_weights=random_weights)
    config = checkpoint.config
    if reasons := spec.static_refusals(getattr(torch, dtype), config.head_dim, device):
        raise UnsupportedError(spec.name, reasons)
    if spec.version and spec.version.role == "decode":
        raise UnsupportedError(spec.name, [registry.DECODES_ONLY])
    (prompt,) = encode_prompts(checkpoint.tokenizer, [DEFAULT_PROMPT])
    tokens, longest = (
        max_tokens or min(config.n_positions, max(LENGTHS["cuda" if is_emulated else device][of]))
        for of in ("max_tokens", "seqlens")
    )
    generation.check_length(tokens, prompt, config)
    return Question(
        what=what,
        spec=spec,
        model=model,
        random_weights=random_weights,
        config=config,
        prompt=prompt,
        device=device,
        dtype=dtype,
        tokens=tokens,
        longest=longest,
        gpu=gpu,
        quick=quick,
    )


def answer(question: Question) -> File:
    """Time a kernel that the judge has passed, or predict it if it would run emulated.

    Imports plug-ins: nothing may be judged in this process afterwards. Raises the errors of
    study.run().
    """
    return _predicted(question) if question.is_emulated else _timed(question)


# ---- Timed ---------------------------------------------------------------------------------------


def _timed(question: Question) -> File:
    config, device, dtype = question.config, question.device, question.dtype
    best = registry.default_backend(torch.device(device), getattr(torch, dtype), config.head_dim)
    settings: dict[str, Any] = {"backends": [question.what, best.name], "dtypes": [dtype]}
    settings |= {"device": device} | ({"rounds": 2} if question.quick else {})
    file = study.run(study.KernelStudy(cells=[question.cell], **settings))
    registry.import_adopted()
    spec = _chosen(question)
    if card := _present():
        file.rows += _predict(spec, [question.cell], card)
    for label, (mode, batch) in MODES.items():
        long = [i % config.vocab_size for i in range(question.longest - 1)]
        text = study.GenerationStudy(
            model=question.model,
            random_weights=question.random_weights,
            prompt=long if label == "prefill" else question.prompt,
            max_tokens=[question.longest if label == "prefill" else question.tokens],
            modes=[mode],
            batch_sizes=[batch],
            decoder=BASELINE,
            examine=True,
            energy=not question.quick,
            **settings,
        )
        found = study.run(text)
        for row in found.rows:
            _put(row, label, text.max_tokens[0] - len(text.prompt))
        file.rows += found.rows
    facts = {key: found.study[key] for key in ("model", "device", "baseline", "rounds")}
    file.task, file.study = "worth", {"kind": "worth", "kernel": spec.name, **facts}
    return file


def _chosen(question: Question) -> BackendSpec:
    """Return the kernel, or the version that an alias stands for in the call that is alone."""
    cell, dtype = question.cell, getattr(torch, question.dtype)
    spec = ladder.resolve(question.what)
    return spec.chosen(dtype, cell.head_dim, question.device, cell.seqlen)


def _put(row: Row, label: str, new_tokens: int) -> None:
    """Name a row's mode and its new tokens per row of the batch in its cell."""
    row.cell |= {"mode": label, "new_tokens": new_tokens}


def _present() -> str | None:
    """Return the name under which the predictor knows the current GPU, if it does."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    name = found.name.lower().replace(" ", "")
    same = (
        key for key, card in gpus().items()
        if key in name and card.multiprocessors == found.multi_processor_count
    )  # fmt: skip
    return next(same, None)


# ---- Predicted -----------------------------------------------------------------------------------


def _predict(spec: BackendSpec, cells: Sequence[KernelCell], gpu: str) -> list[Row]:
    """Return a prediction of a backend for each cell, with a time or a reason."""
    builds = {build.dtype: build for build in spec.version.builds()} if spec.version else {}
    if cells[0].dtype not in builds:
        reason = f"it has no version file of {cells[0].dtype} to predict its time from"
        row = Row(contender=spec.name, metric="predicted time", unit="us", reason=reason)
        return [row for _ in cells]
    build = builds[cells[0].dtype]
    one = functools.partial(prediction.predict_version, spec.name, build, gpu=gpu)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(one, cells)]


def _predicted(question: Question) -> File:
    """Predict a kernel alone and with recompute, among what was measured on the GPU."""
    registry.import_adopted()
    spec, cell, card = _chosen(question), question.cell, gpus()[question.gpu]
    timed, texts, sources = _measured(question)
    free = next((row for row in texts if row.contender == FREE_ATTENTION), None)
    others = [r for r in texts or timed if r.contender not in (spec.name, FREE_ATTENTION)]
    best = min(others, key=lambda row: row.median).contender if others else ""

    first, config = len(question.prompt), question.config
    steps = [padded_length(n, GRAPH_LENGTH_STEP, config) for n in range(first, question.tokens)]
    between = {n for n in PREDICTED_LENGTHS if n < steps[-1]} | {steps[-1]} if free else set()
    lengths = sorted({*between, cell.seqlen})
    cells = [msgspec.structs.replace(cell, seqlen=n) for n in lengths]
    found = dict(zip(lengths, _predict(spec, cells, question.gpu), strict=True))

    def row(metric: str, unit: str, samples: list[float], reason: str) -> Row:
        own = selection.row_of(spec, question.dtype, metric, unit, {})
        own.samples, own.reason = samples, reason
        own.status = "ok" if samples else "refused"
        own.extra |= {"predicted": card.name, "change": "predicted"}
        return own

    alone = found[cell.seqlen]
    own = [row("time", "us", alone.samples, alone.reason)]
    own[0].cell = alone.cell = msgspec.to_builtins(cell)
    if known := record.timings_of(alone, timed):
        alone.extra["measured_us"] = known[0].median
    reason = next((each.reason for each in found.values() if each.reason), "")
    for label in MODES:
        seconds, why = list[float](), reason
        if free is None:
            why = f"no {FREE_ATTENTION} of this model and length was measured on {card.name}"
        elif label != "recompute":
            why = why or f"{FREE_ATTENTION} was measured with recompute only on {card.name}"
        elif not reason:
            each = np.interp(steps, lengths, [found[n].median for n in lengths])
            seconds = [free.median + config.n_layer * float(each.sum()) / 1e6]
        own.append(row("generation", "s", seconds, why))
        batch = MODES[label][1]
        own[-1].cell = {"max_tokens": question.tokens, "batch": batch, "dtype": question.dtype}
        _put(own[-1], label, question.tokens - first)
    _write_text(spec, question.dtype, own[1])

    order = [BASELINE, spec.name, best, FREE_ATTENTION]
    rows = [row for row in (*timed, *texts) if row.contender in {*order} - {spec.name}] + own
    places = ["", *MODES]
    rows.sort(key=lambda r: (places.index(str(r.cell.get("mode", ""))), order.index(r.contender)))
    name = question.model + (", random weights" if question.random_weights else "")
    facts = {
        "kernel": spec.name,
        "baseline": BASELINE,
        "model": name,
        "how": f"p: predicted for {card.name}, the rest was measured there",
        "sources": sources,
    }
    study_ = {"kind": "worth", **facts}
    return File(task="worth", study=study_, provenance=provenance(), rows=[*rows, alone])


def _measured(question: Question) -> tuple[list[Row], list[Row], list[str]]:
    """Return the rows of kernels alone and of texts in the GPU's results, and the files' names."""
    bits = {"float32": "fp32", "float16": "fp16"}.get(question.dtype, question.dtype)
    timed, texts, sources = list[Row](), list[Row](), list[str]()
    config = named_config(MEASURED_MODEL)
    is_measured = config is not None and all(
        getattr(config, size) == getattr(question.config, size)
        for size in ("n_layer", "n_head", "n_embd", "vocab_size")
    )
    for task in (f"kernel-{bits}", f"kernel-{bits}-later", f"generation-{bits}"):
        try:
            path = record.newest(RESULTS, task, question.gpu)
        except record.ResultsError:
            continue
        file = record.read(path)
        sources.append(path.name)
        timed += [row for row in file.of("time") if row.cell == msgspec.to_builtins(question.cell)]
        for row in file.of("generation") if is_measured else []:
            cell = {"max_tokens": question.tokens, "batch": 1, "dtype": question.dtype}
            if row.cell == cell | {"mode": "recompute"}:
                _put(row, "recompute", question.tokens - file.study["prompt_tokens"])
                texts.append(row)
    return [row for row in timed if row.samples], [row for row in texts if row.samples], sources


def _write_text(spec: BackendSpec, dtype: str, row: Row) -> None:
    """Compare a short text of the demo model, whose kernel is emulated, with the baseline's."""
    try:
        model = GPT2.from_pretrained(DEMO_MODEL, device="cpu", dtype=dtype)
        found = diverge.diverge(
            model, BASELINE, spec, DEFAULT_PROMPT, max_new_tokens=EMULATED_TOKENS
        )
    except (AttentionError, GPT2InferError) as error:
        row.reason = f"{row.reason}; no text: {error}" if row.reason else f"no text: {error}"
        return
    generation.note(row, found)
