"""What the compiler and the emulator say of each version of a ladder; no GPU is needed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import Access, count_accesses
from attention_kernels.inspection.resources import Resources, resource_table
from attention_kernels.ladder import compilers
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.results import Inspected, Inspection, Shape
from gpt2_infer.bench.tables import KINDS
from gpt2_infer.errors import RequestError


def inspect_ladder(
    family: str, shape: Shape, arch: str, *, task: str, out: Path | None
) -> Inspection:
    """Inspect every version of a ladder: a second run gives the same.

    Registers, spills, shared memory and occupancy are ptxas's; requests, bank conflicts and sectors
    are counted in the emulator. A version whose accesses cannot be counted is refused, with the
    reason. Raises RequestError, or BuildError without nvcc.
    """
    versions = selection.versions_of(family)
    compiled = [version for version in versions.values() if not version.is_host]
    head_dims = sorted({head_dim for version in compiled for head_dim in version.head_dims})
    if shape.head_dim not in head_dims:
        raise RequestError(
            f"no version of {family} takes head_dim {shape.head_dim}: there are "
            f"{', '.join(map(str, head_dims))}"
        )
    rows = resource_table(compiled, [arch], [shape.head_dim])
    nvcc = compilers.output_of([str(compilers.find_nvcc()), "--version"])
    release = re.search(r"release ([\d.]+)", nvcc)

    def count(version: VersionHeader) -> tuple[dict[str, float], str]:
        try:
            accesses = count_accesses(
                version,
                seqlen=shape.seqlen,
                head_dim=shape.head_dim,
                batch=shape.batch,
                num_heads=shape.heads,
                is_causal=not shape.full,
            )
        except UnsupportedError as error:
            return {}, "; ".join(error.reasons)
        return totals(accesses), ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        work = pool.map(count, versions.values())
        counted = list(tqdm(work, "counting accesses", len(versions), unit="", disable=None))
    results = Inspection(
        task=task,
        provenance=environment.provenance(),
        family=family,
        shape=shape,
        arch=arch,
        nvcc=release[1] if release else nvcc,
        versions=[
            Inspected(
                name=name,
                change=version.title,
                metrics=resources([row for row in rows if row.version == version.label]) | accesses,
                refused=reason,
            )
            for (name, version), (accesses, reason) in zip(versions.items(), counted, strict=True)
        ],
    )
    if out:
        results.write(out)
    return results


def resources(rows: Sequence[Resources]) -> dict[str, float]:
    """Return what a version's kernels take of a multiprocessor: of several, the worst."""
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
    """Return a version's counts by memory and kind: sums, and the most of the ways."""
    found: Counter[str] = Counter()
    for memory, numbers in (
        ("shared", ("requests", "conflicts", "ways")),
        ("global", ("requests", "sectors", "fewest_sectors")),
    ):
        for kind in KINDS:
            mine = [a for a in accesses if a.memory == memory and a.kind == kind]
            for number in numbers:
                values = [getattr(access, number) for access in mine]
                total = max(values, default=0) if number == "ways" else sum(values)
                found[f"{memory}_{kind}_{number}"] = total
    return dict(found)
