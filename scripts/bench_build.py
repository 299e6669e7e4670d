"""How long the float32 ladder takes to build from nothing, all versions at once.

    python scripts/bench_build.py --out results/<date>_<machine>_build.json

Each round builds into an empty cache: for the GPU architecture named, with nvcc, and for the CPU
emulator, with g++. No GPU is needed.
"""

import argparse

from gpt2_infer.bench import program
from gpt2_infer.bench.studies import BuildStudy
from gpt2_infer.cli.options import ROUNDS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the script."""
    parser.add_argument("--arch", help="compute capability (default: 90)")
    parser.add_argument("--rounds", type=ROUNDS, help="timed rounds (default: 3)")


if __name__ == "__main__":
    program.run(__doc__, BuildStudy, "build", add_options)
