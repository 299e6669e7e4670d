"""The parser, and the options that several commands share.

argparse, not click: click has no options with several values, as in --dtypes float32 float16.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from gpt2_infer.cli.console import EXIT_BAD_INPUT, print_error, print_warning, show
from gpt2_infer.config import PRODUCTS
from gpt2_infer.errors import RequestError, integer_error

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from gpt2_infer.sampling import Sampling

DEFAULT_PROMPT = "Hello, I'm a language model,"  # as in the case study
DTYPES = ("float32", "float16", "bfloat16")
MODEL = 'hub id, local folder, or "demo" for the bundled model (default: %(default)s)'
RANDOM_WEIGHTS = (
    "random weights from a seed, in the size of --model (gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
    "distilgpt2, demo or a folder), without a download: for timing, as the text means nothing"
)
TEMPERATURE = "divisor of the logits; 0 is greedy (default)"
TOP_K = "number of most likely tokens to sample from; 0 is all (default)"
TOP_P = "total probability of the most likely tokens to sample from; 1 is all (default)"
SEED_HELP = "seed of sampling, for prompt i SEED + i, and of random weights (default: 0)"
MAX_NEW_TOKENS = "maximum number of new tokens per prompt (default: %(default)s)"
STOP = "stop string, which ends the text before it; repeatable"
DEVICE = "device: cuda, cuda:1 or the like, or cpu (default: cuda if available, else cpu)"
PRODUCTS_HELP = (
    "how layers multiply float32 matrices of two rows or more on cuda: ieee-fp32, or 3xfp16, three "
    "products of float16 numbers on tensor cores, about as exact (default: %(default)s)"
)
SEQLEN = "sequence length in tokens (default: %(default)s)"
TIMEOUT = "time limit in seconds (default: 600)"
FORMER_FAMILIES = {"custom-cuda": "fp32", "flash-attention-1": "fa1", "wmma-fa2": "wmma_fa2"}
HEAD_DIM = "head dimension (default: 64, or the first supported)"


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an option type for integers in a range, by default int32, which kernels take."""

    def convert(text: str) -> int:
        # No range reaches 20 digits, and Python refuses to convert more than 4,300.
        value = int(text) if re.fullmatch(r"-?\d{1,19}", text) else text[:40]
        if error := integer_error(value, low, high):
            raise argparse.ArgumentTypeError(error)
        return int(value)

    return convert


POSITIVE = integer(1)
ROUNDS = integer(2)  # one sample has no spread
SEED = integer(0, 2**63 - 1)


def device_name(text: str) -> str:
    """Convert --device."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(
            f"must be a device, cuda, cuda:1 or the like, or cpu, not {text[:40]!r}"
        )
    return text


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


def seconds(text: str) -> float:
    """Convert a time limit, which must be positive and finite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text[:40]!r}")
    return value


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors; the scripts use it too."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Write the text of --help and --version; argparse itself ignores write errors."""
        if file is sys.stdout:
            show(message, end="")
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """End the process with the message and a pointer to --help."""
        print_error(self.prog, f"{message} (see {self.prog} --help)")
        raise SystemExit(EXIT_BAD_INPUT)


class Former(argparse.Action):
    """The former name of a choice: it still works, and standard error says what to write."""

    def __init__(self, option_strings: Sequence[str], *, instead: str, **fields: Any) -> None:
        super().__init__(option_strings, nargs=0, help=argparse.SUPPRESS, **fields)
        self.instead = instead

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object
    ) -> None:
        """Set the choice."""
        setattr(namespace, self.dest, self.const)
        print_warning(parser.prog, f"{self.option_strings[0]} is deprecated: use {self.instead}")


def current_family(name: str) -> str:
    """Return a family's name, given that or what version 0.1 called it."""
    current = FORMER_FAMILIES.get(name, name)
    if current != name:
        print_warning("gpt2-infer", f"the family {name} is deprecated: use {current}")
    return current


def add_shape_options(add: Callable[..., object], *, heads: int) -> None:
    """Add the options for a kernel and, except for seqlen, the shape of its inputs."""
    add("name", metavar="BACKEND", help="backend name or version file, *.cu")
    add("--head-dim", type=POSITIVE, metavar="D", help=HEAD_DIM)
    add("--batch", type=POSITIVE, default=1, help="batch size (default: %(default)s)")
    add("--heads", type=POSITIVE, default=heads, help="number of heads (default: %(default)s)")
    add("--full", action="store_true", help="omit the causal mask")


def add_model_options(parser: argparse._ActionsContainer, *, device: bool = True) -> None:
    """Add the options for the model, its dtype and, with `device`, the device."""
    add = parser.add_argument
    add("--model", default="openai-community/gpt2", metavar="NAME", help=MODEL)
    add("--revision", help="branch, tag or commit of a hub id")
    add("--random-weights", action="store_true", help=RANDOM_WEIGHTS)
    if device:
        add("--device", type=device_name, metavar="NAME", help=DEVICE)
    add("--dtype", choices=DTYPES, default="float32", help="dtype (default: %(default)s)")
    add("--products", choices=PRODUCTS, default="ieee-fp32", help=PRODUCTS_HELP)


def add_text_options(add: Callable[..., object]) -> None:
    """Add the options for where a text ends."""
    add("--max-new-tokens", type=POSITIVE, default=512, metavar="N", help=MAX_NEW_TOKENS)
    add("--stop", action="append", default=[], metavar="TEXT", help=STOP)
    add("--ignore-eos", action="store_true", help="continue past the end-of-text token")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for how the next token is chosen."""
    add = parser.add_argument_group("sampling (greedy without --temperature)").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help=TEMPERATURE)
    add("--top-k", type=integer(0), default=0, metavar="K", help=TOP_K)
    add("--top-p", type=float, default=1.0, metavar="P", help=TOP_P)
    add("--seed", type=SEED, help=SEED_HELP)


def make_sampling(arguments: argparse.Namespace) -> Sampling:
    """Return the sampling options; raises RequestError for a seed that has no effect."""
    from gpt2_infer.sampling import Sampling

    seed = 0 if arguments.seed is None else arguments.seed
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, seed)
    if arguments.seed is not None and sampling.is_greedy and not arguments.random_weights:
        raise RequestError("--seed needs a temperature above 0: greedy decoding is deterministic")
    return sampling
