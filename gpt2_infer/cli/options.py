"""The parser, and the options that several commands share.

argparse, not click: click has no option that takes several values, as in --dtypes float32 float16.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from gpt2_infer.cli.console import EXIT_BAD_INPUT, print_error

DEFAULT_PROMPT = "Hello, I'm a language model,"  # the case study's
DTYPES = ("float32", "float16", "bfloat16")
MODEL = 'hub id, local folder, or "demo" for the bundled model (default: %(default)s)'
RANDOM_WEIGHTS = (
    "build the size that --model names (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, demo "
    "or a folder's) from a seed, without a download: for timing, as the text means nothing"
)


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors; the scripts use it too."""

    def error(self, message: str) -> NoReturn:
        """End the process with the message and a pointer to --help."""
        print_error(self.prog, f"{message} (see {self.prog} --help)")
        raise SystemExit(EXIT_BAD_INPUT)


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that say which model to load, where and in which dtype."""
    add = parser.add_argument
    add("--model", default="openai-community/gpt2", metavar="NAME", help=MODEL)
    add("--revision", help="branch, tag or commit of a hub id")
    add("--random-weights", action="store_true", help=RANDOM_WEIGHTS)
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
