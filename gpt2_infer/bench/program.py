"""What the scripts that run one study share: --out, --name, one-line errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_kernels import AttentionError
from gpt2_infer import GPT2InferError
from gpt2_infer.bench import studies
from gpt2_infer.cli import Parser


def run(
    description: str | None,
    kind: type[studies.Study],
    task: str,
    add_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Parse the command line into a study of this kind, run it, and print its table.

    Options that are not given have the defaults of the study.
    """
    parser = Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON to write; a file there is not overwritten"
    )
    parser.add_argument("--name", default=task, help="the task's name (default: %(default)s)")
    add_options(parser)
    options: dict[str, Any] = vars(parser.parse_args())
    out, name = options.pop("out"), options.pop("name")
    try:
        print(studies.run(studies.make(kind, options), name, out))
    except (GPT2InferError, AttentionError) as error:
        parser.error(str(error))


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options of a study of a ladder: which one, and in which shape."""
    parser.add_argument("--family", help="default: fp32")
    for name in ("--seqlen", "--batch", "--heads", "--head-dim"):
        parser.add_argument(name, type=int)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
