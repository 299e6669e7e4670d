from __future__ import annotations

import inspect
import re

import pytest

from gpt2_infer import ConfigError, GPT2Config, config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_head": 5}, "n_embd (768) must be a multiple of n_head (5)"),
        ({"n_layer": 0}, "Expected `int` >= 1 - at `$.n_layer`"),
        ({"n_layer": 10**9}, "Expected `int` <= 1000 - at `$.n_layer`"),
        ({"n_positions": 10**30}, "Expected `int`"),
        ({"n_embd": "768"}, "Expected `int`, got `str` - at `$.n_embd`"),
        ({"add_cross_attention": True}, "without add_cross_attention"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"layer_norm_epsilon": -1}, "Expected `float` >= 0.0 - at `$.layer_norm_epsilon`"),
        ({"scale_attn_weights": "false"}, "Expected `bool`, got `str` - at `$.scale_attn_weights`"),
        ({"activation_function": None}, "at `$.activation_function`"),
        ({"eos_token_id": 1.5}, "at `$.eos_token_id`"),
        ({"is_encoder_decoder": True, "sliding_window": 4}, "is_encoder_decoder, sliding_window"),
        ({"is_causal": False}, "without is_causal false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "without quantization_config"),
        ({"auto_map": {"AutoConfig": "evil.Evil"}}, "auto_map is set"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        GPT2Config.from_dict(fields)
    assert words in str(caught.value)


# The published gpt2-medium's config.json, except its sizes.
PUBLISHED = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_special": 0,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}


@pytest.mark.parametrize(
    "fields",
    [
        PUBLISHED,
        {"resid_pdrop": 0.3, "n_ctx": 7, "use_cache": True, "transformers_version": "4.1"},
        {"sliding_window": None, "add_cross_attention": False, "pruned_heads": {}},
        {"_attn_implementation": "eager", "_flash_attn_2_enabled": True, "loss_type": "x"},
        {"transformers.js_config": {"dtype": "q4"}, "unsloth_version": "2025.1"},
        {"architectures": "GPT2"},  # no list, but nothing reads it
    ],
)
def test_fields_without_effect_are_accepted(fields, caplog):
    read = GPT2Config.from_dict({"eos_token_id": 50256, **fields})
    assert read == GPT2Config()
    assert not caplog.records


def test_fields_that_nothing_reads_are_named_in_a_warning(caplog):
    unread = {"author": "me", "license": "mit", "rope_theta": 1e4, "\x1b[2J": 1, "empty": ""}
    assert GPT2Config.from_dict({"eos_token_id": 50256, **unread}) == GPT2Config()
    (record,) = caplog.records
    assert record.getMessage() == (
        "config.json has fields that GPT-2 does not read: "
        "'author', 'license', 'rope_theta', '\\x1b[2J'"
    )


def test_every_field_that_transformers_reads_is_known():
    from transformers import GPT2Config as Theirs
    from transformers.models.gpt2 import modeling_gpt2

    read = {*re.findall(r"\bconfig\.([a-z]\w+)", inspect.getsource(modeling_gpt2))}
    read |= {*Theirs().to_dict()}
    heads = {"classifier_dropout", "hidden_dropout", "summary_last_dropout"}  # of classifiers
    assert read - heads - config.KNOWN == set()


def test_every_setting_of_transformers_logits_processors_is_known():
    from transformers import GenerationMixin

    source = "".join(
        inspect.getsource(method)
        for method in (
            GenerationMixin._get_logits_processor,
            GenerationMixin._get_stopping_criteria,
        )
    )
    read = {*re.findall(r"\bgeneration_config\.([a-z]\w+)", source)}
    options = {"do_sample", "temperature", "top_k", "top_p", "max_length", "use_cache"}
    unneeded = {"remove_invalid_values", "renormalize_logits"}
    assistants = {"is_assistant", "assistant_confidence_threshold"}
    refused = {name for name in read if GPT2Config.from_dict({name: 0.5}).unsupported_generation}
    assert refused == read - options - unneeded - assistants


@pytest.mark.parametrize(
    ("settings", "unsupported"),
    [
        ({"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}, ()),
        ({"suppress_tokens": [], "bad_words_ids": None, "typical_p": 1.0, "do_sample": True}, ()),
        ({"num_beams": 4, "min_new_tokens": 3}, ("num_beams", "min_new_tokens")),
        ({"forced_eos_token_id": 7, "bad_words_ids": [[3]]}, ("bad_words_ids",)),
    ],
)
def test_settings_that_change_the_text(settings, unsupported):
    read = GPT2Config.from_dict({}, settings)
    assert {*unsupported} <= {*read.unsupported_generation}
    assert bool(unsupported) == bool(read.unsupported_generation)
    assert GPT2Config.from_dict(settings) == read  # config.json counts if there is no other
    assert GPT2Config.from_dict(settings, {}).unsupported_generation == ()


def test_defaults_and_aliases_equal_transformers():
    from transformers import GPT2Config as Theirs

    theirs = Theirs()
    ours = GPT2Config()
    for name in {*vars(ours)} - {"unsupported_generation"}:
        expected = getattr(theirs, name)
        assert getattr(ours, name) == ((expected,) if name == "eos_token_id" else expected), name
    read = GPT2Config.from_dict(
        {"hidden_size": 8, "num_attention_heads": 2, "eos_token_id": [1, 2]}
    )
    assert (read.n_embd, read.n_head, read.eos_token_id) == (8, 2, (1, 2))
    both = GPT2Config.from_dict({"num_attention_heads": 2, "n_head": 4})
    assert both.n_head == Theirs(num_attention_heads=2, n_head=4).n_head == 2
