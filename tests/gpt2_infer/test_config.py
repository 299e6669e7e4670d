from __future__ import annotations

import inspect
import re

import pytest

from gpt2_infer import ConfigError, GPT2Config, config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_head": 5}, "n_embd (768) must be a multiple of n_head (5)"),
        ({"n_layer": 10**9}, "Expected `int` <= 1000 - at `$.n_layer`"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
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


def test_only_fields_that_nothing_reads_are_named_in_a_warning(caplog):
    known = {"eos_token_id": 50256, "n_ctx": 7, "architectures": "GPT2", "sliding_window": None}
    assert GPT2Config.from_dict(known) == GPT2Config()
    assert not caplog.records
    unread = {"author": "me", "rope_theta": 1e4, "\x1b[2J": 1, "empty": ""}
    assert GPT2Config.from_dict(known | unread) == GPT2Config()
    (record,) = caplog.records
    names = "'author', 'rope_theta', '\\x1b[2J'"
    assert record.getMessage() == f"config.json has fields that GPT-2 does not read: {names}"


def test_every_field_that_transformers_reads_is_known():
    from transformers import GPT2Config as Theirs
    from transformers.models.gpt2 import modeling_gpt2

    read = {*re.findall(r"\bconfig\.([a-z]\w+)", inspect.getsource(modeling_gpt2))}
    read |= {*Theirs().to_dict()}
    heads = {"classifier_dropout", "hidden_dropout", "summary_last_dropout"}  # of classifiers
    assert read - heads - config.KNOWN == set()


def test_every_setting_of_transformers_logits_processors_is_known():
    from transformers import GenerationMixin

    methods = GenerationMixin._get_logits_processor, GenerationMixin._get_stopping_criteria
    source = "".join(map(inspect.getsource, methods))
    read = {*re.findall(r"\bgeneration_config\.([a-z]\w+)", source)}
    options = {"do_sample", "temperature", "top_k", "top_p", "max_length", "use_cache"}
    unneeded = {"remove_invalid_values", "renormalize_logits"}
    assistants = {"is_assistant", "assistant_confidence_threshold"}
    refused = {name for name in read if GPT2Config.from_dict({name: 0.5}).unsupported_generation}
    assert refused == read - options - unneeded - assistants
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "suppress_tokens": [], "top_p": 0.5}
    assert GPT2Config.from_dict(neutral).unsupported_generation == ()


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
