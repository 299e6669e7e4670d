"""A checkpoint's own tokenizer.

GPT-2's needs only the tokenizers library; others go through transformers, whose import takes
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from gpt2_infer.errors import WeightsError
from gpt2_infer.files import read_json_object

END_OF_TEXT = "<|endoftext|>"
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
# tokenizer_config.json's values for GPT-2's tokenizer, and fields that change neither ids nor text.
_GPT2S = {
    "tokenizer_class": ("GPT2Tokenizer", "GPT2TokenizerFast"),
    "bos_token": (END_OF_TEXT,),
    "eos_token": (END_OF_TEXT,),
    "unk_token": (END_OF_TEXT,),
    "pad_token": (None, END_OF_TEXT),
    "add_prefix_space": (False,),
    "add_bos_token": (False,),
}
_WITHOUT_EFFECT = {
    "backend",
    "clean_up_tokenization_spaces",
    "errors",
    "is_local",
    "local_files_only",
    "model_max_length",
}


class Tokenizer:
    """Converts text to ids and back. Load it with Tokenizer.load(folder)."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.vocab_size: int = wrapped.get_vocab_size(with_added_tokens=False)
        """The size of the vocabulary, without added tokens."""
        self.end_of_text: int | None = wrapped.token_to_id(END_OF_TEXT)
        """The id that stands for an empty prompt (GPT-2's convention), or None."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer in `folder`; raises WeightsError if it cannot be read."""
        config, says = folder / "tokenizer_config.json", dict[str, Any]()
        if config.is_file() and (says := read_json_object(config)).get("auto_map"):
            raise WeightsError(f"{config}: auto_map is set: a checkpoint's own code is never run")
        # Without these files AutoTokenizer builds an empty tokenizer from config.json alone.
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            raise WeightsError(f"{folder} holds no tokenizer: none of {', '.join(_VOCABULARIES)}")
        try:
            config = folder / "config.json"
            model = read_json_object(config) if config.is_file() else {}
            if (gpt2s := _load_gpt2s(folder, says, model)) is not None:
                loaded = cls(gpt2s)
            else:
                loaded = _TransformersTokenizer(_load_others(folder, says, model))
            if loaded.is_empty:
                # From other files than its class reads, transformers builds an empty tokenizer.
                kind = type(loaded._wrapped).__name__
                raise WeightsError(
                    f"as a {kind} it encodes no text: tokenizer_config.json must name its own class"
                )
            return loaded
        # transformers and tokenizers raise many kinds of errors, even bare Exception.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise WeightsError(f"{folder} holds no readable tokenizer: {reason}") from error

    @property
    def is_empty(self) -> bool:
        """Whether it encodes even the text of its own vocabulary to nothing but unknown tokens."""
        ids = list(range(min(self.vocab_size, 1000)))
        text = self._wrapped.decode(ids, skip_special_tokens=True)
        return not {*self.encode(text)} - {getattr(self._wrapped, "unk_token_id", None)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens."""
        return list(self._wrapped.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return str(self._wrapped.decode(list(ids), skip_special_tokens=False))

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to that of `before`, such as the space between words."""
        known, whole = self.decode(before), self.decode([*before, *ids])
        # If `before` ends within a character, `ids` may change its text.
        return whole[len(known) :] if whole.startswith(known) else self.decode(ids)


class _TransformersTokenizer(Tokenizer):
    """A tokenizer that transformers loaded."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped, self.vocab_size = wrapped, wrapped.vocab_size
        first, last = wrapped.bos_token_id, wrapped.eos_token_id
        self.end_of_text = last if first is None else first

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens."""
        return list(self._wrapped(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return str(self._wrapped.decode(list(ids), clean_up_tokenization_spaces=False))


def _named_class(says: dict[str, Any], model: dict[str, Any]) -> str | None:
    return says.get("tokenizer_class") or model.get("tokenizer_class")


def _load_others(folder: Path, says: dict[str, Any], model: dict[str, Any]) -> Any:
    """Return the tokenizer that transformers reads in the folder."""
    from transformers import AutoTokenizer, BertTokenizer, GPT2Config

    files = [name for name in _VOCABULARIES if (folder / name).is_file()]
    if files == ["vocab.txt"] and _named_class(says, model) is None:
        return BertTokenizer.from_pretrained(str(folder))
    # Folders of 2019 have no model_type, without which AutoTokenizer does not know the class.
    is_old = "model_type" not in model and "tokenizer.json" not in files
    options = {"config": GPT2Config.from_dict(model)} if is_old else {}
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)


def _load_gpt2s(
    folder: Path, says: dict[str, Any], model: dict[str, Any]
) -> tokenizers.Tokenizer | None:
    """Return GPT-2's tokenizer with the folder's vocabulary, or None for any other.

    says: the content of tokenizer_config.json. model: the content of config.json.
    """
    for key, value in says.items():
        if key not in _WITHOUT_EFFECT and value not in _GPT2S.get(key, ()):
            return None
    named = _named_class(says, model)
    by_default = named is None and model.get("model_type", "gpt2") == "gpt2"
    if named not in _GPT2S["tokenizer_class"] and not by_default:
        return None
    if any((folder / name).is_file() for name in ("added_tokens.json", "special_tokens_map.json")):
        return None
    whole, vocabulary, merges = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    if whole.is_file():
        stored = tokenizers.Tokenizer.from_file(str(whole))
        return stored if _is_gpt2s(stored) else None
    if not (vocabulary.is_file() and merges.is_file()):
        return None
    made = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return made


def _is_gpt2s(stored: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer differs from GPT-2's only in its vocabulary."""
    model = stored.model
    if not isinstance(model, models.BPE) or not isinstance(stored.decoder, decoders.ByteLevel):
        return False
    options: list[Any] = [model.dropout, model.unk_token, model.continuing_subword_prefix]
    options += [model.end_of_word_suffix, model.fuse_unk, model.byte_fallback, model.ignore_merges]
    options += [stored.normalizer, stored.truncation, stored.padding]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return (
        not any(options)
        and repr(stored.pre_tokenizer) == repr(plain)
        and [token.content for token in stored.get_added_tokens_decoder().values()] == [END_OF_TEXT]
    )
