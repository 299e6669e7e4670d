from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from gpt2_infer import GPT2Config, Request
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.stream import TextStream, Watcher
from gpt2_infer.tokenizer import Tokenizer

DEMO = Tokenizer.load(open_checkpoint("demo").folder)


def words(decoder: tokenizers.decoders.Decoder, *vocabulary: str) -> Tokenizer:
    """Return a tokenizer whose decoder joins words, with one id for each and 0 for all others."""
    ids = {word: i for i, word in enumerate(["[UNK]", *vocabulary])}
    made = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoder
    return Tokenizer(made)


PIECES = words(decoders.WordPiece(), "hello", "world", "##s", ".")
SPACES = words(decoders.Metaspace(), "\u2581hello", "\u2581", "s")
IDS = st.lists(st.integers(0, 8) | st.integers(0, 8191), max_size=12)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> str:
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.feed(token) for token in ids]
    return "".join(pieces) + stream.finish()


@pytest.mark.parametrize("tokenizer", [DEMO, PIECES, SPACES])
@given(ids=IDS, prompt=IDS)
@settings(deadline=None)
def test_streamed_pieces_join_to_the_whole_text(tokenizer, ids, prompt):
    assert streamed(tokenizer, ids, []) == tokenizer.decode(ids)
    text = streamed(tokenizer, ids, prompt)
    assert text == tokenizer.continuation(prompt, ids)
    if tokenizer is not DEMO:  # whose ids may be parts of a character
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize(("prompt", "text"), [("hello", " world worlds."), ("", "world worlds.")])
def test_prompt_and_text_join_whether_it_is_streamed_or_not(prompt, text, monkeypatch):
    monkeypatch.setattr(PIECES, "end_of_text", 0)
    request = Request(config=GPT2Config(vocab_size=99), tokenizer=PIECES, prompts=prompt)
    pieces: list[str] = []
    for watcher in (Watcher(request), Watcher(request, 0, lambda _, piece: pieces.append(piece))):
        for token in (2, 50, 2, 3, 50, 4):
            watcher.see(token)
        watcher.end("length")
        assert watcher.whole_text() == text
    assert "".join(pieces) == text
    assert len(pieces) == 4  # each word as soon as it is certain
