from __future__ import annotations

import pytest

from gpt2_infer import ConfigError, GPT2Config


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
        ({"rope_scaling": {"factor": 2.0}, "rope_theta": 1e4}, "without rope_scaling, rope_theta"),
        ({"auto_map": {"AutoConfig": "evil.Evil"}}, "auto_map is set"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        GPT2Config.from_dict(fields)
    assert words in str(caught.value)


def test_fields_without_effect_are_accepted():
    notes = {"resid_pdrop": 0.3, "n_ctx": 7, "summary_type": "cls_index", "use_cache": True}
    unset = {"rope_scaling": None, "add_cross_attention": False, "pruned_heads": {}}
    architecture = {"architectures": ["GPT2LMHeadModel"], "transformers_version": "4.1"}
    assert GPT2Config.from_dict({**notes, **unset, **architecture}) == GPT2Config()


def test_defaults_and_aliases_equal_transformers():
    from transformers import GPT2Config as Theirs

    theirs = Theirs()
    ours = GPT2Config()
    for name in vars(ours):
        expected = getattr(theirs, name)
        assert getattr(ours, name) == ((expected,) if name == "eos_token_id" else expected), name
    read = GPT2Config.from_dict(
        {"hidden_size": 8, "num_attention_heads": 2, "eos_token_id": [1, 2]}
    )
    assert (read.n_embd, read.n_head, read.eos_token_id) == (8, 2, (1, 2))
    assert GPT2Config.from_dict({"eos_token_id": None}).eos_token_id == ()
