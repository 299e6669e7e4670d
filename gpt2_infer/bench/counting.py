"""Inspect each version of a ladder with the compiler and the emulator, without a GPU."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from tqdm.contrib.concurrent import thread_map

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import BY_LANE, Access, count_accesses
from attention_kernels.inspection.resources import Resources, resource_table
from attention_kernels.ladder import compilers
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import selection
from gpt2_infer.bench.record import Row, Shape
from gpt2_infer.bench.study import Contender, InspectionStudy, Subject


class Counting(Subject[Shape]):
    """Inspects all versions of a ladder; the figures are deterministic.

    Registers, spills, shared memory and occupancy come from ptxas; requests, bank conflicts and
    sectors are counted in the emulator. A version whose accesses cannot be counted is refused, with
    the reason. Raises BuildError without nvcc.
    """

    def __init__(self, study: InspectionStudy) -> None:
        self.study = study
        self.versions = selection.versions_of(study.family)
        self.compiled = [one for one in self.versions.values() if not one.is_host]
        self.cells = [study.shape]
        nvcc = compilers.output_of([str(compilers.find_nvcc()), "--version"])
        release = re.search(r"release ([\d.]+)", nvcc)
        self.facts = {"nvcc": release[1] if release else nvcc}

    def contenders(self, cell: Shape) -> Iterator[Contender]:
        """Compile and count every version."""
        rows = resource_table(self.compiled, [self.study.arch], [cell.head_dim])
        counted = count_all((version, cell) for version in self.versions.values())
        for (name, version), found in zip(self.versions.items(), counted, strict=True):
            metrics = resources([row for row in rows if row.version == version.label])
            row = Row(contender=name, metric="accesses", unit="count")
            if isinstance(found, str):
                row.status, row.reason = "refused", found
            else:
                metrics |= (counts := totals(found))
                row.samples = [sum(counts[one] for one in counts if one.endswith("requests"))]
            row.extra["change"] = version.title
            yield Contender(
                row,
                beside=[
                    Row(contender=name, metric=metric, unit="", samples=[value])
                    for metric, value in metrics.items()
                ],
            )


def count_all(
    calls: Iterable[tuple[VersionHeader, Shape]], timeout_s: float = 600.0
) -> list[list[Access] | str]:
    """Return the accesses of each call of a version, or why they cannot be counted."""

    def count(call: tuple[VersionHeader, Shape]) -> list[Access] | str:
        version, shape = call
        try:
            return count_accesses(version, **msgspec.structs.asdict(shape), timeout_s=timeout_s)
        except UnsupportedError as error:
            return "; ".join(error.reasons)

    return thread_map(
        count, [*calls], desc="counting accesses", max_workers=os.cpu_count(), unit="", disable=None
    )


def resources(rows: Sequence[Resources]) -> dict[str, float]:
    """Return a version's resources: the worst figures if it has several kernels."""
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
    """Return a version's counts by memory and kind: sums, but the maximum of `ways`.

    Copies by TMA and products of warpgroups are counted only if the version has them.
    """
    found: Counter[str] = Counter()
    for memory, numbers in (
        ("shared", ("requests", "conflicts", "ways")),
        ("global", ("requests", "sectors", "fewest_sectors")),
    ):
        for kind in ("load", "store"):
            mine = [a for a in accesses if a.memory == memory and a.kind == kind]
            for number in numbers:
                values = [getattr(access, number) for access in mine]
                total = max(values, default=0) if number == "ways" else sum(values)
                found[f"{memory}_{kind}_{number}"] = total
    for a in accesses:
        if a.kind == "wgmma":
            found["wgmma_requests"] += a.requests
            found["wgmma_wavefronts"] += a.wavefronts
        elif a.memory == "global" and a.kind not in BY_LANE:
            name = a.kind.lower().replace(" ", "_")
            found[f"{name}_requests"] += a.requests
            found[f"{name}_bytes"] += a.requests * a.bytes
            found[f"{name}_sectors"] += a.sectors
    return dict(found)
