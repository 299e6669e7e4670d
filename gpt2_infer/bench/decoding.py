"""Compare our engines with transformers and the gpt-fast recipe on whole texts, in one run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_kernels.errors import RejectedTimeError
from gpt2_infer import perplexity
from gpt2_infer.bench import models
from gpt2_infer.bench.limits import read_bandwidth
from gpt2_infer.bench.record import DecodeCell, Row
from gpt2_infer.bench.study import Contender, DecodeStudy, Subject
from gpt2_infer.checkpoint import DEMO_MODEL, resolve_device
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import generate
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName

PROMPT = [15496, 11, 314, 1101, 257, 3303, 2746, 11]  # "Hello, I'm a language model,"
PIECE = 1024  # tokens of a book between the beginnings of two prompts
Text = tuple[list[list[int]], Mapping[str, float]]
"""The tokens of a text, and the seconds that it took, by metric."""


class Decoding(Subject[DecodeCell]):
    """Times whole greedy texts; only the demo model has real weights.

    With a cache, a sample is the seconds from the first step to the last, prefill included; `call`
    is the whole call, whose graphs an earlier one has captured. In recompute, a sample is a whole
    call, one-time work included; `generation` is its steps. A peer's samples are whole calls. In
    float32 each contender's text is compared with the first's. A contender whose text changes from
    run to run fails, except a peer in 16 bits.
    """

    warm_up = 0  # contenders() has already run each one twice

    def __init__(self, study: DecodeStudy) -> None:
        self.study, self.rounds = study, study.rounds
        self.device = resolve_device(study.device).type
        load = functools.partial(GPT2.from_pretrained, device=self.device)
        self._load = models.loader(load, random_weights=DEMO_MODEL not in study.models)
        cache = "static cache, compiled" if self.device == "cuda" else "dynamic cache"
        self._peer = f"transformers, {cache if study.mode == 'kv-cache' else 'no cache'}"
        if study.new_tokens == [1]:
            self._peer = "transformers"
        self.facts = {"baseline": self._peer} if study.peers else {}
        self.cells = [
            DecodeCell(name, dtype, batch, study.prompt_tokens, count, study.mode, piece)
            for name, dtype, batch, count, piece in itertools.product(
                study.models, study.dtypes, study.batch_sizes, study.new_tokens, study.pieces
            )
        ]
        self.measures_energy_of = self.cells if study.energy else []

    def limits(self, *, is_recorded: bool) -> dict[str, float]:
        """Measure the GPU's read bandwidth."""
        if self.device == "cpu":
            return {}
        found = read_bandwidth()
        torch.cuda.empty_cache()
        return {"read_gbps": round(found, 1)}

    def contenders(self, cell: DecodeCell) -> Iterator[Contender]:
        """Generate each contender's text and compare it with the first's."""
        torch.cuda.empty_cache()
        model = self._load(cell.model, dtype=cell.dtype)
        expected = None
        for row, run in self._runs(model, cell):
            row.extra["weight_bytes"] = model.step_bytes
            contender = Contender(row)
            try:
                run()  # other kernels may run while it is compiled
                text, _ = run()
            except RequestError as error:
                row.status, row.reason = "refused", str(error)
            else:
                expected = expected or text
                if cell.dtype == "float32":
                    row.extra["same_text"] = text == expected
                must_repeat = cell.dtype == "float32" or row.extra["program"] == "gpt2-infer"
                contender.sample = functools.partial(_sample, run, text if must_repeat else None)
            yield contender

    def _runs(self, model: GPT2, cell: DecodeCell) -> Iterator[tuple[Row, Callable[[], Text]]]:
        """Yield each contender's row, and the function that generates its text."""
        backends: list[str | None] = [*self.study.backends] or [None]
        study = self.study
        combined = itertools.product(study.products, backends, study.engines, study.guesses)
        for products, backend, engine, guesses in combined:
            precision = {} if products == "ieee-fp32" else {"precision": products}
            guessing = f"{guesses} guess{'es' * (guesses > 1)}" if guesses else ""
            name = ", ".join(filter(None, [backend, engine, guessing, *precision.values()]))
            extra = {"program": "gpt2-infer", **precision}
            ours = model.with_products(products).with_attention(backend)
            row = Row(contender=name, metric="time", unit="s", extra=extra)
            yield row, functools.partial(_ours, ours, cell, engine, guesses, row.extra)
        if self.study.peers:
            peers = [(self._peer, "transformers", _transformers)]
            if cell.mode == "kv-cache" and cell.new_tokens > 1 and self.device == "cuda":
                peers.append(("gpt-fast recipe", "recipe", _recipe))
            for name, program, start in peers:
                row = Row(contender=name, metric="time", unit="s", extra={"program": program})
                yield row, start(model, cell)


def _sample(run: Callable[[], Text], expected: list[list[int]] | None) -> Mapping[str, float]:
    tokens, figures = run()
    if expected is not None and tokens != expected:
        raise RejectedTimeError("its text changes from run to run")
    return figures


def _prompts(model: GPT2, cell: DecodeCell) -> list[list[int]]:
    if cell.piece:
        first = PIECE * cell.piece
        book = perplexity.read_text(perplexity.HELD_OUT, model, max_tokens=first + PIECE).ids
        return [book[first : first + cell.prompt_tokens]] * cell.batch
    repeated = itertools.islice(itertools.cycle(PROMPT), cell.prompt_tokens)
    return [[token % model.config.vocab_size for token in repeated]] * cell.batch


def _ours(
    model: GPT2, cell: DecodeCell, engine: EngineName, guesses: int, extra: dict[str, Any]
) -> Text:
    """Generate the text with an engine, and note its passes."""
    if cell.mode == "recompute":
        model.release()
    call = functools.partial(
        generate,
        model,
        _prompts(model, cell),
        max_new_tokens=cell.new_tokens,
        mode=cell.mode,
        ignore_eos=True,
        engine=engine,
        guesses=guesses,
    )
    found, seconds = models.timed(model.device, call)
    done = found.whole()
    if done.passes:
        extra["tokens_per_pass"] = round((cell.new_tokens - 1) / done.passes, 3)
    if cell.mode == "recompute":
        return done.tokens, {"time": seconds, "generation": done.generation_s}
    return done.tokens, {"time": done.generation_s, "call": seconds}


def _whole_call(model: GPT2, call: Callable[[], Tensor]) -> Text:
    """Generate a peer's text; call() returns its new tokens."""
    tokens, seconds = models.timed(model.device, lambda: call().tolist())
    return tokens, {"time": seconds}


def _transformers(model: GPT2, cell: DecodeCell) -> Callable[[], Text]:
    """Return transformers' generation; of one token, its forward pass up to the last logits."""
    reference = models.reference_of(model)
    ids = torch.tensor(_prompts(model, cell), device=model.device)
    how: dict[str, Any] = {"use_cache": cell.mode == "kv-cache"}
    if how["use_cache"] and model.device.type == "cuda":
        how["cache_implementation"] = "static"  # makes transformers compile, too

    def write() -> Tensor:
        if cell.new_tokens > 1:
            return models.generated(reference, ids, cell.new_tokens, **how)
        with torch.inference_mode():
            logits: Tensor = reference(ids, logits_to_keep=1).logits
        return logits.argmax(-1)

    return functools.partial(_whole_call, model, write)


def _recipe(model: GPT2, cell: DecodeCell) -> Callable[[], Text]:
    """Return gpt-fast's recipe: a static cache, and one compiled step that a CUDA graph replays."""
    config = model.config
    capacity = cell.prompt_tokens + cell.new_tokens
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
    prompt = torch.tensor(_prompts(model, cell), device=model.device)
    tokens = torch.zeros(cell.batch, cell.new_tokens, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def write() -> Tensor:
        token = model(prompt, cache=cache)[:, 0].argmax(-1)
        position = torch.tensor([cell.prompt_tokens], device=model.device)
        tokens[:, 0] = token
        for index in range(1, cell.new_tokens):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            token = compiled(token, position).clone()
            tokens[:, index] = token
            position += 1
        return tokens

    return functools.partial(_whole_call, model, write)
