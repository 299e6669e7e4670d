"""GPT-2's configuration: every field of transformers' GPT2Config that changes the forward pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

import msgspec

from gpt2_infer.errors import ConfigError

ProductsName = Literal["ieee-fp32", "3xfp16"]
"""How float32 matrices are multiplied; see product.py."""
PRODUCTS: tuple[ProductsName, ...] = get_args(ProductsName)

# Aliases that transformers accepts.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Fields that would change the model, and are refused unless they are empty.
_REFUSED = """
add_cross_attention attention_chunk_size decoder generator is_encoder_decoder layer_types
per_layer_config pruned_heads quantization_config sliding_window text_config
"""
# Settings of generation that change the text, unless they are 1 or empty, and that no option sets.
_NEUTRAL_AT_1 = """
encoder_repetition_penalty guidance_scale num_beam_groups num_beams num_return_sequences
repetition_penalty typical_p
"""
_NEUTRAL_IF_EMPTY = """
bad_words_ids begin_suppress_tokens constraints dola_layers encoder_no_repeat_ngram_size
epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id
forced_eos_token_id max_time min_length min_new_tokens min_p no_repeat_ngram_size penalty_alpha
sequence_bias stop_strings suppress_tokens token_healing top_h watermarking_config
"""
# Fields of GPT-2's configuration files that have no effect here: dropout, initialization, heads
# other than the language model's, what options of generation set, notes.
_IGNORED = """
_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path _num_labels
architectures attn_implementation attn_pdrop bos_token_id chunk_size_feed_forward
decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop finetuning_task
gradient_checkpointing id2label initializer_range is_causal is_decoder label2id length_penalty
loss_type max_length max_new_tokens model_type n_ctx n_special num_labels output_attentions
output_hidden_states output_past output_scores pad_token_id predict_special_tokens prefix
problem_type remove_invalid_values resid_pdrop return_dict return_dict_in_generate sep_token_id
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
transformers.js_config transformers_version unk_token_id unsloth_version use_bfloat16 use_cache
"""
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


@dataclass(frozen=True)
class GPT2Config:
    """The fields that change the forward pass, with transformers' names and defaults.

    Dropout is absent because inference has none. Raises ConfigError if the heads do not divide the
    width.
    """

    vocab_size: _Size = 50257
    n_positions: _Size = 1024
    n_embd: _Size = 768
    n_layer: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 12  # each layer is built in Python
    n_head: _Size = 12
    n_inner: _Size | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: Annotated[float, msgspec.Meta(ge=0)] = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: tuple[int, ...] = (50256,)
    unsupported_generation: tuple[str, ...] = ()
    """Settings for generation that change the text and are not supported, by name."""

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})"
            )

    @property
    def is_gelu_tanh(self) -> bool:
        """Whether the MLP's activation is GELU in its tanh form."""
        return self.activation_function in ("gelu_new", "gelu_pytorch_tanh")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """The width of the MLP's hidden layer."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    def softmax_scale(self, layer: int) -> float:
        """Return the factor that multiplies q k^T in a layer, counted from 0."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> GPT2Config:
        """Read a config.json; every field is used, refused, or has no effect.

        generation: the content of generation_config.json; if there is none, config.json's own
        settings for generation count, as in transformers. A field that nothing reads is logged.
        Raises ConfigError, which names the field.
        """
        if raw.get("model_type", "gpt2") != "gpt2":
            raise ConfigError(
                f"model_type is {raw['model_type']!r}: only the gpt2 architecture is supported"
            )
        if raw.get("auto_map"):
            raise ConfigError("auto_map is set: a checkpoint's own code is never run")
        refused = [name for name in _REFUSED.split() if raw.get(name)]
        if not raw.get("is_causal", True):
            refused.append("is_causal false")
        if refused:
            raise ConfigError(
                f"only plain decoder-only GPT-2 is supported, without {', '.join(refused)}"
            )
        if unread := [repr(name) for name, value in raw.items() if value and name not in KNOWN]:
            logging.getLogger(__name__).warning(
                "config.json has fields that GPT-2 does not read: %s", ", ".join(unread)
            )
        values = {**raw, **{_ALIASES[name]: raw[name] for name in raw if name in _ALIASES}}
        generation = raw if generation is None else generation
        eos = generation.get("eos_token_id")
        values["eos_token_id"] = () if eos is None else (eos,) if isinstance(eos, int) else eos
        values["unsupported_generation"] = [
            *(name for name in _NEUTRAL_AT_1.split() if generation.get(name) not in (None, 1)),
            *(name for name in _NEUTRAL_IF_EMPTY.split() if generation.get(name)),
        ]
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"invalid configuration: {error}") from None


KNOWN = {
    *(field.name for field in fields(GPT2Config) if field.name != "unsupported_generation"),
    *_ALIASES,
    *" ".join((_REFUSED, _NEUTRAL_AT_1, _NEUTRAL_IF_EMPTY, _IGNORED)).split(),
}
"""Fields of config.json that some code of GPT-2 reads, or is known not to."""

# Sizes that --random-weights can build by name: layers, width, heads.
_SIZES = {
    "distilgpt2": (6, 768, 12),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def named_config(model: str) -> GPT2Config | None:
    """Return the configuration of a published size, by hub id or bare name, or None."""
    name = model.removeprefix("openai-community/").removeprefix("distilbert/").lower()
    if name not in _SIZES:
        return None
    n_layer, n_embd, n_head = _SIZES[name]
    return GPT2Config(n_layer=n_layer, n_embd=n_embd, n_head=n_head)
