"""The options that several commands share: types with their limits, and groups of options."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import CoercionError, Parameter
from msgspec import Meta

from gpt2_infer.config import ProductsName
from gpt2_infer.errors import RequestError, integer_error

if TYPE_CHECKING:
    from cyclopts import Token

    from attention_kernels import BackendSpec
    from gpt2_infer.model import GPT2
    from gpt2_infer.request import Request

DEFAULT_PROMPT = "Hello, I'm a language model,"  # as in the case study
_INT32 = 2**31 - 1  # which kernels take


def wrong(tokens: Sequence[Token], message: str) -> CoercionError:
    """Return the error for a value; a ValueError's message is lost for one of several values."""
    return CoercionError(msg=message, token=tokens[0])


def _integer(limits: Meta) -> Parameter:
    """Return how the command line reads an integer; msgspec checks the same limits for mcp."""

    def convert(_: object, tokens: Sequence[Token]) -> int:
        text = tokens[0].value
        # No range reaches 20 digits, and Python refuses to convert more than 4,300.
        value = int(text) if re.fullmatch(r"-?\d{1,19}", text) else text[:40]
        assert limits.ge is not None
        assert limits.le is not None
        if error := integer_error(value, int(limits.ge), int(limits.le)):
            raise wrong(tokens, error)
        return int(value)

    return Parameter(converter=convert)


def _seconds(_: object, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise wrong(tokens, f"must be a positive number of seconds, not {text[:40]!r}")
    return value


def _device(_: object, tokens: Sequence[Token]) -> str:
    text = tokens[0].value
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise wrong(
            tokens, f"must be a device, cuda, cuda:1 or the like, or cpu, not {text[:40]!r}"
        )
    return see_only(text)


_ONE, _ZERO, _TWO = Meta(ge=1, le=_INT32), Meta(ge=0, le=_INT32), Meta(ge=2, le=_INT32)
_SEED, _SECONDS = Meta(ge=0, le=2**63 - 1), Meta(gt=0, le=threading.TIMEOUT_MAX)
Count: TypeAlias = Annotated[int, _ONE, _integer(_ONE)]
Size: TypeAlias = Annotated[int, _ZERO, _integer(_ZERO)]
Rounds: TypeAlias = Annotated[int, _TWO, _integer(_TWO)]  # one sample has no spread
Seed: TypeAlias = Annotated[int, _SEED, _integer(_SEED)]
Seconds: TypeAlias = Annotated[float, _SECONDS, Parameter(converter=_seconds)]
Device: TypeAlias = Annotated[
    Literal["cuda", "cpu"], Parameter(converter=_device, show_choices=False)
]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
KernelDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float64"]

MANY = Parameter(consume_multiple=1)
HIDDEN = Parameter(parse=False)
BACKEND = Parameter(name="BACKEND", help="backend name or version file, *.cu")
DEVICE = Parameter(help="device: cuda, cuda:1 or the like, or cpu (default: cuda if available)")
HEAD_DIM = Parameter(help="head dimension (default: 64, or the first supported)")
FULL = Parameter(help="omit the causal mask")
SEQLEN = Parameter(help="sequence length in tokens")
HEADS = Parameter(help="number of heads")
BATCH = Parameter(help="batch size")
TIMEOUT = Parameter(name="--timeout", help="time limit in seconds")
MODEL = 'hub id, local folder, or "demo" for the bundled model'
RANDOM_WEIGHTS = (
    "random weights from a seed, in the size of --model (gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
    "distilgpt2, demo or a folder), without a download: for timing, as the text means nothing"
)
PRODUCTS = (
    "how layers multiply float32 matrices of two rows or more on cuda: ieee-fp32, or 3xfp16, three "
    "products of float16 numbers on tensor cores, about as exact"
)
TEXT_SEED = "seed of sampling, for prompt i SEED + i, and of random weights (default: 0)"


@dataclass(frozen=True)
class Model:
    """The model, and where and how it runs."""

    model: Annotated[str, Parameter(help=MODEL)] = "openai-community/gpt2"
    revision: Annotated[str | None, Parameter(help="branch, tag or commit of a hub id")] = None
    random_weights: Annotated[bool, Parameter(help=RANDOM_WEIGHTS)] = False
    device: Annotated[Device | None, DEVICE] = None
    dtype: Annotated[Dtype, Parameter(help="dtype")] = "float32"
    products: Annotated[ProductsName, Parameter(help=PRODUCTS)] = "ieee-fp32"

    def load(
        self,
        *,
        request: dict[str, Any],
        attention: BackendSpec | None = None,
        decode_attention: BackendSpec | None = None,
        seed: int = 0,
    ) -> tuple[GPT2, Request]:
        """Return the model and the request; the request is checked before any weight is read."""
        from gpt2_infer.checkpoint import open_checkpoint, resolve_device, resolve_dtype
        from gpt2_infer.model import GPT2
        from gpt2_infer.request import Request

        device = resolve_device(self.device)
        checkpoint = open_checkpoint(
            self.model, revision=self.revision, random_weights=self.random_weights
        )
        checked = Request(config=checkpoint.config, tokenizer=checkpoint.tokenizer, **request)
        model = GPT2.from_checkpoint(
            checkpoint,
            device=device,
            dtype=resolve_dtype(self.dtype),
            attention=attention,
            decode_attention=decode_attention,
            products=self.products,
            seed=seed,
        )
        return model, checked


@dataclass(frozen=True)
class Text:
    """Where a text ends, and how the next token is chosen: greedily without a temperature."""

    max_new_tokens: Annotated[Count, Parameter(help="maximum number of new tokens per prompt")] = (
        512
    )
    stop: Annotated[
        tuple[str, ...], Parameter(help="stop string, which ends the text before it; repeatable")
    ] = ()
    ignore_eos: Annotated[bool, Parameter(help="continue past the end-of-text token")] = False
    temperature: Annotated[float, Parameter(help="divisor of the logits; 0 is greedy")] = 0.0
    top_k: Annotated[Size, Parameter(help="most likely tokens to sample from; 0 is all")] = 0
    top_p: Annotated[
        float, Parameter(help="total probability of the most likely tokens to sample; 1 is all")
    ] = 1.0
    seed: Annotated[Seed | None, Parameter(help=TEXT_SEED)] = None

    def settings(self, model: Model) -> dict[str, Any]:
        """Return the fields of a request; raises RequestError for a seed that has no effect."""
        from gpt2_infer.sampling import Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed or 0)
        if self.seed is not None and sampling.is_greedy and not model.random_weights:
            raise RequestError(
                "--seed needs a temperature above 0: greedy decoding is deterministic"
            )
        ends = ("max_new_tokens", "stop", "ignore_eos")
        return {name: asdict(self)[name] for name in ends} | {"sampling": sampling}


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
