"""Measure what an attention kernel buys in a model: alone, and in each mode of generation.

A kernel that would run in the emulator has no time. For a GPU its own time is predicted, and that
of a model is FREE_ATTENTION's in the results of that GPU plus the predicted attention of each layer
and step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
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
from attention_kernels.judge.process import Judges
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer import diverge
from gpt2_infer.bench import generation, hf_models, prediction, record, selection, study
from gpt2_infer.bench.environment import provenance
from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, File, KernelCell, Row
from gpt2_infer.bench.study import DEFAULT_PROMPT, LENGTHS
from gpt2_infer.bench.verdict import Findings
from gpt2_infer.checkpoint import DEMO_MODEL, open_checkpoint
from gpt2_infer.config import named_config
from gpt2_infer.engines.base import GRAPH_LENGTH_STEP, padded_length
from gpt2_infer.engines.recompute import Forward
from gpt2_infer.errors import GPT2InferError
from gpt2_infer.model import GPT2
from gpt2_infer.request import encode_prompts

PREFILL = "prefill"  # one token after a long prompt
# The mode of generation and the batch behind each name.
MODES: dict[str, tuple[study.Mode, int]] = {
    "recompute": ("recompute", 1),
    "kv-cache": ("kv-cache", 1),
    "batch of 8": ("recompute", 8),
    PREFILL: ("recompute", 1),
}
ROUNDS = 2  # of texts
RESULTS = Path(__file__).parents[2] / "results"
MEASURED_MODEL = "gpt2"  # in the results from which a model's time is predicted
PREDICTED_LENGTHS = (32, 128, 256, 512)  # others are interpolated
EMULATED_TOKENS = 8  # new ones, in the text of an emulated kernel


class Question:
    """A kernel, and where and at which lengths its worth is measured or predicted.

    what: backend name or version file. model: None selects the demo model, or for predictions
    GPT-2 small. max_tokens: the length of texts, of the long prompt and of the kernel alone; None
    selects those of LENGTHS, if the model has as many positions. gpu: the GPU to predict for.

    Imports no plug-in. Raises UnknownBackendError, UnavailableBackendError, UnsupportedError,
    RequestError and the errors of find() and open_checkpoint().
    """

    def __init__(
        self,
        what: str,
        *,
        model: str | None = None,
        random_weights: bool = False,
        device: str | None = None,
        dtype: str = "float32",
        max_tokens: int | None = None,
        gpu: str = "h200",
        quick: bool = False,
    ) -> None:
        prediction.find_gpu(gpu)
        self.what, self.dtype, self.gpu, self.quick = what, dtype, gpu, quick
        self.spec = spec = plugins.find(what)
        self.device = registry.device_for(spec, device)
        if reason := spec.unavailable_reason(self.device):
            raise UnavailableBackendError(spec.name, reason)
        # A plug-in's word is enough to get no time.
        self.is_emulated = self.device in spec.emulated_on
        self.model = model or (MEASURED_MODEL if self.is_emulated else DEMO_MODEL)
        self.random_weights = random_weights or (self.is_emulated and model is None)
        how: dict[str, Any] = {"random_weights": self.random_weights}
        checkpoint = hf_models.find(self.model, **how) or open_checkpoint(self.model, **how)
        self.config = config = checkpoint.config
        reasons = spec.static_refusals(getattr(torch, dtype), config.head_dim, self.device)
        if spec.version and spec.version.role == "decode":
            reasons.append(registry.DECODES_ONLY)
        if reasons:
            raise UnsupportedError(spec.name, reasons)
        (self.prompt,) = encode_prompts(checkpoint.tokenizer, [DEFAULT_PROMPT])
        lengths = LENGTHS["cuda" if self.is_emulated else self.device]
        self.tokens, self.longest = (
            max_tokens or min(config.n_positions, max(lengths[of]))
            for of in ("max_tokens", "seqlens")
        )
        if isinstance(checkpoint, hf_models.HFCheckpoint) and not max_tokens:
            self.tokens = min(self.tokens, 128)  # transformers' loop takes milliseconds per token
        generation.check_length(self.tokens, self.prompt, config)
        self.cell = KernelCell(self.longest, 1, config.n_head, config.head_dim, dtype=dtype)
        self.predicted = list[Row]()

    @property
    def best(self) -> BackendSpec:
        """The best shipped backend."""
        place, dtype = torch.device(self.device), getattr(torch, self.dtype)
        return registry.default_backend(place, dtype, self.config.head_dim)

    def version(self, spec: BackendSpec) -> VersionHeader | None:
        """Return the version, in the dtype, from which the time of a backend is predicted."""
        builds = spec.version.builds() if spec.version else ()
        return next((build for build in builds if build.dtype == self.dtype), None)

    def chosen(self, spec: BackendSpec, seqlen: int) -> BackendSpec:
        """Return a backend, or the version that an alias stands for at a length."""
        return spec.chosen(getattr(torch, self.dtype), self.cell.head_dim, self.device, seqlen)


@dataclass
class Worth:
    """The answer: the judge's verdict and, for a kernel that passed, times or predictions."""

    findings: Findings
    results: File | None = None
    """Rows with metric "time" (microseconds, alone) and "generation" (seconds)."""

    @property
    def passed(self) -> bool:
        """Whether neither the judge nor a mode found the kernel wrong."""
        kernel = self.results.study["kernel"] if self.results else ""
        rows = self.results.rows if self.results else []
        failed = any(row.status == "failed" for row in rows if row.contender == kernel)
        return self.findings.passed and not failed

    def to_json(self) -> dict[str, Any]:
        """Return the fields that docs/cli.md lists."""
        verdict, results = self.findings.to_json(), msgspec.to_builtins(self.results)
        return {"passed": self.passed, "verdict": verdict, "results": results}


def begin(question: Question) -> list[threading.Thread]:
    """On a GPU, begin to build and predict while the judge is at work; return the threads."""

    def kernels() -> None:
        best, lengths = question.best, (question.tokens, question.longest)
        ladder.build_all("cuda", [question.spec, *(question.chosen(best, n) for n in lengths)])

    def predictor() -> None:
        spec, card = question.chosen(question.spec, question.longest), _present()
        with contextlib.closing(process):
            if card:
                about = spec.name, question.version(spec), [question.cell], card
                question.predicted = process.run(_predict, *about)

    def products() -> None:
        how: dict[str, Any] = {"random_weights": question.random_weights}
        if hf_models.find(question.model, **how):
            return  # transformers changes torch's default dtype, in which the judge draws inputs
        with contextlib.suppress(GPT2InferError, AttentionError):  # answer() says so
            model = GPT2.from_pretrained(question.model, device="cuda", dtype=question.dtype, **how)
            if not Forward.refusals(model, 1):
                Forward(model)

    if question.device != "cuda":
        return []
    process = Judges(1)  # a thread that predicts would slow down the judge
    plugins.keep_plugins_out()  # a default backend is looked up among theirs, too
    threads = [threading.Thread(target=build) for build in (kernels, predictor, products)]
    for thread in threads:
        thread.start()
    return threads


def answer(question: Question) -> File:
    """Time a kernel that the judge has passed, or predict it if it would run emulated.

    Imports plug-ins: nothing may be judged in this process afterwards. Raises the errors of
    study.run().
    """
    return _predicted(question) if question.is_emulated else _timed(question)


def _put(row: Row, label: str, new_tokens: int) -> None:
    """Name a row's mode and its new tokens per row of the batch in its cell."""
    row.cell |= {"mode": label, "new_tokens": new_tokens}


def _timed(question: Question) -> File:
    config, device, dtype = question.config, question.device, question.dtype
    backends = [question.what, question.best.name]
    settings: dict[str, Any] = {"backends": backends, "dtypes": [dtype], "device": device}
    file = study.run(study.KernelStudy(cells=[question.cell], rounds=3, **settings))
    registry.import_adopted()
    spec = question.chosen(ladder.resolve(question.what), question.longest)
    file.rows += question.predicted
    settings |= {"model": question.model, "random_weights": question.random_weights}
    settings |= {"decoder": BASELINE, "examine": True, "rounds": ROUNDS}

    short = max(question.tokens // 4, len(question.prompt) + 1)  # a batch takes longest
    texts = [
        record.GenerationCell(question.tokens if batch == 1 else short, batch, dtype, mode)
        for mode, batch in [*MODES.values()][:-1]
    ]
    long = [i % config.vocab_size for i in range(question.longest - 1)]
    prefill = [record.GenerationCell(question.longest, dtype=dtype)]
    for prompt, cells, labels in ((question.prompt, texts, [*MODES]), (long, prefill, [PREFILL])):
        settings["energy"] = cells is texts and not question.quick  # it takes seconds
        found = study.run(study.GenerationStudy(prompt=prompt, cells=cells, **settings))
        for row in found.rows:
            cell = msgspec.convert(row.cell, record.GenerationCell)
            _put(row, labels[cells.index(cell)], cell.max_tokens - len(prompt))
        file.rows += found.rows
    facts = {key: found.study[key] for key in ("model", "device", "baseline")}
    facts["rounds"] = f"{ROUNDS} or {file.study['rounds']}"
    file.task, file.study = "worth", {"kind": "worth", "kernel": spec.name, **facts}
    return file


def _present() -> str | None:
    """Return the name under which the predictor knows the current GPU, if it does."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    name, count = found.name.lower().replace(" ", ""), found.multi_processor_count
    same = (key for key, card in gpus().items() if key in name and card.multiprocessors == count)
    return next(same, None)


def _predict(
    name: str, version: VersionHeader | None, cells: Sequence[KernelCell], gpu: str
) -> list[Row]:
    """Return a prediction of a version for each cell, with a time or a reason."""
    if version is None:
        reason = f"it has no version file of {cells[0].dtype} to predict its time from"
        row = Row(contender=name, metric="predicted time", unit="us", reason=reason)
        return [row for _ in cells]
    one = functools.partial(prediction.predict_version, name, version, gpu=gpu)
    if len(cells) == 1:
        return [one(cells[0])]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(one, cells)]


def _predicted(question: Question) -> File:
    """Predict a kernel alone and with recompute, among what was measured on the GPU."""
    registry.import_adopted()
    cell, config = question.cell, question.config
    spec = question.chosen(ladder.resolve(question.what), question.longest)
    card, first, tokens = gpus()[question.gpu].name, len(question.prompt), question.tokens
    timed, texts, sources = _measured(question)
    free = next((row for row in texts if row.contender == FREE_ATTENTION), None)
    others = [r for r in texts or timed if r.contender not in (spec.name, FREE_ATTENTION)]
    best = min(others, key=lambda row: row.median).contender if others else ""

    steps = [padded_length(n, GRAPH_LENGTH_STEP, config) for n in range(first, tokens)]
    between = [*(n for n in PREDICTED_LENGTHS if n < steps[-1]), steps[-1]] if free else []
    lengths = sorted({cell.seqlen, *between})
    cells = [msgspec.structs.replace(cell, seqlen=n) for n in lengths]
    found = _predict(spec.name, question.version(spec), cells, question.gpu)
    alone = found[lengths.index(cell.seqlen)]
    alone.cell = msgspec.to_builtins(cell)
    if known := record.timings_of(alone, timed):
        alone.extra["measured_us"] = known[0].median
    reason = next((each.reason for each in found if each.reason), "")
    seconds = list[float]()
    if free is None:
        reason = f"no {FREE_ATTENTION} of this model and length was measured on {card}"
    elif not reason:
        each = np.interp(steps, lengths, [one.median for one in found])
        seconds = [free.median + config.n_layer * float(each.sum()) / 1e6]

    def add(metric: str, unit: str, cell: dict[str, Any], samples: list[float], why: str) -> Row:
        row = selection.row_of(spec, question.dtype, metric, unit, {})
        row.cell, row.samples, row.reason = cell, samples, why
        row.status = "ok" if samples else "refused"
        row.extra |= {"predicted": card, "change": "predicted"}
        return row

    own = [add("time", "us", alone.cell, alone.samples, alone.reason)]
    other = f"{FREE_ATTENTION} was measured with recompute only on {card}"
    for label, (_, batch) in MODES.items():
        place = {"max_tokens": tokens, "batch": batch, "dtype": question.dtype}
        is_known = label == "recompute"
        why = reason or ("" if is_known else other)
        own.append(add("generation", "s", place, seconds if is_known else [], why))
        _put(own[-1], label, tokens - first)
    _write_text(spec, question.dtype, own[1])
    order, places = [BASELINE, spec.name, best, FREE_ATTENTION], ["", *MODES]
    rows = [row for row in (*timed, *texts) if row.contender in {*order} - {spec.name}] + own
    rows.sort(key=lambda r: (places.index(str(r.cell.get("mode", ""))), order.index(r.contender)))
    how = f"p: predicted for {card}, the rest measured"
    facts = {"kind": "worth", "kernel": spec.name, "baseline": BASELINE, "sources": sources}
    facts |= {"model": question.model + ", random weights" * question.random_weights, "how": how}
    return File(task="worth", study=facts, provenance=provenance(), rows=[*rows, alone])


def _measured(question: Question) -> tuple[list[Row], list[Row], list[str]]:
    """Return the rows of kernels alone and of texts in the GPU's results, and the files' names."""
    bits = {"float32": "fp32", "float16": "fp16"}.get(question.dtype, question.dtype)
    alone = msgspec.to_builtins(question.cell)
    text = {"max_tokens": question.tokens, "batch": 1, "dtype": question.dtype}
    timed, texts, sources = dict[str, Row](), list[Row](), list[str]()
    for task in (f"kernel-{bits}", f"kernel-{bits}-later", f"generation-{bits}"):
        try:
            path = record.newest(RESULTS, task, question.gpu)
        except record.ResultsError:
            continue
        file = record.read(path)
        sources.append(path.name)
        here = [row for row in file.of("time") if row.samples and row.cell == alone]
        timed |= {row.contender: row for row in here}  # the later file's
        for row in file.of("generation"):
            if row.samples and row.cell == text | {"mode": "recompute"}:
                _put(row, "recompute", question.tokens - file.study["prompt_tokens"])
                texts.append(row)
    is_measured = question.config == named_config(MEASURED_MODEL)
    return [*timed.values()], texts if is_measured else [], sources


def _write_text(spec: BackendSpec, dtype: str, row: Row) -> None:
    """Compare a short text of the demo model, whose kernel is emulated, with the baseline's."""
    try:
        model = GPT2.from_pretrained(DEMO_MODEL, device="cpu", dtype=dtype)
        options: dict[str, Any] = {"max_new_tokens": EMULATED_TOKENS}
        generation.note(row, diverge.diverge(model, BASELINE, spec, DEFAULT_PROMPT, **options))
    except (AttentionError, GPT2InferError) as error:
        row.reason = "; ".join(filter(None, [row.reason, f"no text: {error}"]))
