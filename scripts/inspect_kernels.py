"""What the compiler and the source say of each version of a ladder; no GPU is needed.

    python scripts/inspect_kernels.py --out results/<date>_cpu_inspect.json

Registers, spills, shared memory and occupancy are ptxas's, for one architecture; requests, bank
conflicts and sectors are counted in the emulator. A second run gives the same. A version whose
accesses cannot be counted is recorded as refused, with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from attention_kernels import UnsupportedError, ladder
from attention_kernels.inspection.accesses import Access, count_accesses
from attention_kernels.inspection.resources import Resources, resource_table
from attention_kernels.ladder import compilers
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment, tables
from gpt2_infer.bench.results import OUT_HELP, Results, Series, at_least, output_file, task_name
from gpt2_infer.cli import Parser


def parse() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file, required=True, help=OUT_HELP)
    parser.add_argument(
        "--name", type=task_name, default="inspect", help="the task's name in the results"
    )
    parser.add_argument("--family", default="custom-cuda", help="default: %(default)s")
    parser.add_argument("--arch", default="90", help="compute capability (default: %(default)s)")
    parser.add_argument("--seqlen", type=at_least(1), default=128)
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--heads", type=at_least(1), default=1)
    parser.add_argument("--head-dim", type=at_least(1), default=64)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    return parser.parse_args()


def main() -> None:
    """Inspect, write, print."""
    arguments = parse()
    versions = ladder.versions(arguments.family)
    if not versions:
        families = ", ".join(ladder.families())
        sys.exit(f"no ladder is of the family {arguments.family}: there are {families}")
    compiled = [version for version in versions.values() if not version.is_host]
    head_dims = sorted({head_dim for version in compiled for head_dim in version.head_dims})
    if arguments.head_dim not in head_dims:
        sys.exit(
            f"no version of {arguments.family} takes head_dim {arguments.head_dim}: there are "
            f"{', '.join(map(str, head_dims))}"
        )
    shape = ("seqlen", "batch", "heads", "head_dim", "full")
    settings = {name: getattr(arguments, name) for name in (*shape, "arch")}
    rows = resource_table(compiled, [arguments.arch], [arguments.head_dim])
    nvcc = compilers.output_of([str(compilers.find_nvcc()), "--version"])
    release = re.search(r"release ([\d.]+)", nvcc)
    settings |= {"measures": "inspection", "nvcc": release[1] if release else nvcc}

    def count(version: VersionHeader) -> tuple[dict[str, float], str]:
        try:
            accesses = count_accesses(
                version,
                seqlen=arguments.seqlen,
                head_dim=arguments.head_dim,
                batch=arguments.batch,
                num_heads=arguments.heads,
                is_causal=not arguments.full,
            )
        except UnsupportedError as error:
            return {}, "; ".join(error.reasons)
        return totals(accesses), ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        work = pool.map(count, versions.values())
        counted = list(tqdm(work, "counting accesses", len(versions), unit=""))
    results = Results(arguments.name, environment.provenance(), settings, [])
    for (name, version), (accesses, reason) in zip(versions.items(), counted, strict=True):
        labels = {"change": version.title, "family": arguments.family}
        taken = resources([row for row in rows if row.version == version.op])
        for metric, value in {**taken, **accesses}.items():
            results.series.append(Series(name, {**labels, "metric": metric}, "count", [value]))
        if reason:
            results.series.append(Series(name, labels, "count", [], "refused", reason))
    results.write(arguments.out)
    print(tables.render(arguments.out, results))


def resources(rows: Sequence[Resources]) -> dict[str, float]:
    """What a version's kernels take of a multiprocessor: of several, the worst."""
    if not rows:
        return {}
    return {
        "registers": max(row.registers for row in rows),
        "spill_bytes": max(row.spill_stores + row.spill_loads for row in rows),
        "shared_bytes": max(row.static_smem + row.dynamic_smem for row in rows),
        "warps": min(row.warps for row in rows),
        "occupancy_percent": 100 * min(row.occupancy for row in rows),
    }


def totals(accesses: list[Access]) -> dict[str, float]:
    """The counts of a version: by memory and kind, sums, and of the ways the most."""
    found: Counter[str] = Counter()
    for memory, numbers in (
        ("shared", ("requests", "conflicts", "ways")),
        ("global", ("requests", "sectors", "fewest_sectors")),
    ):
        for kind in tables.KINDS:
            mine = [a for a in accesses if a.memory == memory and a.is_store == (kind == "store")]
            for number in numbers:
                values = [getattr(access, number) for access in mine]
                total = max(values, default=0) if number == "ways" else sum(values)
                found[f"{memory}_{kind}_{number}"] = total
    return dict(found)


if __name__ == "__main__":
    main()
