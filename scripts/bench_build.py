"""How long the float32 ladder takes to build from nothing, all versions at once.

    python scripts/bench_build.py --out results/<date>_<machine>_build.json

Each round builds into an empty cache: for the GPU architecture named, with nvcc, and for the CPU
emulator, with g++. No GPU is needed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

from attention_kernels.ladder import build, compilers, header
from gpt2_infer.bench import environment, timing
from gpt2_infer.bench.compare import MIN_ROUNDS
from gpt2_infer.bench.results import OUT_HELP, Results, Series, at_least, output_file
from gpt2_infer.cli import Parser


def main() -> None:
    """Build, write, print."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file, required=True, help=OUT_HELP)
    parser.add_argument("--arch", default="90", help="compute capability, e.g. 90")
    parser.add_argument("--rounds", type=at_least(MIN_ROUNDS), default=3)
    arguments = parser.parse_args()
    versions = header.versions()
    targets: dict[str, tuple[compilers.Target, str]] = {
        f"nvcc, sm_{arguments.arch}": ("cuda", arguments.arch),
        "g++, emulator": ("emulator", ""),
    }

    def cold(target: compilers.Target, arch: str) -> float:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["ATTENTION_KERNELS_CACHE"] = cache
            started = time.perf_counter()
            built = build.build_many(versions, target, arch)
            seconds = time.perf_counter() - started
        for op, outcome in built.items():
            if isinstance(outcome, compilers.BuildError):
                raise SystemExit(f"{op} was not built: {outcome}")
        return seconds

    runs = {name: (lambda what=what: cold(*what)) for name, what in targets.items()}
    settings = {"rounds": arguments.rounds, "jobs": os.cpu_count()}
    results = Results("build", environment.provenance(), settings, [])
    samples = timing.interleave(runs, rounds=arguments.rounds, warm_up=0)
    results.series = [
        Series(name, {"versions": len(versions)}, "s", [round(value, 3) for value in values])
        for name, values in samples.items()
    ]
    results.write(arguments.out)
    for one in results.series:
        low, high = one.spread
        print(f"{one.name}: {one.median:.1f} s ({low:.1f} .. {high:.1f}), {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
