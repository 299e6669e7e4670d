"""GPT-2's configuration: every field of transformers' GPT2Config that changes the forward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt2_infer.errors import ConfigError

# transformers reads these as names of the fields they stand for.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class GPT2Config:
    """The fields that change the forward pass, with transformers' names and defaults.

    Dropout is absent because inference has none. Raises ConfigError for values that no GPT-2 can
    have.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: tuple[int, ...] = (50256,)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
        for name in sizes:
            value = getattr(self, name)
            if value is None and name == "n_inner":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        for name in (
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "tie_word_embeddings",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        epsilon = self.layer_norm_epsilon
        if not isinstance(epsilon, int | float) or not 0 <= epsilon < math.inf:
            raise ConfigError(f"layer_norm_epsilon must be a number of 0 or more, not {epsilon!r}")
        if not isinstance(self.activation_function, str):
            raise ConfigError(
                f"activation_function must be a name, not {self.activation_function!r}"
            )
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """Width of the MLP."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    def softmax_scale(self, layer: int) -> float:
        """What multiplies q k^T in that layer (counted from 0)."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GPT2Config:
        """Read a config.json; raises ConfigError, by name, for what this project does not do."""
        if raw.get("model_type", "gpt2") != "gpt2":
            raise ConfigError(
                f"model_type is {raw['model_type']!r}: only the gpt2 architecture is supported"
            )
        for name in ("add_cross_attention", "quantization_config"):
            if raw.get(name):
                raise ConfigError(f"{name} is set: only plain decoder-only GPT-2 is supported")
        values = {_ALIASES.get(name, name): value for name, value in raw.items()}
        eos = values.get("eos_token_id", cls.eos_token_id)
        ids = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
        if not all(isinstance(token, int) for token in ids):
            raise ConfigError(f"eos_token_id must be a token id or a list of them, not {eos!r}")
        values["eos_token_id"] = tuple(ids)
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


# The sizes that --random-weights can build by name: layers, width, heads.
_SIZES = {
    "distilgpt2": (6, 768, 12),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def named_config(model: str) -> GPT2Config | None:
    """The configuration of a published size, by its hub id or bare name; None for another model."""
    name = model.removeprefix("openai-community/").removeprefix("distilbert/").lower()
    if name not in _SIZES:
        return None
    n_layer, n_embd, n_head = _SIZES[name]
    return GPT2Config(n_layer=n_layer, n_embd=n_embd, n_head=n_head)
