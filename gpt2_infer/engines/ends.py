"""The two ends of our own forward pass: before its first product and after its last."""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from attention_kernels.ladder.op import c_struct, launch
from gpt2_infer.engines.base import weights_by_rows
from gpt2_infer.model import GPT2
from gpt2_infer.product import CSRC, Activation, Packed, count_multiprocessors, own_op

BEGIN, KEEP, LOGITS, CHOOSE = range(4)
EndsParams = c_struct(
    (c_void_p, "tokens lengths newest wte wpe ln_weight ln_bias x normed packed heads"),
    (c_void_p, "kept_x kept_heads head logits largest"),
    (c_int, "kernel batch seqlen width vocab_size token_stride multiprocessors"),
    (c_float, "epsilon"),
)
"""The C struct StructParams of csrc/v03_ends.cu."""


class Ends:
    """The ends of a model's forward pass in float32; the model must not change its weights.

    Raises BuildError.
    """

    def __init__(self, model: GPT2) -> None:
        self._wte, head = weights_by_rows(model)
        norm = next(iter(model.blocks())).ln_1
        self._model: dict[str, Tensor | float] = {
            "wte": self._wte,
            "wpe": model.wpe.weight,
            "ln_weight": norm.weight,
            "ln_bias": norm.bias,
            "epsilon": norm.eps,
            "head": head,
            "vocab_size": len(head),
            "width": head.shape[1],
            "multiprocessors": count_multiprocessors(model.device),
        }
        """The fields that are the same in every launch."""
        # The logits of the last pass; captured graphs write to the same tensor again.
        self.last_logits = self._wte.new_empty(0, len(head))
        self._largest = self._wte.new_empty(0, dtype=torch.long)  # a key for each row
        self._op = own_op(CSRC / "v03_ends.cu", "recompute_", model.device.type)

    def begin(self, tokens: Tensor, *, packs: bool) -> tuple[Tensor, Activation]:
        """Return the embeddings of tokens as rows, and the first LayerNorm of them.

        tokens: int64 (batch, seqlen), with rows of any stride. packs: whether a product of 3xfp16,
        and nothing else, reads the LayerNorm.
        """
        batch, seqlen = tokens.shape
        if len(self._largest) != batch:
            self._largest = tokens.new_empty(batch)
            self.last_logits = self._wte.new_empty(batch, self.last_logits.shape[1])
        x = self._wte.new_empty(batch * seqlen, self._wte.shape[1])
        normed: Activation = Packed.empty(len(x), x.shape[1], x) if packs else torch.empty_like(x)
        written = {"packed": normed.data} if isinstance(normed, Packed) else {"normed": normed}
        sizes = {"seqlen": seqlen, "token_stride": tokens.stride(0)}
        self._launch(BEGIN, tokens, tokens=tokens, x=x, **sizes, **written)
        return x, normed

    def keep(self, x: Tensor, heads: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of x and of heads at the last position of each sequence.

        x, heads: contiguous (batch * seqlen, width). lengths: int64 (batch,).
        """
        batch = len(lengths)
        kept_x, kept_heads = x.new_empty(batch, x.shape[1]), x.new_empty(batch, x.shape[1])
        tensors = {"x": x, "heads": heads, "kept_x": kept_x, "kept_heads": kept_heads}
        self._launch(KEEP, lengths, seqlen=len(x) // batch, lengths=lengths, **tensors)
        return kept_x, kept_heads

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the pass that begin() began, float32 (batch, vocab_size).

        The next pass overwrites them. x: contiguous (batch, width), normalized by ln_f.
        """
        assert len(self._largest) == len(x), "call begin() first"
        self._launch(LOGITS, x, x=x)
        return self.last_logits

    def choose(self, tokens: Tensor, lengths: Tensor, newest: Tensor) -> None:
        """Append each row's most likely token by logits(), or -1 if the largest is not finite.

        tokens: int64 (batch, capacity). lengths and newest: int64 (batch,); lengths grows, newest
        gets the token.
        """
        given = {"tokens": tokens, "lengths": lengths, "newest": newest}
        self._launch(CHOOSE, lengths, token_stride=tokens.stride(0), **given)

    def _launch(self, kernel: int, sequences: Tensor, **given: Tensor | float) -> None:
        """Launch a kernel; given: the fields that differ from launch to launch."""
        results = {"logits": self.last_logits, "largest": self._largest}
        fields = {"kernel": kernel, "batch": len(sequences), **self._model, **results, **given}
        launch(self._op, sequences, EndsParams, **fields)
