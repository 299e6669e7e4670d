"""Streaming of text token by token, and detection of its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from gpt2_infer.request import Request
from gpt2_infer.tokenizer import Tokenizer

FinishReason = Literal["length", "end-of-text", "stop", "interrupted"]
CONTEXT = 8  # tokens of the prompt that decide how its text and the next token's are joined


class TextStream:
    """Turns tokens into text as soon as it is certain; a character is never split.

    The joined pieces from feed() and finish() are exactly continuation(prompt, all ids), unless a
    decoder with byte fallback gets invalid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []  # tokens since the last certain text
        self._context = [*prompt]  # earlier tokens with text, which decide on leading spaces

    def feed(self, token: int) -> str:
        """Return the text that `token` makes certain: often one word, sometimes nothing."""
        self._pending.append(token)
        text = self._new_text()
        # U+FFFD may be the first half of a character that the next token completes.
        return "" if text.endswith("\ufffd") else self._flush(text)

    def finish(self) -> str:
        """Return the remaining text, complete or not."""
        return self._flush(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        return self._tokenizer.continuation(self._context, self._pending)

    def _flush(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text


class Watcher:
    """One row of a request as the host sees it: its tokens, its text, and why it ended."""

    def __init__(
        self, request: Request, row: int = 0, on_text: Callable[[int, str], None] | None = None
    ) -> None:
        self.row, self.stop, self.on_text = row, request.stops, on_text
        self.eos = () if request.ignore_eos else request.config.eos_token_id
        self.tokenizer, self.prompt = request.tokenizer, request.rows[row][-CONTEXT:]
        if self.tokenizer and self.prompt == [self.tokenizer.end_of_text]:  # an empty text
            self.prompt = []
        self.stream: TextStream | None = None
        if self.tokenizer and (self.stop or on_text):
            self.stream = TextStream(self.tokenizer, self.prompt)
        self.tokens: list[int] = []
        self.text = ""  # streamed text, up to a stop string
        self.sent = 0  # characters passed to on_text
        self.finish: FinishReason | None = None

    def whole_text(self) -> str:
        """Return the row's text, which follows its prompt's; empty without a tokenizer."""
        if self.stream or not self.tokenizer:
            return self.text
        return self.tokenizer.continuation(self.prompt, self.tokens)

    def see(self, token: int) -> None:
        """Take the row's next token; ignored once the row has finished."""
        if self.finish:
            return
        if token in self.eos:
            self.end("end-of-text")
            return
        self.tokens.append(token)
        if self.stream:
            self._add(self.stream.feed(token))

    def end(self, reason: FinishReason) -> None:
        """Finish the row, unless it has already finished."""
        if self.finish:
            return
        if self.stream:
            self._add(self.stream.finish())
        self.finish = self.finish or reason
        self._send(len(self.text))

    def _add(self, piece: str) -> None:
        searched = max(0, len(self.text) - max(map(len, self.stop), default=0))
        self.text += piece
        ends = [at for text in self.stop if (at := self.text.find(text, searched)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.finish = "stop"
            self._send(len(self.text))
        else:
            # Hold back text that may begin a stop string.
            held = (
                n for text in self.stop for n in range(1, len(text)) if self.text.endswith(text[:n])
            )
            self._send(len(self.text) - max(held, default=0))

    def _send(self, upto: int) -> None:
        if self.on_text and upto > self.sent:
            self.on_text(self.row, self.text[self.sent : upto])
            self.sent = upto
