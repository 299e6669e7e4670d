"""Our program beside transformers: which models, prompts and backends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers import GPT2Config as TransformersConfig

from attention_kernels import BackendSpec, list_backends
from gpt2_infer.bench.generation import compare_with_transformers
from gpt2_infer.bench.results import GenerationCell, GenerationTiming
from gpt2_infer.model import GPT2
from gpt2_infer.request import MODES, Mode

DEMO_PROMPT = [449, 1973, 355, 751, 258, 661, 12, 290]
PROMPT = [15496, 11, 314, 1101, 257, 3303, 2746, 11]  # "Hello, I'm a language model,"


def compare(
    device: str, *, new_tokens: int, rounds: int, task: str, out: Path | None
) -> GenerationTiming:
    """Compare the demo model on a CPU, or GPT-2 small with random weights on a GPU.

    On the CPU with our default backends; on the GPU with each of PyTorch's that takes float32.
    """
    if device == "cpu":
        name, prompt = "demo", DEMO_PROMPT
        model = GPT2.from_pretrained("demo", device="cpu")
        specs: dict[Mode, Sequence[BackendSpec]] = {
            "recompute": [model.attention],
            "kv-cache": [model.decode_attention],
        }
    else:
        name, prompt = "gpt2, random weights, seed 0", PROMPT
        model = GPT2.from_pretrained("gpt2", random_weights=True, device="cuda")
        of_torch = [
            spec
            for spec in list_backends()
            if spec.family == "pytorch"
            and "float32" in spec.precisions
            and not spec.unavailable_reason("cuda")
        ]
        specs = {
            "recompute": of_torch,
            "kv-cache": [spec for spec in of_torch if spec.has_decode("cuda")],
        }
    cells = [GenerationCell(len(prompt) + new_tokens, mode=mode) for mode in MODES]
    return compare_with_transformers(
        model,
        reference_of(model),
        specs,
        cells,
        prompt,
        name=name,
        rounds=rounds,
        task=task,
        out=out,
    )


def reference_of(model: GPT2) -> Any:
    """Return transformers' model with a copy of our weights."""
    config = model.config
    sizes = TransformersConfig(
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        vocab_size=config.vocab_size,
        bos_token_id=None,
        eos_token_id=None,
    )
    reference = AutoModelForCausalLM.from_config(sizes, dtype=model.dtype)
    reference.load_state_dict(
        {f"transformer.{name}": value for name, value in model.state_dict().items()}
        | {"lm_head.weight": model.wte.weight}
    )
    return reference.to(model.device).eval()
