"""A checkpoint's own tokenizer, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_infer.errors import WeightsError
from gpt2_infer.files import read_json_object

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


class Tokenizer:
    """Text to ids and back. Load it with Tokenizer.load(folder)."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer in `folder`; raises WeightsError where none can be read."""
        from transformers import AutoTokenizer

        config = folder / "tokenizer_config.json"
        if config.is_file() and read_json_object(config).get("auto_map"):
            raise WeightsError(f"{config}: auto_map is set: a checkpoint's own code is never run")
        # Without these AutoTokenizer builds an empty tokenizer from config.json alone.
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            raise WeightsError(f"{folder} holds no tokenizer: none of {', '.join(_VOCABULARIES)}")
        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False))
        # transformers and tokenizers raise many kinds, bare Exception among them.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise WeightsError(f"{folder} holds no tokenizer that can be read: {reason}") from error

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without those added to the vocabulary later."""
        return int(self._wrapped.vocab_size)

    @property
    def end_of_text(self) -> int | None:
        """The id that an empty prompt stands for (GPT-2's convention), if the tokenizer has one."""
        for token in (self._wrapped.bos_token_id, self._wrapped.eos_token_id):
            if token is not None:
                return int(token)
        return None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, nothing added."""
        return list(self._wrapped(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self._wrapped.decode(list(ids), clean_up_tokenization_spaces=False))
