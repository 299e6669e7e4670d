"""Whole texts: our engines beside transformers and the gpt-fast recipe, in one run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_infer.bench import environment
from gpt2_infer.bench.results import DecodeCell, DecodeSeries, DecodeTiming
from gpt2_infer.bench.timing import RejectedError, interleave
from gpt2_infer.bench.transformers import PROMPT, reference_of
from gpt2_infer.device_time import read_bandwidth
from gpt2_infer.engines import make_engine
from gpt2_infer.engines.base import Engine
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Marks
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName, Mode, Request

POSITION_STEP = 64  # tokens between two marks of a text
TRANSFORMERS = {
    "kv-cache": "transformers, static cache, compiled",
    "recompute": "transformers, no cache",
}
RECIPE = "gpt-fast recipe"

Run = Callable[[], tuple[list[list[int]], list[float]]]
"""Writes the text; returns its tokens and the seconds since the start at each mark."""


def compare_decoding(
    models: Sequence[str],
    dtypes: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    new_tokens: Sequence[int],
    engines: Sequence[EngineName],
    mode: Mode = "kv-cache",
    backends: Sequence[str] = (),
    peers: bool,
    rounds: int,
    task: str,
    out: Path | None = None,
) -> DecodeTiming:
    """Time whole greedy texts of random weights, prefill included.

    What is done once, such as capturing graphs, counts in recompute only. backends: of attention,
    one contender each per engine. peers: whether transformers, and with a cache the recipe, run
    beside the engines. In float32 each contender's text is compared with the first's. A contender
    whose text changes from run to run fails, but for a peer in 16 bits. Raises RequestError without
    a GPU, or for what an engine does not support.
    """
    if not torch.cuda.is_available():
        raise RequestError("decoding is compared on a CUDA device")
    provenance = environment.provenance()
    read_gb_s = read_bandwidth(torch.device("cuda"), 4 * 2**30)
    torch.cuda.empty_cache()
    series = []
    for name in models:
        for dtype in dtypes:
            model = GPT2.from_pretrained(
                name, random_weights=True, device="cuda", dtype=getattr(torch, dtype)
            )
            for batch in batch_sizes:
                for count in new_tokens:
                    cell = DecodeCell(name, dtype, batch, len(PROMPT), count, mode)
                    series += _time(model, cell, engines, backends, peers=peers, rounds=rounds)
            del model
            torch.cuda.empty_cache()
    results = DecodeTiming(
        task=task,
        provenance=provenance,
        rounds=rounds,
        read_gb_s=round(read_gb_s, 1),
        series=series,
    )
    if out:
        results.write(out)
    return results


def _time(
    model: GPT2,
    cell: DecodeCell,
    engines: Sequence[EngineName],
    backends: Sequence[str],
    *,
    peers: bool,
    rounds: int,
) -> list[DecodeSeries]:
    attentions: Sequence[str | None] = backends or [None]
    runs: dict[str, Run] = {
        ", ".join(filter(None, [backend, name])): _engine(model.with_attention(backend), cell, name)
        for backend in attentions
        for name in engines
    }
    programs: dict[str, Literal["gpt2-infer", "transformers", "recipe"]]
    programs = dict.fromkeys(runs, "gpt2-infer")
    if peers:
        runs[TRANSFORMERS[cell.mode]] = _transformers(model, cell)
        programs[TRANSFORMERS[cell.mode]] = "transformers"
        if cell.mode == "kv-cache":
            runs[RECIPE] = _recipe(model, cell)
            programs[RECIPE] = "recipe"
    # The second text: while something is compiled or captured other kernels may run.
    texts = {name: [run() for _ in range(2)][1][0] for name, run in runs.items()}
    expected = next(iter(texts.values()))

    def sample(name: str) -> list[float]:
        tokens, marks = runs[name]()
        must_repeat = cell.dtype == "float32" or programs[name] == "gpt2-infer"
        if tokens != texts[name] and must_repeat:
            raise RejectedError("its text is another from run to run")
        return marks

    figures = interleave(
        {name: functools.partial(sample, name) for name in runs}, rounds=rounds, warm_up=0
    )
    series = []
    for name, marks in figures.items():
        one = DecodeSeries(
            name=name,
            program=programs[name],
            cell=cell,
            weight_bytes=model.step_bytes,
            same_text=texts[name] == expected if cell.dtype == "float32" else None,
        )
        if isinstance(marks, RejectedError):
            one.status, one.reason = "failed", str(marks)
        else:
            one.samples = [float(f"{each[-1]:.6g}") for each in marks]
            one.marks = [[float(f"{moment:.6g}") for moment in each] for each in marks]
        series.append(one)
    return series


def _engine(model: GPT2, cell: DecodeCell, name: EngineName) -> Run:
    request = Request(
        config=model.config,
        tokenizer=None,
        prompts=[PROMPT] * cell.batch,
        max_new_tokens=cell.new_tokens,
        mode=cell.mode,
        ignore_eos=True,
        engine=name,
    )

    def ready() -> Engine:
        engine = make_engine(model, request)
        engine.warm_up()
        return engine

    @torch.inference_mode()
    def run() -> tuple[list[list[int]], list[float]]:
        marks = Marks(model.device)
        marks.synchronize()
        if kept is None:
            started = time.perf_counter()
            engine = ready()
            marks.synchronize()
            once = time.perf_counter() - started
        else:
            engine, once = kept, 0.0
            engine.reset()
            marks.synchronize()
        marks.add()
        for index in range(cell.new_tokens):
            engine.step(index)
            if (index + 1) % POSITION_STEP == 0 or index + 1 == cell.new_tokens:
                marks.add()
        marks.synchronize()
        seconds = [once + moment for moment in marks.seconds()[1:]]
        return engine.new_tokens(cell.new_tokens), seconds

    with torch.inference_mode():
        kept = ready() if cell.mode == "kv-cache" else None
    return run


def _transformers(model: GPT2, cell: DecodeCell) -> Run:
    reference = reference_of(model)
    ids = torch.tensor([PROMPT] * cell.batch, device="cuda")
    how: dict[str, object] = {"use_cache": False}
    if cell.mode == "kv-cache":
        how = {"cache_implementation": "static"}  # which compiles the forward pass

    def run() -> tuple[list[list[int]], list[float]]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        tokens = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=cell.new_tokens,
            min_new_tokens=cell.new_tokens,
            do_sample=False,
            pad_token_id=0,
            **how,
        )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return tokens[:, len(PROMPT) :].tolist(), [seconds]

    return run


def _recipe(model: GPT2, cell: DecodeCell) -> Run:
    """Return gpt-fast's recipe: a static cache, and one compiled step that a CUDA graph replays."""
    config = model.config
    capacity = len(PROMPT) + cell.new_tokens
    cache = KVCache.allocate(model, cell.batch, capacity)
    # Otherwise torch.compile takes the cache for an input that changes, and captures no graph.
    torch._dynamo.mark_static_address(cache.kv)
    places = torch.arange(capacity, device="cuda")

    def step(token: Tensor, position: Tensor) -> Tensor:
        mask = (places <= position)[None, None, None]
        x = F.embedding(token, model.wte.weight) + F.embedding(position, model.wpe.weight)
        shape = (cell.batch, 1, 3, config.n_head, config.head_dim)
        for layer, block in enumerate(model.blocks()):
            weights = block.attn.c_attn
            qkv = torch.addmm(weights.bias, block.ln_1(x), weights.weight).view(shape)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            cache.kv[layer, 0].index_copy_(2, position, k)
            cache.kv[layer, 1].index_copy_(2, position, v)
            k, v = cache.kv[layer].unbind()
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            proj, fc, out = block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
            x = x + torch.addmm(proj.bias, o.reshape(x.shape), proj.weight)
            hidden = torch.addmm(fc.bias, block.ln_2(x), fc.weight)
            x = x + torch.addmm(out.bias, F.gelu(hidden, approximate="tanh"), out.weight)
        return F.linear(model.ln_f(x), model.wte.weight).argmax(-1)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    prompt = torch.tensor([PROMPT] * cell.batch, device="cuda")
    tokens = torch.zeros(cell.batch, cell.new_tokens, dtype=torch.long, device="cuda")

    @torch.inference_mode()
    def run() -> tuple[list[list[int]], list[float]]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        token = model(prompt, cache=cache)[:, 0].argmax(-1)
        position = torch.tensor([len(PROMPT)], device="cuda")
        tokens[:, 0] = token
        for index in range(1, cell.new_tokens):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            token = compiled(token, position).clone()
            tokens[:, index] = token
            position += 1
        torch.cuda.synchronize()
        return tokens.tolist(), [time.perf_counter() - started]

    return run
