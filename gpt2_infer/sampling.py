"""Choosing the next token on the device: greedy, or temperature, top-k and top-p.

Each token uses one uniform random number, drawn in advance from a seed. So a captured CUDA graph
can replay the sampler, the CPU and the GPU draw the same numbers, and a row's numbers do not depend
on the rest of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2_infer.errors import RequestError, check_integer, check_number

MIN_TEMPERATURE = 1e-6  # logits / temperature overflows below this


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token; raises RequestError for invalid values."""

    temperature: float = 0.0
    """The divisor of the logits; 0 is greedy."""
    top_k: int = 0
    """The number of most likely tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    """The total probability of the most likely tokens to keep; 1 keeps all."""
    seed: int = 0
    """The base seed; row i of a batch is drawn from seed + i."""

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        if self.temperature != 0 and self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or {MIN_TEMPERATURE} or more, "
                f"not {self.temperature}"
            )
        check_integer("top-k", self.top_k, 0)
        check_number("top-p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        check_integer("the seed", self.seed, 0, 2**63 - 1)
        if self.is_greedy and (self.top_k > 0 or self.top_p < 1):
            raise RequestError(
                "top-k and top-p need a temperature above 0: at 0 the most likely token is chosen"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    def uniforms(self, rows: int, steps: int, device: torch.device) -> Tensor:
        """Return random float32 (rows, steps) in [0, 1); row i depends only on seed + i."""
        draws = torch.empty(rows, steps, device="cpu")  # regardless of torch's default device
        for row, draw in enumerate(draws):
            draw.uniform_(generator=torch.Generator().manual_seed((self.seed + row) % 2**63))
        return draws.to(device)

    def log_weights(self, logits: Tensor) -> Tensor:
        """Return scaled float32 logits, (..., vocab_size), with -inf for excluded tokens.

        The order of steps and the handling of ties are those of transformers'
        TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper.
        """
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kth = torch.topk(scores, self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.top_p < 1:
            ordered, order = torch.sort(scores, descending=False)
            # Drop the tail that holds 1 - top_p of the probability; keep the most likely token.
            drop = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop[..., -1] = False
            scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
        return scores

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Return the next token of each row, int64 (batch,); -1 where logits are not finite.

        -inf is allowed as long as another logit is finite. logits: (batch, vocab_size).
        uniform: (batch,), in [0, 1).
        """
        if self.is_greedy:
            largest, token = _largest(logits)
            return token.masked_fill((largest - largest).isnan(), -1)  # inf - inf is NaN, too
        # In float64 no token of the vocabulary is lost to the rounding of a running sum.
        cumulative = torch.softmax(self.log_weights(logits).double(), -1).cumsum(-1)
        threshold = uniform.double()[:, None] * cumulative[:, -1:]
        # right=True: the first token whose running sum exceeds the threshold, never one of
        # probability zero.
        token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        return token.clamp_(max=logits.shape[-1] - 1).masked_fill(threshold[:, 0].isnan(), -1)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's maximum and its first index; NaN counts as the largest."""
    if logits.is_cpu and logits.dtype == torch.float32:
        # torch's own maximum on the CPU is not vectorized: it takes several times as long.
        token = torch.from_numpy(logits.numpy().argmax(-1))
        return logits.gather(-1, token[:, None])[:, 0], token
    largest, token = logits.max(-1)
    return largest, token
