"""Compare attention backends: text generation end to end, or the kernel alone.

    python scripts/compare_backends.py --out results/<date>_<machine>_generation.json
    python scripts/compare_backends.py --task kernel --seqlens 1024 4096 --out FILE

A thin layer over gpt2_infer.bench.compare. After Ctrl-C the same command goes on where it was.
Every list of an option is crossed with the others. Without --backends and --families all are
compared that run here and are not emulated.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attention_kernels import AttentionError, ladder
from gpt2_infer import GPT2, GPT2InferError
from gpt2_infer.bench import compare, tables
from gpt2_infer.bench.results import (
    OUT_HELP,
    ROUNDS_HELP,
    Results,
    at_least,
    output_file,
    task_name,
)
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.cli import DEFAULT_PROMPT, DTYPES, Parser
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import MODES

GENERATION = {
    "max_tokens": [32, 64, 128, 256, 512],
    "modes": ["recompute"],
    "model": "demo",
    "random_weights": False,
    "prompt": DEFAULT_PROMPT,
}
KERNEL = {
    "seqlens": [64, 128, 256, 512, 1024, 2048, 4096],
    "heads": 12,
    "head_dims": [64],
    "full": False,
}


def build_parser() -> argparse.ArgumentParser:
    """The command line; the options of one task are None until parse() fills in its defaults."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=("generation", "kernel"), default="generation")
    add("--out", type=output_file, required=True, help=OUT_HELP)
    add("--name", type=task_name, help="the task's name in the results (default: what --task says)")
    add("--backends", nargs="+", default=[], metavar="NAME", help="or version files, *.cu")
    add("--families", nargs="+", default=[], metavar="NAME", help="see `gpt2-infer backends`")
    add(
        "--baseline",
        default=compare.BASELINE,
        metavar="NAME",
        help="or a version file, *.cu (default: %(default)s)",
    )
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--dtypes", nargs="+", choices=(*DTYPES, "float64"), default=["float32"])
    add("--batch-sizes", nargs="+", type=at_least(1), default=[1], metavar="N")
    add("--rounds", type=at_least(compare.MIN_ROUNDS), default=5, help=ROUNDS_HELP)
    text = parser.add_argument_group("generation").add_argument
    text(
        "--max-tokens", nargs="+", type=at_least(1), metavar="N", help="in all, the prompt included"
    )
    text("--modes", nargs="+", choices=MODES, help="default: recompute")
    text("--model", help="as for gpt2-infer (default: demo)")
    text("--random-weights", action="store_true", default=None, help="as for gpt2-infer")
    text("--prompt", help=f"default: {DEFAULT_PROMPT!r}")
    kernel = parser.add_argument_group("kernel").add_argument
    kernel("--seqlens", nargs="+", type=at_least(1), metavar="N")
    kernel("--heads", type=at_least(1), help="default: 12")
    kernel("--head-dims", nargs="+", type=at_least(1), metavar="D", help="default: 64")
    kernel("--full", action="store_true", default=None, help="without the causal mask")
    return parser


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an option of the other task is an error, not ignored."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    mine, others = (GENERATION, KERNEL) if arguments.task == "generation" else (KERNEL, GENERATION)
    for name in others:
        if getattr(arguments, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is not for --task {arguments.task}")
    for name, default in mine.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return arguments


def run(arguments: argparse.Namespace) -> Results:
    """Measure what the arguments name; the results are written."""
    device = str(resolve_device(arguments.device))
    specs = compare.select(
        arguments.backends, device, families=arguments.families, dtypes=arguments.dtypes
    )
    (baseline,) = compare.select([arguments.baseline], device)
    for spec in [baseline, *map(ladder.resolve, arguments.backends)]:
        if not {*arguments.dtypes} & {*spec.dtypes}:
            raise RequestError(f"{spec.name} takes {', '.join(spec.dtypes)}: see --dtypes")
    options = {"rounds": arguments.rounds, "out": arguments.out, "baseline": baseline}
    task = arguments.name or arguments.task
    if arguments.task == "kernel":
        kernel_cells = [
            compare.KernelCell(n, batch, arguments.heads, head_dim, dtype, not arguments.full)
            for dtype, batch, head_dim, n in itertools.product(
                arguments.dtypes, arguments.batch_sizes, arguments.head_dims, arguments.seqlens
            )
        ]
        return compare.compare_kernels(specs, kernel_cells, device=device, task=task, **options)

    def load(dtype: torch.dtype) -> GPT2:
        return GPT2.from_pretrained(
            arguments.model,
            random_weights=arguments.random_weights,
            device=device,
            dtype=dtype,
            attention=compare.BASELINE,  # never run as such, and there in every dtype
        )

    cells = [
        compare.GenerationCell(n, batch, dtype, mode)
        for dtype, batch, mode, n in itertools.product(
            arguments.dtypes, arguments.batch_sizes, arguments.modes, arguments.max_tokens
        )
    ]
    name = arguments.model + (", random weights, seed 0" if arguments.random_weights else "")
    return compare.compare_generation(
        load, specs, cells, arguments.prompt, name=name, task=task, **options
    )


def main() -> int:
    """Measure, write, print."""
    arguments = parse()
    try:
        results = run(arguments)
    except (GPT2InferError, AttentionError) as error:
        print(f"compare_backends: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        partial = Path(f"{arguments.out}.partial")
        kept = f"the same command goes on from {partial}" if partial.exists() else "nothing is kept"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        return 130
    print(tables.render(arguments.out, results))
    print(f"wrote {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
