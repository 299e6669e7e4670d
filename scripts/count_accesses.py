"""What each version of a ladder asks of memory: requests, bank conflicts, sectors.

    python scripts/count_accesses.py --out results/<date>_cpu_accesses.json

Counted in the emulator, so it needs no GPU and a second run gives the same. Backends whose accesses
cannot be counted are recorded as refused, with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from attention_kernels import AttentionError, backends, ladder
from attention_kernels.accesses import Access, count_accesses
from attention_kernels.build import VersionHeader
from gpt2_infer import bench, tables
from gpt2_infer.results import Results, Series, output_file


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=output_file, required=True, help="JSON to write")
    parser.add_argument("--name", default="accesses", help="the task's name in the results")
    parser.add_argument("--family", default="custom-cuda", help="default: %(default)s")
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    return parser.parse_args()


def main() -> None:
    """Count, write, print."""
    arguments = parse()
    backends()  # registers the ladders
    versions = ladder.versions(arguments.family)
    if not versions:
        sys.exit(f"no ladder is of the family {arguments.family}: {', '.join(ladder.families())}")
    shape = ("seqlen", "batch", "heads", "head_dim", "full")
    settings = {name: getattr(arguments, name) for name in shape} | {"measures": "accesses"}

    def count(version: VersionHeader) -> dict[str, int] | str:
        try:
            return totals(
                count_accesses(
                    version,
                    seqlen=arguments.seqlen,
                    head_dim=arguments.head_dim,
                    batch=arguments.batch,
                    num_heads=arguments.heads,
                    is_causal=not arguments.full,
                )
            )
        except AttentionError as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counted = list(tqdm(pool.map(count, versions.values()), "counting", len(versions), unit=""))
    results = Results(arguments.name, bench.provenance(), settings, [])
    for (name, version), found in zip(versions.items(), counted, strict=True):
        change = {"change": version.title, "family": arguments.family}
        if isinstance(found, str):
            results.series.append(Series(name, change, "count", [], status="refused", reason=found))
            continue
        for metric, value in found.items():
            results.series.append(Series(name, {**change, "metric": metric}, "count", [value]))
    results.write(arguments.out)
    print(tables.render(arguments.out, results))


def totals(accesses: list[Access]) -> dict[str, int]:
    """The counts of a version: by memory and kind, sums, and of the ways the most."""
    found: Counter[str] = Counter()
    for memory, numbers in (
        ("shared", ("requests", "conflicts", "ways")),
        ("global", ("requests", "sectors", "fewest_sectors")),
    ):
        for kind in ("load", "store"):
            mine = [a for a in accesses if a.memory == memory and a.is_store == (kind == "store")]
            for number in numbers:
                values = [getattr(access, number) for access in mine]
                total = max(values, default=0) if number == "ways" else sum(values)
                found[f"{memory}_{kind}_{number}"] = total
    return dict(found)


if __name__ == "__main__":
    main()
