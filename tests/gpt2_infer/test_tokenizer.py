from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, normalizers

from gpt2_infer import RequestError, WeightsError
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.request import encode_prompts
from gpt2_infer.tokenizer import Tokenizer

DEMO = Tokenizer.load(open_checkpoint("demo").folder)


CONFIG = {"config.json": '{"model_type": "gpt2"}'}
NAMED = {"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}'}
WRONG = {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'}
BERTS = {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n##s\n\u4f60\n\u597d\n"}


def write(folder, files) -> None:
    for name, content in files.items():
        (folder / name).write_text(content, "utf-8")


@pytest.mark.parametrize(("config", "named"), [(CONFIG, {}), (CONFIG, NAMED), ({}, {})])
def test_a_vocabulary_of_berts_is_read_as_one(named, config, tmp_path):
    """As in GPT2-Chinese's folders, which need not name the class."""
    write(tmp_path, BERTS | named | config)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hello worlds \u4f60") == [5, 6, 7, 8]
    assert tokenizer.continuation([5], [6, 7]) == " worlds"
    assert tokenizer.end_of_text is None


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (BERTS | WRONG, "as a GPT2Tokenizer it encodes"),
        ({"spiece.model": "x"}, "as a GPT2Tokenizer it encodes no text: .* name its own class"),
        ({"vocab.txt": "[UNK]\n"}, "as a BertTokenizer it encodes no text"),
        ({}, r"none of tokenizer\.json"),
    ],
)
def test_a_tokenizer_that_encodes_nothing_is_refused(files, words, tmp_path):
    write(tmp_path, CONFIG | files)
    with pytest.raises(WeightsError, match=f"holds no (readable )?tokenizer: .*{words}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (models.WordLevel({"hello": 0}), r"'bye' cannot be encoded: .*Missing \[UNK\]"),
        (models.BPE({"hello": 0}, []), "'bye' has no token that the tokenizer knows"),
    ],
)
def test_a_prompt_without_tokens_is_refused(model, words):
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<|endoftext|>"])
    tokenizer = Tokenizer(made)
    assert encode_prompts(tokenizer, [""]) == [[1]]
    with pytest.raises(RequestError, match=words):
        encode_prompts(tokenizer, ["bye"])


@pytest.mark.parametrize("added", [{}, {"special_tokens_map.json": '{"pad_token": "!"}'}])
def test_a_folder_of_2019_without_model_type(added, tmp_path):
    demo = open_checkpoint("demo").folder
    files = {name: (demo / name).read_text("utf-8") for name in ("vocab.json", "merges.txt")}
    write(tmp_path, files | added)
    assert Tokenizer.load(tmp_path).encode("Hello, I'm 12") == DEMO.encode("Hello, I'm 12")


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
