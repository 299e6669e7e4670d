"""What the compiler and the source say of each version of a ladder; no GPU is needed.

    python scripts/inspect_kernels.py --out results/<date>_cpu_inspect.json

Registers, spills, shared memory and occupancy are ptxas's, for one architecture; requests, bank
conflicts and sectors are counted in the emulator. A second run gives the same.
"""

import argparse

from gpt2_infer.bench import program
from gpt2_infer.bench.studies import InspectionStudy


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the script."""
    program.add_shape(parser)
    parser.add_argument("--arch", help="compute capability (default: 90)")


if __name__ == "__main__":
    program.run(__doc__, InspectionStudy, "inspect", add_options)
