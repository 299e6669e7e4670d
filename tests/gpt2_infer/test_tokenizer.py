from __future__ import annotations

import subprocess
import sys

import pytest
from tokenizers import normalizers

from gpt2_infer import WeightsError
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.tokenizer import Tokenizer

DEMO = Tokenizer.load(open_checkpoint("demo").folder)
GPT2 = Tokenizer.load(open_checkpoint("gpt2", random_weights=True).folder)


def test_gpt2s_own_ids():
    ids = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert GPT2.encode("Hello, I'm a language model,") == ids
    assert GPT2.encode("<|endoftext|>") == [50256]
    assert GPT2.end_of_text == 50256
    assert DEMO.end_of_text == 8191


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    config = open_checkpoint("demo").folder / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(WeightsError, match=r"holds no tokenizer: none of tokenizer\.json"):
        Tokenizer.load(tmp_path)


TEXTS = [
    "",
    "Hello, I'm a language model,",
    "  two  spaces\n\n\tand a tab ",
    "<|endoftext|>in the <|endoftext|> middle",
    "h\u00e9llo \U0001f600 \u4e2d\u6587 \x00",
    "don't 1234 we'll e.g. , .",
]


def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def assert_like(ours: Tokenizer, theirs) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.end_of_text == theirs.bos_token_id
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        cut = ids[: len(ids) // 2 + 1]  # may cut a character in two
        assert ours.decode(cut) == theirs.decode(cut, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("saved", [False, True])
def test_gpt2s_tokenizer_equals_transformers(saved, tmp_path):
    folder = open_checkpoint("gpt2", random_weights=True).folder
    if saved:  # writes tokenizer.json
        theirs(folder).save_pretrained(tmp_path)
        folder = tmp_path
    ours = Tokenizer.load(folder)
    assert type(ours) is Tokenizer  # not the one that needs transformers
    assert_like(ours, theirs(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_tokens(["<extra>"]),
        lambda t: t.add_special_tokens({"pad_token": "<pad>"}),
        lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    ],
)
def test_other_tokenizers_are_left_to_transformers(change, tmp_path):
    changed = theirs(open_checkpoint("demo").folder)
    change(changed)
    changed.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert type(ours) is not Tokenizer
    assert_like(ours, theirs(tmp_path))


def test_the_bundled_model_runs_without_transformers():
    """Importing transformers takes longer than the rest of a short run."""
    code = """
import sys
from gpt2_infer import GPT2, generate
model = GPT2.from_pretrained("demo", device="cpu")
assert generate(model, "Once", max_new_tokens=2).texts[0]
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
