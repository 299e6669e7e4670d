"""The report on two greedy texts, by two backends or two engines, and its verdict.

If neither side has a fault, two different tokens are a tie.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from attention_kernels import BackendSpec
from attention_kernels.contract import AttentionFunction, Kernels, dtype_name
from attention_kernels.precision import PLAIN_PRECISIONS
from gpt2_infer.model import GPT2
from gpt2_infer.request import Mode


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two sides at the examined step."""

    token: int
    """The chosen token; -1 if the logits were not finite."""
    text: str | None
    """The token's text; None without a tokenizer."""
    margin: float
    """The difference between the two largest logits."""

    @property
    def name(self) -> str:
        """The backend or the engine, in words."""
        raise NotImplementedError

    @property
    def findings(self) -> list[str]:
        """Lines of the report, beyond the token and the margin."""
        raise NotImplementedError

    @property
    def faults(self) -> list[str]:
        """One sentence per fault; empty if rounding explains everything."""
        raise NotImplementedError


SideT_co = TypeVar("SideT_co", bound=Side, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Divergence(Generic[SideT_co]):
    """What was compared, and the verdict on its two sides."""

    device: str
    dtype: str
    mode: Mode
    prompt_tokens: int
    new_tokens: int
    step: int | None
    """The index of the first new token that differs, from 0; None if the texts are equal."""
    position: int
    """The number of tokens before the examined one."""
    a: SideT_co
    b: SideT_co

    @property
    def verdict(self) -> Literal["equal", "tie", "bug in A", "bug in B", "bug in both"]:
        """The verdict; equal texts do not rule out a bug."""
        if self.a.faults and self.b.faults:
            return "bug in both"
        if self.a.faults or self.b.faults:
            return "bug in A" if self.a.faults else "bug in B"
        return "equal" if self.step is None else "tie"

    @property
    def passed(self) -> bool:
        """Whether neither side has a bug here."""
        return self.verdict in ("equal", "tie")

    @property
    def untried(self) -> str:
        """What the texts did not exercise."""
        return f"not tested: more than {self.prompt_tokens + self.new_tokens - 1} tokens at once"

    @property
    def differences(self) -> list[str]:
        """Lines of the report on the difference between A and B."""
        return []

    def to_json(self) -> dict[str, Any]:
        """Return every field, the verdict and the faults; null for a number that is not finite."""
        value = {"verdict": self.verdict, **asdict(self), "untried": self.untried}
        for name, side in (("a", self.a), ("b", self.b)):
            value[name]["faults"] = side.faults
        finite: dict[str, Any] = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return finite

    def __str__(self) -> str:
        """Return a readable report; the last line is the verdict."""
        sides = {"A": self.a, "B": self.b}
        lines = [
            f"{self.device}, {self.dtype}, {self.mode}, {self.prompt_tokens} prompt tokens and "
            f"{self.new_tokens} new ones",
            "the texts are equal"
            if self.step is None
            else f"the texts diverge in step {self.step}",
            f"step {self.position - self.prompt_tokens} is examined, the token at position "
            f"{self.position}",
        ]
        for letter, side in sides.items():
            chosen = f"token {side.token} {side.text!r}, top-2 margin {side.margin:.2e}"
            lines += ["", f"{letter}  {side.name}"]
            lines += [f"   {line}" for line in (chosen, *side.findings)]
        lines += [*self.differences, ""]
        lines += [f"{letter}: {fault}" for letter, side in sides.items() for fault in side.faults]
        lines += [self.untried] if self.passed else []
        wrong = dict.fromkeys(side.name for side in sides.values() if side.faults)
        return "\n".join([*lines, self.verdict + (f": {' and '.join(wrong)}" if wrong else "")])


def choice(model: GPT2, token: int, logits: Tensor) -> dict[str, Any]:
    """Return the fields of Side for a token and the logits, (vocab_size), it was chosen from."""
    first, second = logits.topk(2).values.tolist()
    text = model.tokenizer.decode([token]) if model.tokenizer and token >= 0 else None
    return {"token": token, "text": text, "margin": first - second}


def no_budget(where: str, dtype: torch.dtype) -> str:
    """Return the message for a call that has no usable error budget."""
    return (
        f"in {dtype_name(dtype)} plain PyTorch gives NaN, infinity or only zeros in {where}, so "
        "there is no error budget to judge by: try another --dtype"
    )


def unregistered(kernel: AttentionFunction) -> BackendSpec:
    """Return a backend for an unregistered kernel."""
    return BackendSpec(
        name="UNREGISTERED",
        family="none",
        summary="A kernel that only diverge runs.",
        loader=lambda: Kernels(kernel),
        precisions=PLAIN_PRECISIONS,
    )
