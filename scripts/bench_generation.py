"""Generation end to end, ours beside transformers' generate(), in one interleaved run.

    python scripts/bench_generation.py cpu  --out results/<date>_<cpu>_generation-cpu.json
    python scripts/bench_generation.py cuda --out results/<date>_<gpu>_generation-cuda.json

cpu: the demo model, 8 prompt tokens and 256 new ones, with and without a cache.
cuda: GPT-2 small with random weights, float32, 504 new tokens, with each of PyTorch's backends that
takes float32.
Every contender's greedy tokens are compared with transformers' before anything is timed. A sample
is the wall time of the whole call; what our calls spend on warm-up is recorded beside it.
"""

import argparse

from gpt2_infer.bench import program
from gpt2_infer.bench.studies import TransformersStudy
from gpt2_infer.cli.options import POSITIVE, ROUNDS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the script."""
    add = parser.add_argument
    add("device", choices=("cpu", "cuda"))
    add("--new-tokens", type=POSITIVE, help="default: 256 on cpu, 504 on cuda")
    add("--rounds", type=ROUNDS, help="timed rounds, after a warm-up round (default: 5)")


if __name__ == "__main__":
    program.run(__doc__, TransformersStudy, "generation", add_options)
