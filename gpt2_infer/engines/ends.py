"""The two ends of our own forward pass: before its first product and after its last."""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from attention_kernels.ladder.op import c_struct
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
        self._wte, self._head = weights_by_rows(model)
        self._wpe = model.wpe.weight
        self._multiprocessors = count_multiprocessors(model.device)
        # The logits of the last pass; captured graphs write to the same tensor again.
        self.last_logits = self._wte.new_empty(0, len(self._head))
        self._largest = self._wte.new_empty(0, dtype=torch.long)  # a key for each row
        self._norm = next(iter(model.blocks())).ln_1
        self._op = own_op(CSRC / "v03_ends.cu", "recompute_", model.device.type)

    def begin(self, tokens: Tensor, *, packs: bool) -> tuple[Tensor, Activation]:
        """Return the embeddings of tokens as rows, and the first LayerNorm of them.

        tokens: int64 (batch, seqlen), with rows of any stride. packs: whether a product of 3xfp16,
        and nothing else, reads the LayerNorm.
        """
        batch, seqlen = tokens.shape
        if len(self._largest) != batch:
            self._largest = tokens.new_empty(batch)
            self.last_logits = self._wte.new_empty(batch, len(self._head))
        x = self._wte.new_empty(batch * seqlen, self._wte.shape[1])
        normed: Activation = Packed.empty(len(x), x.shape[1], x) if packs else torch.empty_like(x)
        self._launch(
            BEGIN,
            tokens,
            seqlen=seqlen,
            token_stride=tokens.stride(0),
            epsilon=self._norm.eps,
            tokens=tokens,
            wte=self._wte,
            wpe=self._wpe,
            ln_weight=self._norm.weight,
            ln_bias=self._norm.bias,
            x=x,
            largest=self._largest,
            **{"packed": normed.data} if isinstance(normed, Packed) else {"normed": normed},
        )
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
        self._launch(
            LOGITS,
            x,
            multiprocessors=self._multiprocessors,
            x=x,
            head=self._head,
            logits=self.last_logits,
            largest=self._largest,
        )
        return self.last_logits

    def choose(self, tokens: Tensor, lengths: Tensor, newest: Tensor) -> None:
        """Append each row's most likely token by logits(), or -1 if the largest is not finite.

        tokens: int64 (batch, capacity). lengths and newest: int64 (batch,); lengths grows, newest
        gets the token.
        """
        self._launch(
            CHOOSE,
            lengths,
            token_stride=tokens.stride(0),
            largest=self._largest,
            tokens=tokens,
            lengths=lengths,
            newest=newest,
        )

    def _launch(self, kernel: int, sequences: Tensor, **values: Tensor | float) -> None:
        batch, (vocab_size, width) = len(sequences), self._wte.shape
        plain = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in values.items()}
        params = EndsParams(kernel=kernel, batch=batch, width=width, vocab_size=vocab_size, **plain)
        self._op(sequences, torch.frombuffer(params, dtype=torch.uint8))
