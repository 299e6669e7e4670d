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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the script."""
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--new-tokens", type=int, help="default: 256 on cpu, 504 on cuda")
    parser.add_argument("--rounds", type=int, help="kept, after one that is not (default: 5)")


if __name__ == "__main__":
    program.run(__doc__, TransformersStudy, "generation", add_options)
