"""Many prompts: continuous batching beside transformers with padding, and whole jobs."""

from __future__ import annotations

import functools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt2_infer.batch import Settings
from gpt2_infer.batch.job import load
from gpt2_infer.bench import environment
from gpt2_infer.bench.results import BatchSeries, BatchTiming, Provenance
from gpt2_infer.bench.timing import RejectedError, interleave
from gpt2_infer.bench.transformers import reference_of
from gpt2_infer.checkpoint import DEMO_MODEL, resolve_device
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import generate
from gpt2_infer.model import GPT2
from gpt2_infer.request import Request

PROMPT_TOKENS = (4, 60)
BATCHES = 16  # of a contender, unless there are fewer prompts
TRANSFORMERS = "transformers, padded"


def compare_batches(
    name: str,
    dtypes: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    device: str,
    prompts: int,
    new_tokens: int,
    peer_batch_sizes: Sequence[int],
    rounds: int,
    task: str,
    out: Path | None = None,
) -> BatchTiming:
    """Time greedy texts of random prompts by batch size; weights are random but the demo model's.

    A small batch takes a fair part of the prompts; a batch of 1 is one prompt after another, by
    generate(). Some rows are completed in another order, too: how many are the same, bit for bit?
    peer_batch_sizes: of transformers, whose batches are sorted by length and padded on the left.
    The file is written after each dtype. Raises UnavailableDeviceError.
    """
    provenance = environment.provenance()
    rng = random.Random(0)
    lengths = sorted(rng.randint(*PROMPT_TOKENS) for _ in range(prompts))
    series = []
    for dtype in dtypes:
        settings = Settings(model=name, dtype=dtype, random_weights=name != DEMO_MODEL)
        model = load(settings, resolve_device(device))
        rows = [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in lengths]
        expected: dict[int, list[int]] = {}
        contenders: dict[str, tuple[BatchSeries, Callable[[], float]]] = {}
        for batch in batch_sizes:
            one = _series(f"batch {batch}", "gpt2-infer", dtype, batch, rows, new_tokens)
            part = _requests(model, rows, one.prompts, new_tokens)
            if batch == 1:
                run = functools.partial(_one_by_one, model.with_attention(None), part)
            else:
                engine = Continuous(model, batch=batch)
                run = functools.partial(_ours, engine, part, one, expected)
            contenders[one.name] = (one, run)
        for batch in peer_batch_sizes:
            one = _series(
                f"{TRANSFORMERS}, {batch}", "transformers", dtype, batch, rows, new_tokens
            )
            part = _requests(model, rows, one.prompts, new_tokens)
            run = functools.partial(_transformers, reference_of(model), part, one, expected)
            contenders[one.name] = (one, run)
        series += _time(contenders, rounds, warm_up=1)
        results = _write(name, series, new_tokens, rounds, provenance, task, out)
        del model, contenders
        torch.cuda.empty_cache()
    return results


def _write(
    model: str,
    series: list[BatchSeries],
    new_tokens: int,
    rounds: int,
    provenance: Provenance,
    task: str,
    out: Path | None,
) -> BatchTiming:
    results = BatchTiming(
        task=task,
        provenance=provenance,
        rounds=rounds,
        model=model,
        new_tokens=new_tokens,
        series=series,
    )
    if out:
        results.write(out)
    return results


def _time(
    contenders: dict[str, tuple[BatchSeries, Callable[[], float]]], rounds: int, warm_up: int
) -> list[BatchSeries]:
    def sample(name: str) -> float:
        one, run = contenders[name]
        seconds = run()
        print(f"{one.dtype}, {name}: {one.tokens} tokens in {seconds:.2f} s", file=sys.stderr)
        return seconds

    runs = {name: functools.partial(sample, name) for name in contenders}
    for name, samples in interleave(runs, rounds=rounds, warm_up=warm_up).items():
        one, _ = contenders[name]
        if isinstance(samples, RejectedError):
            one.status, one.reason = "failed", str(samples)
        else:
            one.samples = [float(f"{seconds:.6g}") for seconds in samples]
    return [one for one, _ in contenders.values()]


def _series(
    name: str, program: Any, dtype: str, batch: int, rows: Sequence[object], new_tokens: int
) -> BatchSeries:
    count = min(len(rows), BATCHES * batch)
    return BatchSeries(
        name=name,
        program=program,
        dtype=dtype,
        batch=batch,
        prompts=count,
        tokens=count * new_tokens,
    )


def _requests(
    model: GPT2, rows: Sequence[list[int]], count: int, new_tokens: int
) -> list[tuple[int, Request]]:
    """Return evenly spaced ones of sorted rows."""
    return [
        (
            index,
            Request(
                config=model.config,
                tokenizer=None,
                prompts=[rows[index]],
                max_new_tokens=new_tokens,
                mode="kv-cache",
                ignore_eos=True,
            ),
        )
        for index in range(0, len(rows), len(rows) // count)
    ][:count]


def _ours(
    engine: Continuous,
    requests: list[tuple[int, Request]],
    one: BatchSeries,
    expected: dict[int, list[int]],
) -> float:
    first = None
    if one.same_rows is None:
        some = requests[:: max(2, len(requests) // engine.batch)]
        random.Random(1).shuffle(some)
        first = dict(engine.run(some))
    done, seconds = _timed(engine.model.device, lambda: dict(engine.run(requests)))
    if first is not None:
        one.same_rows = sum(done[index] == row for index, row in first.items()) / len(first)
    for index, row in done.items():
        if isinstance(row, str):
            raise RejectedError(row)
        expected.setdefault(index, row.tokens)
    return seconds


def _one_by_one(model: GPT2, requests: Sequence[tuple[int, Request]]) -> float:
    def run() -> None:
        for _, one in requests:
            generate(
                model,
                one.rows,
                max_new_tokens=one.max_new_tokens,
                mode=one.mode,
                ignore_eos=one.ignore_eos,
            )

    _, seconds = _timed(model.device, run)
    return seconds


def _transformers(
    reference: Any,
    requests: list[tuple[int, Request]],
    one: BatchSeries,
    expected: dict[int, list[int]],
) -> float:
    done: dict[int, list[int]] = {}
    new_tokens = requests[0][1].max_new_tokens

    def run() -> None:
        for begin in range(0, len(requests), one.batch):
            part = requests[begin : begin + one.batch]
            rows = [request.rows[0] for _, request in part]
            longest = max(map(len, rows))
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            tokens = reference.generate(
                ids.to(reference.device),
                attention_mask=mask.to(reference.device),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            for (index, _), row in zip(part, tokens[:, longest:].tolist(), strict=True):
                done[index] = row

    _, seconds = _timed(reference.device, run)
    if ours := [expected[index] == row for index, row in done.items() if index in expected]:
        one.same_rows = sum(ours) / len(ours)
    return seconds


def _timed(device: torch.device, run: Callable[[], Any]) -> tuple[Any, float]:
    """Return what run() does, and the seconds until the device has done it."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    started = time.perf_counter()
    done = run()
    wait()
    return done, time.perf_counter() - started


def compare_jobs(
    name: str,
    options: Sequence[str],
    *,
    prompts: int,
    new_tokens: int,
    batch_size: int | None,
    rounds: int,
    task: str,
    out: Path | None = None,
) -> BatchTiming:
    """Time `gpt2-infer batch` of random prompts with each of some options, by the clock.

    Weights are random but the demo model's. Before each job one of two rows in two files tells what
    it takes to start. What the jobs write must be equal, sorted.
    """
    provenance = environment.provenance()
    rng = random.Random(0)
    rows = [
        {"id": f"{i}", "prompt": [rng.randrange(1000) for _ in range(rng.randint(1, 24))]}
        for i in range(prompts)
    ]
    contenders: dict[str, tuple[BatchSeries, Callable[[], float]]] = {}
    written: dict[str, bytes] = {}
    starts = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        job = functools.partial(_job, name, new_tokens, batch_size, Path(folder))

        def start(which: str) -> float:
            return job(f"{which} --part-rows 1", rows[:2])[0]

        def run(which: str) -> float:
            starts[which].append(start(which))
            seconds, written[which] = job(which, rows)
            if written[which] != written[options[0]]:
                raise RejectedError("its rows are others than those of the first")
            return seconds

        for which in options:
            one = BatchSeries(
                name=which,
                program="gpt2-infer",
                dtype="float32",
                batch=batch_size or 0,
                prompts=prompts,
                tokens=prompts * new_tokens,
            )
            contenders[which] = (one, functools.partial(run, which))
        start(options[0])  # kernels are built, and libraries come from the disk
        series = _time(contenders, rounds, warm_up=0)
    for one in series:
        one.start_s = round(statistics.median(starts[one.name]), 3)
    return _write(name, series, new_tokens, rounds, provenance, task, out)


def _job(
    model: str,
    new_tokens: int,
    batch_size: int | None,
    folder: Path,
    options: str,
    rows: Sequence[dict[str, Any]],
) -> tuple[float, bytes]:
    """Return the seconds that a command takes, and its rows, sorted."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-m", "gpt2_infer", "batch", str(prompts), "--out", out]
        command += [*options.split(), "--model", model, "--ignore-eos"]
        command += ["--max-new-tokens", str(new_tokens)]
        command += [] if model == DEMO_MODEL else ["--random-weights"]
        command += [] if batch_size is None else ["--batch-size", str(batch_size)]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            raise RequestError(f"gpt2-infer batch failed: {done.stderr[-1000:]}")
        lines = [line for file in Path(out).glob("*.jsonl") for line in file.open("rb")]
        return seconds, b"".join(sorted(lines))
