"""Compare attention backends: text generation end to end, or the kernel alone.

    python scripts/compare_backends.py --out results/<date>_<machine>_generation.json
    python scripts/compare_backends.py --task kernel --seqlens 1024 4096 --out FILE

A thin layer over gpt2_infer.compare. After Ctrl-C the same command goes on where it was. Every
list of an option is crossed with the others. Without --backends and --families all are compared
that run here and are not emulated.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from attention_kernels import AttentionError
from gpt2_infer import GPT2, GPT2InferError, compare, tables
from gpt2_infer.cli import DEFAULT_PROMPT, DTYPES
from gpt2_infer.generation import MODES
from gpt2_infer.results import Results, output_file
from gpt2_infer.weights import resolve_device


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=("generation", "kernel"), default="generation")
    add("--out", type=output_file, required=True, help="JSON to write")
    add("--name", help="the task's name in the results (default: what --task says)")
    add("--backends", nargs="+", default=[], metavar="NAME")
    add("--families", nargs="+", default=[], metavar="NAME", help="see `gpt2-infer backends`")
    add("--baseline", default=compare.BASELINE, metavar="NAME", help="default: %(default)s")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--dtypes", nargs="+", choices=(*DTYPES, "float64"), default=["float32"])
    add("--batch-sizes", nargs="+", type=int, default=[1], metavar="N")
    add("--rounds", type=int, default=5, help="kept, after one that is not (default: %(default)s)")
    text = parser.add_argument_group("generation")
    text.add_argument(
        "--max-tokens",
        nargs="+",
        type=int,
        default=[32, 64, 128, 256, 512],
        metavar="N",
        help="in all, the prompt included",
    )
    text.add_argument("--modes", nargs="+", choices=MODES, default=["recompute"])
    text.add_argument("--model", default="demo", help="as for gpt2-infer (default: %(default)s)")
    text.add_argument("--random-weights", action="store_true", help="as for gpt2-infer")
    text.add_argument("--prompt", default=DEFAULT_PROMPT)
    kernel = parser.add_argument_group("kernel")
    kernel.add_argument(
        "--seqlens",
        nargs="+",
        type=int,
        default=[64, 128, 256, 512, 1024, 2048, 4096],
        metavar="N",
    )
    kernel.add_argument("--heads", type=int, default=12)
    kernel.add_argument("--head-dims", nargs="+", type=int, default=[64], metavar="D")
    kernel.add_argument("--full", action="store_true", help="without the causal mask")
    return parser


def run(arguments: argparse.Namespace) -> Results:
    """Measure what the arguments name; the results are written."""
    device = str(resolve_device(arguments.device))
    specs = compare.select(arguments.backends, device, families=arguments.families)
    baseline = compare.select([arguments.baseline], device)[0].name
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
        random = arguments.random_weights
        return GPT2.from_pretrained(
            arguments.model,
            random_weights=random,
            device=device,
            dtype=dtype,
            attention=arguments.baseline,
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
    arguments = build_parser().parse_args()
    try:
        results = run(arguments)
    except (GPT2InferError, AttentionError) as error:
        print(f"compare_backends: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted: the same command goes on from {arguments.out}.partial")
        return 130
    print(tables.render(Path(arguments.out), results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
