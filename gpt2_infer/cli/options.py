"""The options that several commands share: types with their limits, and groups of options."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from cyclopts import CoercionError, Parameter
from cyclopts.annotations import resolve_optional
from msgspec import Meta

from gpt2_infer.config import ProductsName
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from cyclopts import Token
    from cyclopts.argument import ArgumentCollection

    from gpt2_infer.model import GPT2
    from gpt2_infer.request import Request

DEFAULT_PROMPT = "Hello, I'm a language model,"  # as in the case study
MOST = 2**31 - 1  # kernels take 32-bit integers


def no_word_is_none(_: object, __: object, arguments: ArgumentCollection) -> None:
    """Read the words none and null like any other, also for an option that is None by default."""
    for argument in arguments:
        argument.hint = resolve_optional(argument.hint)


def matching(pattern: str, what: str, build: Callable[[str], Any], **more: Any) -> Parameter:
    """Return a parameter whose word must match a pattern; what: the pattern in words."""
    word = Annotated[str, Meta(pattern=rf"\A({pattern})\Z")]
    return _converted(word, what, build, **more)


def _number(kind: type, what: str, limits: Meta) -> Parameter:
    """Return a parameter with the limits that msgspec also checks for mcp; what: both in words."""
    return _converted(Annotated[kind, limits], what, lambda number: number)


def _converted(kind: Any, what: str, build: Callable[[Any], Any], **more: Any) -> Parameter:
    def convert(_: object, tokens: Sequence[Token]) -> Any:
        text = tokens[0].value
        try:
            value = msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            # The message of a ValueError is lost if the option takes several values.
            message = f"must be {what}, not {text[:40]!r}"
            raise CoercionError(msg=message, token=tokens[0]) from None
        return build(value)

    return Parameter(converter=convert, **more)


def see_only(device: str) -> str:
    """Hide all GPUs except that of "cuda:1" from this process and those it starts; return "cuda".

    So whatever takes the first or the current GPU takes that one, also in a worker. Raises
    UnavailableDeviceError, also if CUDA has started in this process: it looks only once.
    """
    kind, _, index = device.partition(":")
    if not index:
        return kind
    import torch

    from gpt2_infer.errors import UnavailableDeviceError

    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    visible = [*map(str, range(1000))] if before is None else before.split(",")
    os.environ[name] = dict(enumerate(visible)).get(int(index), "")
    has_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_started or torch.cuda.device_count() != 1:
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}
        raise UnavailableDeviceError(f"{device}: this machine has no such CUDA device")
    return kind


_ONE, _TWO, _ZERO = Meta(ge=1, le=MOST), Meta(ge=2, le=MOST), Meta(ge=0, le=MOST)
_SEED, _SECONDS = Meta(ge=0, le=2**63 - 1), Meta(gt=0, le=threading.TIMEOUT_MAX)
Count: TypeAlias = Annotated[int, _ONE, _number(int, f"an integer from 1 to {MOST}", _ONE)]
Rounds: TypeAlias = Annotated[int, _TWO, _number(int, f"an integer from 2 to {MOST}", _TWO)]
Size: TypeAlias = Annotated[int, _ZERO, _number(int, f"an integer from 0 to {MOST}", _ZERO)]
Seed: TypeAlias = Annotated[int, _SEED, _number(int, "an integer from 0 to 2^63 - 1", _SEED)]
Seconds: TypeAlias = Annotated[
    float, _SECONDS, _number(float, "a positive number of seconds", _SECONDS)
]
Device: TypeAlias = Annotated[
    Literal["cuda", "cpu"],
    matching(
        r"cpu|cuda(:\d{1,3})?",
        "a device, cuda, cuda:1 or the like, or cpu",
        see_only,
        show_choices=False,
    ),
]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
KernelDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float64"]

MANY = Parameter(consume_multiple=1)
HIDDEN = Parameter(parse=False)
BACKEND = Parameter(name="BACKEND")
TIMEOUT = Parameter(name="--timeout")
Counts: TypeAlias = Annotated[tuple[Count, ...], MANY]
Names: TypeAlias = Annotated[tuple[str, ...], MANY]


@dataclass(frozen=True)
class Model:
    """The model, and where and how it runs.

    Attributes:
        model: hub id, local folder, or "demo" for the bundled model
        revision: branch, tag or commit of a hub id
        random_weights: random weights in the size of --model, without a download, for timing
        device: cuda, cuda:1 or the like, or cpu (default: cuda if available)
        dtype: dtype of weights, activations and cache
        products: float32 products of layers on cuda: ieee-fp32, or 3xfp16 on tensor cores
    """

    model: str = "openai-community/gpt2"
    revision: str | None = None
    random_weights: bool = False
    device: str | None = None
    dtype: Dtype = "float32"
    products: ProductsName = "ieee-fp32"

    def load(self, request: dict[str, Any], **more: Any) -> tuple[GPT2, Request]:
        """Return the model and the request; the request is checked before any weight is read.

        more: further arguments of GPT2.from_pretrained().
        """
        from gpt2_infer.checkpoint import open_checkpoint, resolve_device
        from gpt2_infer.model import GPT2
        from gpt2_infer.request import Request

        device = resolve_device(self.device)
        checkpoint = open_checkpoint(
            self.model, revision=self.revision, random_weights=self.random_weights
        )
        checked = Request(config=checkpoint.config, tokenizer=checkpoint.tokenizer, **request)
        how: dict[str, Any] = {"device": device, "dtype": self.dtype, "products": self.products}
        return GPT2.from_pretrained(checkpoint, **how, **more), checked


@dataclass(frozen=True)
class Text:
    """Where a text ends, and how the next token is chosen: greedily without a temperature.

    Attributes:
        max_new_tokens: maximum number of new tokens per prompt
        stop: stop string, which ends the text before it; repeatable
        ignore_eos: continue past the end-of-text token
        temperature: divisor of the logits; 0 is greedy
        top_k: number of most likely tokens to sample from; 0 is all
        top_p: total probability of the most likely tokens to sample from; 1 is all
        seed: seed of sampling, for prompt i SEED + i, and of random weights (default: 0)
    """

    max_new_tokens: Count = 512
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: Size = 0
    top_p: float = 1.0
    seed: Seed | None = None

    def settings(self, model: Model) -> dict[str, Any]:
        """Return the fields of a request; raises RequestError for a seed that has no effect."""
        from gpt2_infer.sampling import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed or 0)
        if self.seed is not None and sampling.is_greedy and not model.random_weights:
            raise RequestError(
                "--seed needs a temperature above 0: greedy decoding is deterministic"
            )
        ends = {"max_new_tokens": self.max_new_tokens, "stop": self.stop}
        return ends | {"ignore_eos": self.ignore_eos, "sampling": sampling}
