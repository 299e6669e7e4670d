"""Comparing backends: text generation end to end, and the kernel alone.

Each backend is checked before it is timed: one that fails is recorded as failed, one that is
emulated is checked and gets no time. Samples of a cell (one shape, dtype and mode) are taken in
interleaved rounds. What an interrupted run had measured is kept beside its output and completed by
the same call on the same machine.

    from gpt2_infer.bench.compare import KernelCell, compare_kernels, select
    specs = select(["NAIVE_PYTORCH", "PYTORCH_SDPA_FLASH_ATTENTION"], "cpu")
    results = compare_kernels(specs, [KernelCell(128), KernelCell(256)], device="cpu")
    for series in results.series:
        print(series.name, series.labels["seqlen"], series.median, series.unit, series.spread)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from attention_kernels import BackendSpec, UnsupportedError, get_backend, ladder, list_backends
from attention_kernels.conformance import (
    KERNEL_ERRORS,
    Case,
    decode_verdict,
    describe_error,
    run_case,
)
from attention_kernels.contract import Kernels
from attention_kernels.ladder import build
from attention_kernels.reference import check_precision
from attention_kernels.registry import PLAIN_PRECISIONS
from gpt2_infer.bench import environment, timing
from gpt2_infer.bench.diverge import examine
from gpt2_infer.bench.results import Results, ResultsError, Series, read
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Generation, Mode, encode_prompts, generate
from gpt2_infer.model import GPT2

BASELINE = "NAIVE_PYTORCH"
FREE_ATTENTION = "FREE_ATTENTION"
MIN_ROTATED_BYTES = 96 * 2**20
MIN_CALLS = 5
MIN_ROUNDS = 2  # one sample has no spread
EMULATED_SEQLEN = 64  # an emulated kernel is checked at this length at most
EMULATED = "its source runs in the CPU emulator, where a time would mean nothing"


@dataclass(frozen=True)
class GenerationCell:
    """Greedy text up to max_tokens in all, the prompt included, for `batch` equal prompts."""

    max_tokens: int
    batch: int = 1
    dtype: str = "float32"
    mode: Mode = "recompute"


@dataclass(frozen=True)
class KernelCell:
    """One call of attention() over (batch, seqlen, num_heads, head_dim)."""

    seqlen: int
    batch: int = 1
    num_heads: int = 12
    head_dim: int = 64
    dtype: str = "float32"
    is_causal: bool = True

    @property
    def case(self) -> Case:
        """The same shape as a case of the conformance suite."""
        fields = dataclasses.asdict(self)
        return Case(**(fields | {"dtype": getattr(torch, self.dtype)}))

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products; causal attention needs half of them."""
        full = 4 * self.batch * self.num_heads * self.seqlen**2 * self.head_dim
        return full // 2 if self.is_causal else full

    @property
    def min_bytes(self) -> int:
        """q, k and v read once and o written once."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return 4 * self.batch * self.num_heads * self.seqlen * self.head_dim * itemsize


Cell = TypeVar("Cell", GenerationCell, KernelCell)
KERNEL_SHAPE = ("batch", "num_heads", "head_dim", "dtype", "is_causal")


@dataclass
class Contender:
    """A backend in a cell.

    sample: takes one sample, or raises timing.Rejected; None where it is not timed. last: further
    figures of the last sample. recheck: raises timing.Rejected where, all samples taken, its output
    is wrong.
    """

    series: Series
    sample: Callable[[], float] | None = None
    last: dict[str, float] = field(default_factory=dict)
    recheck: Callable[[], None] | None = None


def select(
    names: Sequence[str],
    device_type: str,
    *,
    families: Sequence[str] = (),
    dtypes: Sequence[str] = (),
) -> list[BackendSpec]:
    """The named backends and those of the named families; for none, every one that runs there.

    A name may be the path of a version file that is in no ladder, *.cu. Of a family, what is
    emulated, cannot run or takes none of the dtypes (none for any) is left out; a line on stderr
    names each family of which nothing is left.
    Raises UnknownBackendError, HeaderError, or RequestError for a family that there is not, a named
    backend that cannot run, or families of which nothing is left where nothing else is named.
    """
    known = {spec.family for spec in list_backends()}
    if missing := {*families} - known:
        raise RequestError(
            f"no backend is of the family {', '.join(sorted(missing))}: there are "
            f"{', '.join(sorted(known))}"
        )

    def untimed_reason(spec: BackendSpec) -> str | None:
        if reason := spec.unavailable_reason(device_type):
            return reason
        if device_type in spec.emulated_on:
            return EMULATED
        if dtypes and not {*dtypes} & {*spec.dtypes}:
            return f"takes {', '.join(spec.dtypes)}, not {', '.join(dtypes)}"
        return None

    reasons = {
        spec: untimed_reason(spec)
        for spec in list_backends()
        if spec.family in families or not (families or names)
    }
    specs = [spec for spec, reason in reasons.items() if reason is None]
    specs += [ladder.resolve(name) for name in names]
    left_out = []
    for family in dict.fromkeys(families):
        of_it = [reason for spec, reason in reasons.items() if spec.family == family]
        if None not in of_it:
            left_out.append(f"{family} ({'; '.join(dict.fromkeys(filter(None, of_it)))})")
    if left_out:
        sentence = f"nothing is measured on {device_type} of {', '.join(left_out)}"
        if not specs:
            raise RequestError(sentence)
        print(sentence, file=sys.stderr)
    for spec in specs:
        if reason := spec.unavailable_reason(device_type):
            raise RequestError(f"{spec.name} cannot be compared on {device_type}: {reason}")
    return list({spec.name: spec for spec in specs}.values())


class Recorder:
    """The results of a run as they come in, kept in a file beside the output until they are whole.

    specs: the backends; their sources are looked at once, as the run begins. Raises ResultsError
    where that file is of another run: other settings, source or machine.
    """

    def __init__(
        self,
        task: str,
        settings: dict[str, Any],
        specs: Sequence[BackendSpec],
        out: Path | None,
        *,
        rounds: int,
    ) -> None:
        if rounds < MIN_ROUNDS:
            raise RequestError(f"rounds must be {MIN_ROUNDS} or more, not {rounds}")
        check_precision()
        settings = {**settings, "rounds": rounds}
        self.results = Results(task, environment.provenance(), settings, [])
        self.rounds = rounds
        self._sources = {spec.name: _source_digest(spec) for spec in specs}
        self._out = out
        self._partial = out.with_name(f"{out.name}.partial") if out else None
        if self._partial and self._partial.exists():
            earlier = read(self._partial)
            differs = _identity(earlier).items() ^ _identity(self.results).items()
            if differs:
                keys = ", ".join(sorted({key for key, _ in differs}))
                raise ResultsError(
                    f"{self._partial} is of another run ({keys} differ): delete it or name "
                    f"another output"
                )
            for series in earlier.series:
                self._check_source(series)
            self.results.series = earlier.series
            resumed = [*earlier.provenance.get("resumed_from", ()), earlier.provenance["date"]]
            self.results.provenance["resumed_from"] = resumed

    def measure(
        self,
        cells: Sequence[Cell],
        contenders: Callable[[Cell], Iterator[Contender]],
        count: Callable[[Cell], int],
    ) -> Results:
        """Time the contenders of each cell, unless an earlier run has, and write the output.

        count: how many contenders a cell has. Each is a check and, where it passes, a run to warm
        up and one per round: steps of one progress bar.
        """
        waiting = [cell for cell in cells if not self._is_done(dataclasses.asdict(cell))]
        steps = sum(count(cell) for cell in waiting) * (2 + self.rounds)
        with tqdm(total=steps, unit="run", disable=None) as bar:
            for cell in waiting:
                self._measure(dataclasses.asdict(cell), contenders(cell), count(cell), bar)
        return self._finish()

    def _is_done(self, labels: Mapping[str, Any]) -> bool:
        """Whether an earlier run has measured the cell."""
        old = [s for s in self.results.series if labels.items() <= s.labels.items()]
        return bool(old) and all(
            s.status != "ok"
            or (len(s.samples) >= self.rounds and s.facts.get("checked_again", True))
            for s in old
        )

    def _check_source(self, series: Series) -> None:
        """Raise ResultsError for a series of an earlier run whose backend may be another now."""
        if series.name not in self._sources:  # FREE_ATTENTION, which is of this module
            return
        now = self._sources[series.name]
        if now is None or now != series.labels.get("source_digest"):
            how = "has" if now else "(its source is in no file) may have"
            raise ResultsError(
                f"{series.name} {how} changed since {self._partial} was measured: delete that or "
                f"name another output"
            )

    def _measure(
        self,
        labels: Mapping[str, Any],
        contenders: Iterator[Contender],
        count: int,
        bar: tqdm[Any],
    ) -> None:
        """Time the contenders of one cell."""
        bar.set_description(", ".join(f"{key} {value}" for key, value in labels.items()))
        old = {s.name: s for s in self.results.series if labels.items() <= s.labels.items()}
        cell: dict[str, Contender] = {}
        bar.set_postfix_str("checking")
        for contender in contenders:
            name = contender.series.name
            cell[name] = contender
            if name in self._sources:
                contender.series.labels["source_digest"] = self._sources[name]
            if name in old and old[name].status == contender.series.status == "ok":
                contender.series.samples = old[name].samples
                contender.series.facts = {**old[name].facts, **contender.series.facts}
            bar.update()
        missing = [self.rounds - len(c.series.samples) for c in cell.values() if c.sample]
        runs = sum(1 + more for more in missing if more > 0)
        timing.leave_out(bar, count * (1 + self.rounds) - runs)
        self.results.series = [s for s in self.results.series if s not in old.values()]
        self.results.series += [contender.series for contender in cell.values()]

        def keep(name: str) -> None:
            series = cell[name].series
            series.samples[-1] = float(f"{series.samples[-1]:.6g}")
            for key, value in cell[name].last.items():
                series.facts.setdefault(key, []).append(float(f"{value:.6g}"))
            self._save()

        def reject(name: str, error: timing.Rejected) -> None:
            series = cell[name].series
            series.status, series.reason = "failed", str(error)
            series.samples.clear()
            self._save()

        self._save()
        timing.interleave(
            {name: c.sample for name, c in cell.items() if c.sample},
            rounds=self.rounds,
            samples={name: c.series.samples for name, c in cell.items()},
            on_sample=keep,
            on_rejected=reject,
            bar=bar,
        )
        for contender in cell.values():
            contender.sample = None  # its graph's memory is free for what follows
        for name, contender in cell.items():
            if contender.recheck and contender.series.samples:
                try:
                    contender.recheck()
                    contender.series.facts["checked_again"] = True
                except timing.Rejected as error:
                    reject(name, error)
        self._save()

    def _finish(self) -> Results:
        """Write the output, which is whole now."""
        if self._out and self._partial:
            self.results.write(self._out)
            with suppress(FileNotFoundError):
                os.remove(self._partial)
        return self.results

    def _save(self) -> None:
        if self._partial:
            self.results.write(self._partial)


def _identity(results: Results) -> dict[str, str]:
    """What two runs must share for their samples to belong together."""
    facts = results.provenance
    gpu = facts["gpu"] or {}
    shared = {"task": results.task, "gpu": gpu.get("name"), "driver": gpu.get("driver_version")}
    keys = ("source_digest", "packages", "cpu", "cpu_threads", "precision")
    shared |= {**results.settings, **{key: facts[key] for key in keys}}
    shared["build_flags"] = facts.get("build_flags")
    return {key: repr(value) for key, value in shared.items()}


# ---- The kernel alone ----------------------------------------------------------------------------


def compare_kernels(
    specs: Sequence[BackendSpec],
    cells: Sequence[KernelCell],
    *,
    device: str,
    rounds: int = 7,
    baseline: str | BackendSpec = BASELINE,
    task: str = "kernel",
    out: Path | None = None,
) -> Results:
    """Time attention() alone: each cell's samples are microseconds per call.

    On CUDA a sample is one replay of a graph of calls over rotating inputs that together exceed the
    L2. Backends that need contiguous inputs get them: the copies belong to the adapter. baseline: a
    name, or a backend that may be in no registry; measured even where specs lack it.
    """
    first, specs = _with_baseline(baseline, specs)
    for cell in cells:
        shape = ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(cell).items())
        _check_memory(f"inputs and output at {shape}", cell.min_bytes, device)
    settings = {"measures": "kernel", "device": device, "baseline": first.name}
    settings |= _plan(specs, cells)
    recorder = Recorder(task, settings, specs, out, rounds=rounds)
    ladder.build_all(device, specs)
    if device == "cuda" and out:
        dtypes = sorted({cell.dtype for cell in cells})
        recorder.results.provenance["limits"] = environment.gpu_limits(dtypes)
    return recorder.measure(
        cells,
        lambda cell: _kernel_contenders(specs, cell, device),
        lambda cell: len(_takers(specs, cell)),
    )


def _kernel_contenders(
    specs: Sequence[BackendSpec], cell: KernelCell, device: str
) -> Iterator[Contender]:
    sets = 2
    if device == "cuda":
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        rotated = max(2 * l2_bytes, MIN_ROTATED_BYTES)
        sets = max(-(-rotated // (cell.min_bytes * 3 // 4)), MIN_CALLS)

    # Made on first use, where an error for want of memory is one of the cell's own.
    @functools.cache
    def views() -> list[tuple[Tensor, ...]]:
        # What is read is rotated; numbers are drawn once, since they change no kernel's time.
        fused = torch.stack([x.contiguous() for x in cell.case.inputs(device)], 2)
        return [tuple((fused.clone() if i else fused).unbind(2)) for i in range(sets)]

    @functools.cache
    def dense() -> list[tuple[Tensor, ...]]:
        return [tuple(x.contiguous() for x in qkv) for qkv in views()]

    for spec in _takers(specs, cell):
        series = Series(spec.name, _labels(spec, dataclasses.asdict(cell), cell.dtype), "us")
        contender = Contender(series)
        try:
            _check(series, spec, [cell.case], device)
            if series.status == "ok":
                inputs = dense() if spec.needs_contiguous else views()
                workspace = _workspace(spec, inputs[0], is_causal=cell.is_causal)
                series.facts["workspace_bytes"] = workspace
                contender.sample = kernel_sampler(spec, inputs, is_causal=cell.is_causal)
                contender.recheck = functools.partial(_recheck, spec, cell.case, device)
                series.facts["checked_again"] = False
        except KERNEL_ERRORS as error:
            _fail(series, error, device)
        yield contender


def kernel_sampler(
    spec: BackendSpec, inputs: Sequence[tuple[Tensor, ...]], *, is_causal: bool = True
) -> Callable[[], float]:
    """A function that takes one sample: microseconds per call of the backend over the inputs."""
    calls = [functools.partial(spec.attention, *qkv, is_causal=is_causal) for qkv in inputs]

    def run() -> None:
        for call in calls:
            call()

    if inputs[0][0].device.type == "cpu":

        def on_host() -> float:
            started = time.perf_counter()
            run()
            return (time.perf_counter() - started) * 1e6 / len(calls)

        return on_host

    calls[0]()
    work = run
    if spec.cuda_graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        work = graph.replay

    return lambda: timing.device_seconds(work) * 1e6 / len(calls)


def _recheck(spec: BackendSpec, case: Case, device: str) -> None:
    """The output for other numbers, after all that was timed: a kernel must not have got stuck."""
    try:
        verdict = run_case(spec, dataclasses.replace(case, seed=1), device)
    except KERNEL_ERRORS as error:
        raise timing.Rejected(f"after its samples: {describe_error(error)}") from error
    if not verdict.passed:
        raise timing.Rejected(f"after its samples its output is wrong: {verdict}")


def _workspace(spec: BackendSpec, qkv: tuple[Tensor, ...], *, is_causal: bool) -> int | None:
    """The most device memory that a call takes beyond its inputs and output; None on the CPU."""
    if qkv[0].device.type != "cuda":
        return None
    spec.attention(*qkv, is_causal=is_causal)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = spec.attention(*qkv, is_causal=is_causal)
    return torch.cuda.max_memory_allocated() - before - o.numel() * o.element_size()


# ---- Generation end to end -----------------------------------------------------------------------


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
) -> Results:
    """Time generation with each backend: each cell's samples are seconds from prompt to last token.

    load: the model in a dtype, called once for each. name: what it is called in the results. The
    greedy tokens of each backend, in every call that is timed, are compared with the baseline's;
    where they part, diverge.examine() says whether that is a tie. baseline: as in
    compare_kernels(); in a dtype that it does not take, texts are compared with none. A contender
    FREE_ATTENTION, whose attention takes no time, bounds what any kernel can save.
    Capturing CUDA graphs (warm_up_s) and the whole call (call_s) are told apart in the facts.
    """
    if not cells:
        raise RequestError("there is nothing to compare")
    cells = sorted(cells, key=lambda cell: cell.dtype)
    if "float64" in {cell.dtype for cell in cells}:
        raise RequestError("text is generated in float32, float16 and bfloat16, not in float64")
    first, specs = _with_baseline(baseline, specs)
    settings: dict[str, Any] = {"measures": "generation", "model": name, "baseline": first.name}
    settings |= _plan(specs, cells)
    model = load(getattr(torch, cells[0].dtype))
    (ids,) = encode_prompts(model.tokenizer, [prompt] if isinstance(prompt, str) else [[*prompt]])
    for cell in cells:
        if not len(ids) < cell.max_tokens <= model.config.n_positions:
            raise RequestError(
                f"{cell.max_tokens} tokens in all: the prompt has {len(ids)}, and the model "
                f"{model.config.n_positions} positions"
            )
        itemsize = getattr(torch, cell.dtype).itemsize
        states = cell.batch * cell.max_tokens * model.config.n_embd * itemsize
        what = f"the states between two layers at batch {cell.batch}, {cell.max_tokens} tokens"
        _check_memory(what, states, model.device.type)
    settings |= {"device": model.device.type, "prompt_tokens": len(ids)}
    settings["prompt_digest"] = environment.token_digest([ids])
    settings |= {"weights_digest": weights_digest(model), "dtype_of_digest": cells[0].dtype}
    recorder = Recorder(task, settings, specs, out, rounds=rounds)
    ladder.build_all(model.device.type, specs)
    specs = [first, *(spec for spec in specs if spec.name != first.name)]

    def contenders(cell: GenerationCell) -> Iterator[Contender]:
        nonlocal model
        if model.dtype != getattr(torch, cell.dtype):
            model = load(getattr(torch, cell.dtype))
        return _generation_contenders(model, specs, cell, ids)

    # FREE_ATTENTION is one more.
    return recorder.measure(cells, contenders, lambda cell: len(_takers(specs, cell)) + 1)


def _generation_contenders(
    model: GPT2, specs: Sequence[BackendSpec], cell: GenerationCell, ids: list[int]
) -> Iterator[Contender]:
    """The backends, the baseline first, and FREE_ATTENTION."""
    device = model.device.type
    prompts, new_tokens = [ids] * cell.batch, cell.max_tokens - len(ids)
    config, labels = model.config, dataclasses.asdict(cell)
    dtype = getattr(torch, cell.dtype)
    expected: Generation | None = None
    for spec in _takers([*specs, _free_attention()], cell):
        series = Series(spec.name, _labels(spec, labels, cell.dtype), "s")
        contender = Contender(series)
        is_free = spec.name == FREE_ATTENTION
        decoder = spec if cell.mode == "kv-cache" else None
        call = functools.partial(
            generate,
            model.with_attention(spec, decoder),
            prompts,
            max_new_tokens=new_tokens,
            mode=cell.mode,
            ignore_eos=True,
        )
        try:
            if not is_free:
                # Also between: what is tuned by size is tuned before memory and time are taken.
                between = [n for n in (64, 128, 256, 512) if len(ids) < n < cell.max_tokens]
                cases = [
                    Case(n, config.head_dim, 1.0, cell.batch, config.n_head, dtype=dtype)
                    for n in (len(ids), *between, cell.max_tokens)
                ]
                _check(series, spec, cases, device, decode=cell.mode == "kv-cache")
            if series.status == "ok":
                done, peak = _text_and_peak(call, model)
                digest = environment.token_digest(done.tokens)
                series.facts |= {"peak_memory_bytes": peak, "token_digest": digest}
                expected = done if spec is specs[0] else expected
                series.facts["text_compared"] = expected is not None and not is_free
                if expected and not is_free and done.tokens != expected.tokens:
                    # Of the texts as they were written: alone, or again, they might be others.
                    found = examine(model, [specs[0], spec], [expected, done])
                    series.facts["diverges"] = found.verdict
                    if not found.passed:
                        fault = "; ".join(found.b.faults or found.a.faults)
                        series.status, series.reason = "failed", f"{found.verdict}: {fault}"
            if series.status == "ok":
                wanted = None if is_free else done.tokens
                contender.sample = functools.partial(_generation_sample, call, contender, wanted)
        except KERNEL_ERRORS as error:
            _fail(series, error, device)
        yield contender


def _generation_sample(
    call: Callable[[], Generation], contender: Contender, expected: list[list[int]] | None
) -> float:
    started = time.perf_counter()
    done = call().whole()
    contender.last = {
        "call_s": time.perf_counter() - started,
        "warm_up_s": done.warm_up_s,
        "prefill_s": done.prefill_s,
    }
    if expected is not None and done.tokens != expected:
        raise timing.Rejected("its text is another from run to run")
    return done.generation_s


def _text_and_peak(call: Callable[[], Generation], model: GPT2) -> tuple[Generation, int | None]:
    """The text, and the most memory allocated on the device meanwhile, weights included."""
    if model.device.type != "cuda":
        return call().whole(), None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    done = call().whole()
    return done, torch.cuda.max_memory_allocated(model.device)


def _free_attention() -> BackendSpec:
    """A backend whose attention takes no time: its output is the same zeros at every call.

    It is no attention, so it is in no registry; what is left is the time of everything else. Its
    zeros are kept as long as it is.
    """
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


def weights_digest(model: GPT2) -> str:
    """SHA-256 over the parameters' names and bytes."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- Shared --------------------------------------------------------------------------------------


def _plan(specs: Sequence[BackendSpec], cells: Sequence[Any]) -> dict[str, Any]:
    return {
        "backends": [spec.name for spec in specs],
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }


def _with_baseline(
    baseline: str | BackendSpec, specs: Sequence[BackendSpec]
) -> tuple[BackendSpec, list[BackendSpec]]:
    """The baseline, and the backends with it among them."""
    first = get_backend(baseline) if isinstance(baseline, str) else baseline
    lacks = first.name not in {spec.name for spec in specs}
    return first, [*[first] * lacks, *specs]


def _takers(specs: Sequence[BackendSpec], cell: GenerationCell | KernelCell) -> list[BackendSpec]:
    """The backends that take a cell's dtype; to the others it is no cell."""
    return [spec for spec in specs if cell.dtype in spec.precisions]


def _check_memory(what: str, needed: int, device: str) -> None:
    """Raise RequestError for what the memory of the device cannot hold, whatever the backend."""
    if device == "cuda":
        memory = torch.cuda.get_device_properties().total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise RequestError(
            f"{what} would take {needed >> 30:,} GiB, and {device} has {memory >> 30:,}"
        )


def _labels(spec: BackendSpec, cell: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What tells a series from others."""
    if spec.name == FREE_ATTENTION:
        return {**cell, "family": spec.family, "precision": "none"}
    labels = {**cell, "family": spec.family, "precision": spec.precisions[dtype]}
    if version := spec.version:
        labels |= {"flags": " ".join(version.flags), "change": version.title}
    return labels


def _source_digest(spec: BackendSpec) -> str | None:
    """SHA-256 over a backend's source files; None where there are none to be found."""
    digest = hashlib.sha256()
    for path in (files := _source_files(spec)):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest() if files else None


def _source_files(spec: BackendSpec) -> list[Path]:
    """All that a backend's kernel may be made of, sorted; none where its loader is in no file.

    Of a version file, all that its library is built of. Of a loader in Python, the source files of
    its whole package, or its own file in none: what it imports it may import by a name that it puts
    together, as those of backends.numpy are, so that no list of imports is sure to be whole.
    """
    if version := spec.version:
        return build.sources(version)
    loader = inspect.unwrap(spec.loader)
    try:
        file = Path(inspect.getsourcefile(loader) or "")
    except TypeError:  # no function: a partial, or an object that can be called
        return []
    if not file.is_file():  # <stdin>, <string>
        return []
    package = loader.__module__.partition(".")[0]
    # This project's .cu files are version files, which no other backend is made of.
    kinds = (".py",) if package == "attention_kernels" else environment.SOURCES
    folders = map(Path, getattr(sys.modules.get(package), "__path__", ()))
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in kinds}
    return sorted({file, *filter(Path.is_file, found)})


def _check(
    series: Series, spec: BackendSpec, cases: Sequence[Case], device: str, *, decode: bool = False
) -> None:
    """Hold the backend to the reference; what it finds goes into the series."""
    emulated = device in spec.emulated_on
    worst = None
    for wanted in cases:
        short = dataclasses.replace(wanted, seqlen=min(wanted.seqlen, EMULATED_SEQLEN), batch=1)
        case = short if emulated else wanted
        q, k, v = case.inputs(device)
        if reasons := spec.unsupported_reasons(q, k, v, is_causal=case.is_causal):
            series.status, series.reason = "refused", "; ".join(reasons)
            return
        verdict = run_case(spec, case, device)
        worst = max(worst or verdict, verdict, key=lambda verdict: verdict.nearness)
        if not verdict.passed:
            series.status = "failed"
            series.reason = f"{case}: {verdict}"
            break
    if decode and series.status == "ok":
        if not spec.has_decode(device):
            series.status, series.reason = "refused", f"it has no decode kernel on {device}"
            return
        verdict = decode_verdict(spec, device, cases[0].head_dim, cases[0].dtype)
        if not verdict.passed:
            series.status = "failed"
            series.reason = f"decode: {verdict}"
    if worst:
        facts = dataclasses.asdict(worst)
        del facts["where"], facts["fault"]  # the others are numbers
        for key, value in facts.items():  # JSON has no infinity
            series.facts[key] = float(f"{value:.4g}") if math.isfinite(value) else None
    if emulated and series.status == "ok":
        series.status, series.reason = "emulated", EMULATED


def _fail(series: Series, error: Exception, device: str) -> None:
    """Record the failure; raises ResultsError where it has broken the device for the others."""
    series.status = "refused" if isinstance(error, UnsupportedError) else "failed"
    series.reason = describe_error(error)
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as broken:
            why = describe_error(broken)
            raise ResultsError(f"{series.name} broke the CUDA context: {why}") from error
