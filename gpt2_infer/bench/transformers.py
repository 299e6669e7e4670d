"""transformers' GPT-2 with our weights, as a peer."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM
from transformers import GPT2Config as TransformersConfig

from gpt2_infer.model import GPT2


def reference_of(model: GPT2) -> Any:
    """Return transformers' model with a copy of our weights."""
    config = model.config
    sizes = TransformersConfig(
        n_embd=config.n_embd,
        n_positions=config.n_positions,
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
