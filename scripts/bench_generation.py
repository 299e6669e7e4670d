"""Generation end to end, ours beside transformers' generate, in one interleaved run.

    python scripts/bench_generation.py cpu  --out results/<date>_<cpu>_generation.json
    python scripts/bench_generation.py cuda --out results/<date>_<gpu>_generation.json

cpu: the demo model, 8 prompt tokens and 256 new ones, with and without a cache.
cuda: GPT-2 small with random weights, float32, 8 to 512 tokens: recompute with each of PyTorch's
backends that takes float32, and a KV cache. Every contender's greedy tokens are compared with those
of the first before anything is timed; one that differs is recorded as failed. A sample is the wall
time of the whole call; what our calls spend on warm-up (capturing CUDA graphs) is also told apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers import GPT2Config as TransformersConfig

from attention_kernels import AttentionError, list_backends
from gpt2_infer import GPT2, GPT2InferError, generate
from gpt2_infer.bench import environment, tables, timing
from gpt2_infer.bench.compare import MIN_ROUNDS
from gpt2_infer.bench.results import OUT_HELP, ROUNDS_HELP, Results, Series, at_least, output_file
from gpt2_infer.cli import Parser
from gpt2_infer.generation import GRAPH_LENGTH_STEP, MODES, Mode

PROMPT = [[15496, 11, 314, 1101, 257, 3303, 2746, 11]]  # "Hello, I'm a language model,"


@dataclass
class Contender:
    """Something that generates: run() returns the tokens and its own split of the time."""

    name: str
    labels: dict[str, Any]
    run: Callable[[], tuple[list[list[int]], dict[str, float]]]
    splits: list[dict[str, float]] = field(default_factory=list)

    def timed(self) -> float:
        """Wall seconds of one call, device included."""
        _synchronize()
        started = time.perf_counter()
        _, split = self.run()
        _synchronize()
        self.splits.append(split)
        return time.perf_counter() - started


def ours(model: GPT2, prompt: list[list[int]], new_tokens: int, mode: Mode) -> Contender:
    """Our own generate()."""

    def run() -> tuple[list[list[int]], dict[str, float]]:
        done = generate(model, prompt, max_new_tokens=new_tokens, mode=mode, ignore_eos=True)
        done.whole()
        split = {
            "warm_up_s": done.warm_up_s,
            "prefill_s": done.prefill_s,
            "generation_s": done.generation_s,
        }
        return done.tokens, split

    backend = model.attention if mode == "recompute" else model.decode_attention
    labels = {
        "program": "gpt2-infer",
        "mode": mode,
        "attention": model.attention.name,
        "decode_attention": backend.name if mode == "kv-cache" else None,
        "precision": backend.precisions["float32"],
    }
    return Contender(f"gpt2-infer {mode} {backend.name}", labels, run)


def theirs(model: Any, prompt: list[list[int]], new_tokens: int, mode: Mode) -> Contender:
    """Transformers' generate(), greedy, with the attention that it chooses itself."""
    ids = torch.tensor(prompt, device=model.device)

    def run() -> tuple[list[list[int]], dict[str, float]]:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=mode == "kv-cache",
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].tolist(), {}

    labels = {
        "program": "transformers",
        "mode": mode,
        "attention": model.config._attn_implementation,
        "decode_attention": None,
        # What SDPA chooses for float32: its CPU kernel, or the memory-efficient one on CUDA.
        "precision": "3xtf32" if model.device.type == "cuda" else "ieee-fp32",
    }
    return Contender(f"transformers {mode}", labels, run)


def cpu_contenders() -> tuple[list[Contender], dict[str, Any]]:
    """The demo model on the CPU."""
    from gpt2_infer.checkpoint import open_checkpoint

    new_tokens = 256
    model = GPT2.from_pretrained("demo", device="cpu")
    prompt = [[449, 1973, 355, 751, 258, 661, 12, 290]]
    reference = AutoModelForCausalLM.from_pretrained(
        str(open_checkpoint("demo").folder), dtype=torch.float32
    )
    reference.eval()
    contenders = []
    for mode in MODES:
        contenders += [
            theirs(reference, prompt, new_tokens, mode),
            ours(model, prompt, new_tokens, mode),
        ]
    settings = {"model": "demo", "dtype": "float32", "prompt_tokens": len(prompt[0])}
    return contenders, settings | {"new_tokens": new_tokens}


def cuda_contenders() -> tuple[list[Contender], dict[str, Any]]:
    """GPT-2 small with random weights on the GPU, 8 to 512 tokens."""
    new_tokens = 504
    first = GPT2.from_pretrained("gpt2", random_weights=True, device="cuda")
    # The same random weights, in transformers' model.
    reference = AutoModelForCausalLM.from_config(TransformersConfig())
    reference.load_state_dict(
        {f"transformer.{name}": value for name, value in first.state_dict().items()}
        | {"lm_head.weight": first.wte.weight}
    )
    reference = reference.to("cuda").eval()
    contenders = []
    for spec in list_backends():
        if spec.family != "pytorch" or "float32" not in spec.precisions:
            continue
        if spec.unavailable_reason("cuda"):
            continue
        try:
            model = first.with_attention(spec)
            model.check_backends()
        except AttentionError as error:
            print(f"{spec.name} left out: {error}")
            continue
        contenders.append(ours(model, PROMPT, new_tokens, "recompute"))
        if spec.has_decode("cuda"):
            contenders.append(ours(model, PROMPT, new_tokens, "kv-cache"))
    contenders += [theirs(reference, PROMPT, new_tokens, mode) for mode in MODES]
    settings = {"model": "gpt2, random weights, seed 0", "dtype": "float32", "prompt_tokens": 8}
    settings |= {"new_tokens": new_tokens, "graph_length_step": GRAPH_LENGTH_STEP}
    return contenders, settings


def main() -> None:
    """Check, time, write, print."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=output_file, required=True, help=OUT_HELP)
    parser.add_argument("--rounds", type=at_least(MIN_ROUNDS), default=5, help=ROUNDS_HELP)
    arguments = parser.parse_args()

    try:
        contenders, settings = cpu_contenders() if arguments.device == "cpu" else cuda_contenders()
    except (GPT2InferError, AttentionError) as error:
        parser.error(str(error))
    expected, _ = contenders[0].run()
    good, series = [], {}
    for contender in contenders:
        tokens, _ = contender.run()
        result = Series(contender.name, contender.labels, "s")
        result.facts["token_digest"] = environment.token_digest(tokens)
        series[contender.name] = result
        if tokens == expected:
            good.append(contender)
        else:
            pairs = enumerate(zip(tokens[0], expected[0], strict=True))
            at = next(i for i, (got, wanted) in pairs if got != wanted)
            result.status, result.reason = "failed", f"its greedy tokens differ from token {at} on"
    samples = timing.interleave({c.name: c.timed for c in good}, rounds=arguments.rounds)
    for contender in good:
        result = series[contender.name]
        result.samples = [round(sample, 6) for sample in samples[contender.name]]
        kept = contender.splits[-arguments.rounds :]
        for key in kept[0]:
            result.facts[key] = [round(split[key], 6) for split in kept]
    results = Results(
        f"generation-{arguments.device}",
        environment.provenance(),
        settings | {"rounds": arguments.rounds},
        list(series.values()),
    )
    results.write(arguments.out)
    print(tables.render(arguments.out, results))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
