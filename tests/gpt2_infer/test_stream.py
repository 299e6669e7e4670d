from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.stream import TextStream
from gpt2_infer.tokenizer import Tokenizer

DEMO = Tokenizer.load(open_checkpoint("demo").folder)
GPT2 = Tokenizer.load(open_checkpoint("gpt2", random_weights=True).folder)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 8191), max_size=30))
def test_streamed_pieces_join_to_the_whole_text(ids):
    stream = TextStream(DEMO)
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces) + stream.finish() == DEMO.decode(ids)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_and_no_piece_holds_half_a_character(text):
    ids = DEMO.encode(text)
    assert DEMO.decode(ids) == text
    stream = TextStream(DEMO)
    pieces = [stream.feed(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_spans_tokens_comes_out_once():
    ids = GPT2.encode("a 🦜!")
    assert len(ids) > 4
    stream = TextStream(GPT2)
    pieces = [stream.feed(token) for token in ids]
    assert [piece for piece in pieces if piece] == ["a", " 🦜", "!"]
