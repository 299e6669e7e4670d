"""Compare our engines with transformers and the gpt-fast recipe on whole texts, in one run."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_infer.bench import models
from gpt2_infer.bench.record import DecodeCell, Row
from gpt2_infer.bench.study import Contender, DecodeStudy, RejectedError, Subject
from gpt2_infer.device_time import read_bandwidth
from gpt2_infer.engines import make_engine
from gpt2_infer.engines.base import Engine
from gpt2_infer.engines.fused import Fused
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Marks
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName, Request

PROMPT = [15496, 11, 314, 1101, 257, 3303, 2746, 11]  # "Hello, I'm a language model,"
POSITION_STEP = 64  # tokens between two time marks
TRANSFORMERS = {
    "kv-cache": "transformers, static cache, compiled",
    "recompute": "transformers, no cache",
}
RECIPE = "gpt-fast recipe"
PORTABLE = "fused, sm_80"

Run = Callable[[], tuple[list[list[int]], list[float]]]
"""Generates the text; returns its tokens and the seconds from the start to each mark."""


class Decoding(Subject[DecodeCell]):
    """Times whole greedy texts of random weights, prefill included; a sample is seconds.

    One-time work, such as capturing graphs, counts in recompute only. In float32 each contender's
    text is compared with the first's. A contender whose text changes from run to run fails, except
    a peer in 16 bits.
    """

    warm_up = 0  # contenders() has already run each one twice

    def __init__(self, study: DecodeStudy) -> None:
        if not torch.cuda.is_available():
            raise RequestError("decoding is compared on a CUDA device only")
        self.study, self.rounds, self.device = study, study.rounds, "cuda"
        self._models = models.OneModel(random_weights=True, device="cuda")
        self.prompt = PROMPT
        if study.prompt_tokens is not None:
            generator = torch.Generator().manual_seed(0)
            self.prompt = torch.randint(50257, (study.prompt_tokens,), generator=generator).tolist()
        self.cells = [
            DecodeCell(name, dtype, batch, len(self.prompt), count, study.mode)
            for name, dtype, batch, count in itertools.product(
                study.models, study.dtypes, study.batch_sizes, study.new_tokens
            )
        ]

    def limits(self, *, is_recorded: bool) -> dict[str, float]:
        """Measure the GPU's read bandwidth."""
        found = read_bandwidth(torch.device("cuda"), 4 * 2**30)
        torch.cuda.empty_cache()
        return {"read_gbps": round(found, 1)}

    def contenders(self, cell: DecodeCell) -> Iterator[Contender]:
        """Generate each contender's text and compare it with the first's."""
        torch.cuda.empty_cache()
        model = self._models.load(cell.model, cell.dtype)
        expected = None
        for name, program, run in self._runs(model, cell):
            # Keep the second text: other kernels may run while the first is compiled or captured.
            text = [run() for _ in range(2)][1][0]
            expected = expected or text
            row = Row(contender=name, metric="time", unit="s", extra={"program": program})
            row.extra["weight_bytes"] = model.step_bytes
            if cell.dtype == "float32":
                row.extra["same_text"] = text == expected
            must_repeat = cell.dtype == "float32" or program == "gpt2-infer"
            yield Contender(row, functools.partial(_sample, run, text if must_repeat else None))

    def _runs(self, model: GPT2, cell: DecodeCell) -> Iterator[tuple[str, str, Run]]:
        """Yield the name, the program and the run function of each contender."""
        backends: list[str] | list[None] = self.study.backends or [None]
        combined = itertools.product(self.study.products, backends, self.study.engines)
        for products, backend, name in combined:
            how = None if products == "ieee-fp32" else products
            words = ", ".join(filter(None, [backend, name, how]))
            ours = model.with_products(products).with_attention(backend)
            yield words, "gpt2-infer", _engine(ours, cell, name, self.prompt)
        if self.study.portable:
            run = _engine(model, cell, "fused", self.prompt, arch="compute_80")
            yield PORTABLE, "gpt2-infer", run
        if self.study.peers and cell.new_tokens == 1:
            yield "transformers", "transformers", _transformers_prompt(model, self.prompt)
        elif self.study.peers:
            yield TRANSFORMERS[cell.mode], "transformers", _transformers(model, cell)
            if cell.mode == "kv-cache":
                yield RECIPE, "recipe", _recipe(model, cell)


def _sample(run: Run, expected: list[list[int]] | None) -> dict[str, Any]:
    tokens, marks = run()
    if expected is not None and tokens != expected:
        raise RejectedError("its text changes from run to run")
    return {"time": marks[-1], "marks": marks}


def _engine(
    model: GPT2, cell: DecodeCell, name: EngineName, prompt: list[int], arch: str | None = None
) -> Run:
    """Return an engine's run; arch: of the portable fused step, from its PTX."""
    request = Request(
        config=model.config,
        tokenizer=None,
        prompts=[prompt] * cell.batch,
        max_new_tokens=cell.new_tokens,
        mode=cell.mode,
        ignore_eos=True,
        engine=name,
    )

    def ready() -> Engine:
        engine = make_engine(model, request)
        if isinstance(engine, Fused):
            engine.arch = arch
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
    reference = models.reference_of(model)
    ids = torch.tensor([PROMPT] * cell.batch, device=model.device)
    how: dict[str, Any] = {"use_cache": False}
    if cell.mode == "kv-cache":
        how = {"cache_implementation": "static"}  # makes transformers compile, too

    def run() -> tuple[list[list[int]], list[float]]:
        call = functools.partial(models.generated, reference, ids, cell.new_tokens, **how)
        tokens, seconds = models.timed(model.device, call)
        return tokens.tolist(), [seconds]

    return run


def _transformers_prompt(model: GPT2, prompt: list[int]) -> Run:
    """Return transformers' forward pass, with the logits of the last position."""
    reference = models.reference_of(model)
    ids = torch.tensor([prompt], device=model.device)

    @torch.inference_mode()
    def forward() -> Tensor:
        logits: Tensor = reference(ids, logits_to_keep=1).logits
        return logits.argmax(-1)

    def run() -> tuple[list[list[int]], list[float]]:
        tokens, seconds = models.timed(model.device, forward)
        return tokens.tolist(), [seconds]

    return run


def _recipe(model: GPT2, cell: DecodeCell) -> Run:
    """Return gpt-fast's recipe: a static cache, and one compiled step that a CUDA graph replays."""
    config = model.config
    capacity = len(PROMPT) + cell.new_tokens
    cache = KVCache.allocate(model, cell.batch, capacity)
    # Otherwise torch.compile treats the cache as a mutated input and captures no graph.
    torch._dynamo.mark_static_address(cache.kv)
    places = torch.arange(capacity, device=model.device)

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
    prompt = torch.tensor([PROMPT] * cell.batch, device=model.device)
    tokens = torch.zeros(cell.batch, cell.new_tokens, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def generate() -> None:
        token = model(prompt, cache=cache)[:, 0].argmax(-1)
        position = torch.tensor([len(PROMPT)], device=model.device)
        tokens[:, 0] = token
        for index in range(1, cell.new_tokens):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            token = compiled(token, position).clone()
            tokens[:, index] = token
            position += 1

    def run() -> tuple[list[list[int]], list[float]]:
        _, seconds = models.timed(model.device, generate)
        return tokens.tolist(), [seconds]

    return run
