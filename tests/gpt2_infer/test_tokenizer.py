from __future__ import annotations

import pytest

from gpt2_infer import WeightsError
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.tokenizer import Tokenizer

DEMO = Tokenizer.load(open_checkpoint("demo").folder)
GPT2 = Tokenizer.load(open_checkpoint("gpt2", random_weights=True).folder)


def test_gpt2s_own_ids():
    assert GPT2.encode("Hello, I'm a language model,") == [
        15496,
        11,
        314,
        1101,
        257,
        3303,
        2746,
        11,
    ]
    assert GPT2.encode("<|endoftext|>") == [50256]
    assert GPT2.end_of_text == 50256
    assert DEMO.end_of_text == 8191


def test_a_configuration_alone_is_no_tokenizer(tmp_path):
    config = open_checkpoint("demo").folder / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(WeightsError, match=r"holds no tokenizer: none of tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_no_tokenizer(tmp_path):
    with pytest.raises(WeightsError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
