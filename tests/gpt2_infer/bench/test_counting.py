from __future__ import annotations

from attention_kernels.inspection.accesses import Access, MemoryRequest
from gpt2_infer.bench import counting


def access(memory: str, kind: str, **numbers: int) -> Access:
    counts = {"requests": 1, "wavefronts": 1, "conflicts": 0, "ways": 1}
    counts |= {"sectors": 0, "fewest_sectors": 0}
    request = MemoryRequest(0, 0, 1, "dynamic", (0,) * 32)
    return Access((1,), "x", memory, kind, 4, **{**counts, **numbers}, costliest=request)


def test_totals_are_sums_except_for_ways():
    counted = [
        access("shared", "load", requests=10, conflicts=31, ways=32),
        access("shared", "load", requests=5, conflicts=1, ways=2),
        access("global", "load", requests=2, sectors=64, fewest_sectors=8),
        access("global", "TMA load", requests=3, sectors=7),
        access("shared", "TMA load", requests=3, wavefronts=9),
        access("shared", "wgmma", requests=5, wavefronts=20),
    ]
    found = counting.totals(counted)
    assert {name: value for name, value in found.items() if value} == {
        "shared_load_requests": 15,
        "shared_load_conflicts": 32,
        "shared_load_ways": 32,
        "global_load_requests": 2,
        "global_load_sectors": 64,
        "global_load_fewest_sectors": 8,
        "tma_load_requests": 3,
        "tma_load_bytes": 12,
        "tma_load_sectors": 7,
        "wgmma_requests": 5,
        "wgmma_wavefronts": 20,
    }
